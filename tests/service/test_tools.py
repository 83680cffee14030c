"""`dead-letters`, `demo`, `bench`: what they do and say."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from batchqueue_async.cli import bench
from batchqueue_async.cli.demonstration import DemoResult, Destination, SocketSink, demonstrate
from batchqueue_async.cli.main import main
from batchqueue_async.durable import DurableQueue

FILE = """\
exporters:
  a: {sink: one, path: queue-a, overflow: block}
  b: {sink: two, path: queue-b, overflow: block}
  m: {sink: three, overflow: block}
sinks: {one: {type: memory}, two: {type: memory}, three: {type: memory}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(FILE)


async def bury(path, count):
    async with DurableQueue.open(path) as queue:
        await queue.put_many([b"%d" % each for each in range(count)])
        await (await queue.lease(count)).dead_letter("refused by the table")


def test_dead_letters_of_a_service_are_listed_put_back_and_deleted(capsys):
    asyncio.run(bury("queue-a", 3))
    assert main(["dead-letters", "list", "s.yaml"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("a:\nseq=")
    assert said.count("reason='refused by the table'") == 3
    assert said.endswith("b: queue-b is not there yet\n")
    assert main(["dead-letters", "list", "s.yaml", "--json"]) == 0
    letters = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["dead-letters", "requeue", "s.yaml", str(letters[0]["seq"]), "--exporter", "a"]) == 0
    assert capsys.readouterr().out == "1 dead letters put into the queue again\n"
    assert main(["dead-letters", "purge", "queue-a", "--json"]) == 0
    assert capsys.readouterr().out == '{"purged": 2}\n'


def test_dead_letters_of_a_process_that_takes_no_commands_are_only_listed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    asyncio.run(bury("queue-a", 1))

    async def run():
        async with DurableQueue.open("queue-a"):
            listed = await asyncio.to_thread(main, ["dead-letters", "list", "queue-a"])
            refused = await asyncio.to_thread(main, ["dead-letters", "requeue", "queue-a"])
            return listed, refused

    assert asyncio.run(run()) == (0, 2)
    said = capsys.readouterr()
    assert "refused by the table" in said.out
    assert "which takes no commands of this user, and nothing was changed; serve `unix:` there" in said.err
    assert "or let its code call Exporter.requeue_dead_letters()" in said.err
    assert main(["disk", "dead-letters", "requeue", "queue-a"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["s.yaml", "--exporter", "c"], "--exporter c: is not in the file; there are a, b"),
        (
            ["s.yaml", "--exporter", "m"],
            "--exporter m: keeps its records in memory; while its process runs, `batchqueue dead-letters requeue m`",
        ),
        (["s.yaml", "7"], "SEQ: numbers belong to one exporter; add --exporter, one of a, b"),
        (["d", "--exporter", "a"], "--exporter a: d is a directory, and belongs to one; leave it out"),
        (["memory.yaml"], "memory.yaml: no exporter has a path, so dead letters are in memory alone"),
        (["memory.yaml", "--exporter", "m"], "--exporter m: keeps its records in memory"),
        (["memory.yaml", "--exporter", "x"], "is not in the file; no exporter of the file has a path"),
        (["./nothing.yaml"], "nothing.yaml: can't be read (No such file or directory); correct the path"),
        (
            ["nothing.yaml"],
            "nothing.yaml: can't be read (No such file or directory), and no running process of this user has",
        ),
    ],
)
def test_dead_letters_that_are_nowhere(capsys, arguments, words):
    Path("d").mkdir()
    Path("memory.yaml").write_text("exporters: {m: {sink: s}}\nsinks: {s: {type: memory}}")
    assert main(["dead-letters", "requeue", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_demonstration(capsys):
    assert main(["demo", "--seconds", "1.5", "--rate", "500"]) == 0
    said = capsys.readouterr().out
    assert "-- the destination goes away" in said
    assert "-- the destination is back" in said
    assert "0 are missing" in said


async def test_a_demonstration_that_ends_while_the_destination_is_away(tmp_path):
    said = []
    result = await demonstrate(tmp_path / "queue", seconds=0.001, rate=10, say=said.append)
    assert result.complete
    assert not DemoResult(produced=1).complete


async def test_the_sink_of_the_demonstration_says_that_nobody_is_there():
    destination = Destination()
    await destination.start()
    sink = SocketSink(destination)
    await sink.open()
    await sink.send([{"n": 1}, {"n": 1}])
    assert destination.seen == {1: 2}
    await destination.stop()
    with pytest.raises(Exception, match="is away"):
        await sink.send([{"n": 2}])


def test_a_measurement(capsys, monkeypatch, tmp_path):
    assert main(["bench", "--seconds", "0.01", "--json", "--path", str(tmp_path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in said["measured"]] == list(bench.MEASUREMENTS)
    assert all(row["count"] > 0 for row in said["measured"])
    assert main(["bench", "--seconds", "0.01"]) == 0
    assert "per s" in capsys.readouterr().out


async def test_a_long_measurement_keeps_little(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_CHUNK", 1)
    assert await bench._exporter(0.05, tmp_path) > 0
