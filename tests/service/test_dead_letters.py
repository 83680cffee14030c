"""`batchqueue dead-letters` with running services: who does the work, what is said, what becomes of every letter."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from from_tree import ROOT
from service_process import Running

import batchqueue_async as bq
from batchqueue_async import observe
from batchqueue_async._support.registry import everything
from batchqueue_async.cli.main import main
from batchqueue_async.durable import DurableQueue
from batchqueue_async.durable.disk import inspect
from batchqueue_async.observe import client
from batchqueue_async.observe.client import find_processes
from batchqueue_async.sinks.memory import MemorySink

pytestmark = pytest.mark.real_time

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A directory to work in, and one for sockets, whose names must be short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(everything, "_things", {})
    monkeypatch.setattr(client, "TIMEOUT", PATIENCE)
    with tempfile.TemporaryDirectory() as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setattr(tempfile, "tempdir", runtime)
        yield


def service(exporters, *, listen="['unix:']", drain_timeout="20s"):
    """A file whose exporters each have a sink that does what the file `mood` says."""
    lines = [f"observe: {{listen: {listen}}}", f"service: {{drain_timeout: {drain_timeout}}}", "exporters:"]
    sinks = ["sinks:"]
    for name, (options, feeding) in exporters.items():
        lines.append(f"  {name}: {{sink: s-{name}, overflow: block, {options}}}")
        sinks.append(f"  s-{name}: {{type: code, use: moody, options: {{feeds: {name}, {feeding}}}}}")
    return "\n".join([*lines, *sinks]) + "\n"


MEMORY = "retry: {isolate: false, initial: 20ms, max_delay: 50ms}, breaker: {reset_timeout: 50ms}"
DISK = f"path: queue-a, {MEMORY}"


def run(capsys, *arguments):
    code = main(["dead-letters", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def buried(path="queue-a"):
    try:
        return sum(1 for _ in inspect.list_dead_letters(Path(path)))
    except bq.BatchQueueError:
        return 0  # not there yet


def taken():
    return sorted(map(int, Path("taken").read_text().split())) if Path("taken").exists() else []


def mood(word):
    Path("mood.new").write_text(word)
    Path("mood.new").replace("mood")


def numbers(path):
    """What the records in a directory are, dead or alive."""
    from batchqueue_async.export.send_queue import codec

    return {codec.decode(each.payload)["n"] for each in path}


def test_letters_on_disk_go_back_while_the_service_runs(capsys):
    with Running(service({"a": (DISK, "count: 6")})) as running:
        running.until("running 1 exporter")
        until(lambda: buried() == 6)
        assert run(capsys, "list", "s.yaml")[1].count("refused by the table") == 6
        Path("link").symlink_to("queue-a")
        mood("take")
        code, out, err = run(capsys, "requeue", "link", "2", "3", "99")
        assert (code, out) == (1, f"2 dead letters put into the queue again, by process {running.process.pid}\n")
        assert err == "batchqueue: no dead letters with the numbers 99\n"
        until(lambda: taken() == [1, 2])
        assert run(capsys, "requeue", "s.yaml", "--exporter", "a", "1")[0] == 0
        assert json.loads(run(capsys, "requeue", "a", "4", "--json")[1]) == {
            "requeued": 1,
            "process": running.process.pid,
        }
        assert run(capsys, "drop", str(running.process.pid), "5")[1].startswith("1 dead letters deleted, by process")
        assert run(capsys, "purge", str(find_processes()[0].path), "--before", "1")[1].startswith("0 dead letters")
        assert run(capsys, "purge", str(Path("queue-a").absolute()))[1].startswith("1 dead letters deleted")
        until(lambda: taken() == [0, 1, 2, 3])
        running.signal(signal.SIGTERM)
        assert running.end()[0] == 0
    assert buried() == 0
    assert run(capsys, "requeue", "s.yaml")[1] == "0 dead letters put into the queue again\n"


def test_letters_in_memory_are_read_and_put_back_in_their_process(capsys):
    with Running(service({"m": (MEMORY, "count: 5, size: 1000000"), "n": (MEMORY, "count: 0")})) as running:
        running.until("running 2 exporters")
        pid = str(running.process.pid)
        until(lambda: len(run(capsys, "list", "m", "--json")[1].splitlines()) == 5)
        letters = [json.loads(line) for line in run(capsys, "list", pid, "--json")[1].splitlines()]
        assert [(each["seq"], each["size"] > 1_000_000, each["attempts"]) for each in letters] == [
            (number, True, 1) for number in range(1, 6)
        ]
        assert len(run(capsys, "list", "m", "--limit", "2", "--after", "1")[1].splitlines()) == 2
        code, out, err = run(capsys, "show", "m", "2", "7")
        assert (code, err) == (1, "batchqueue: no dead letters with the numbers 7\n")
        assert "\x1b" not in out
        assert '{"n": 1, "text": "xxx' in out
        assert out.endswith("characters more; `export` and `--json` have all of it\n")
        assert len(out) < 100_000
        assert run(capsys, "export", "m", "out.jsonl")[0] == 0
        assert len(Path("out.jsonl").read_text().splitlines()) == 5
        assert Path("out.jsonl").stat().st_mode & 0o777 == 0o600
        code, _, err = run(capsys, "export", pid, "more.jsonl")
        assert (code, "FILE: is for the letters of one exporter; add --exporter, one of m, n" in err) == (2, True)
        mood("take")
        assert run(capsys, "requeue", "m", "2", "3")[1] == (
            f"2 dead letters put into the queue again, by process {pid}\n"
        )
        until(lambda: taken() == [1, 2])
        assert run(capsys, "purge", "m", "4")[1] == f"1 dead letters deleted, by process {pid}\n"
        code, out, _ = run(capsys, "requeue", pid)
        assert (code, out.split("\n")[:2]) == (0, ["m:", f"2 dead letters put into the queue again, by process {pid}"])
        until(lambda: taken() == [0, 1, 2, 4])
        code, _, err = run(capsys, "requeue", "s.yaml", "--exporter", "m")
        assert code == 2
        assert "while its process runs, `batchqueue dead-letters requeue m` asks that" in err


def test_a_loop_that_is_blocked_changes_nothing(capsys):
    with Running(service({"a": (DISK, "count: 4")})) as running:
        until(lambda: buried() == 4)
        # Not blocked before the command has its answer.
        mood("away")
        assert run(capsys, "requeue", "queue-a", "1")[0] == 0
        mood("block")
        until(Path("blocking").exists)
        assert run(capsys, "requeue", "queue-a", "2", "--timeout", "1")[0] == 2
        code, _, err = run(capsys, "purge", "queue-a", "--timeout", "1")
        assert code == 2
        assert "its event loop has been busy for 1 s; `batchqueue why" in err
        assert err.endswith("Nothing was changed\n")
        mood("take")
        # What was given up is not done later, when nobody waits for it any more.
        assert run(capsys, "requeue", "queue-a", "4")[0] == 0
        until(lambda: 3 in taken())
        assert buried() >= 1
        running.signal(signal.SIGTERM)
        assert running.end()[0] == 0


def test_a_send_queue_without_room_ends_the_command_and_keeps_the_letters(capsys):
    with Running(service({"a": (DISK + ", max_records: 40", "count: 60")})) as running:
        until(lambda: buried() == 60)
        mood("away")
        command = command_of("requeue", "queue-a", "--timeout", "300", "--progress")
        assert until(waiting_numbers) <= set(range(60))
        code, _, err = until(lambda: refused(capsys))
        assert code == 2
        assert "another command is at work there (requeue, " in err
        # Ctrl-C ends it in the service, too.
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=PATIENCE)
        assert command.returncode == 2
        assert said.endswith("are sent twice then\nbatchqueue: interrupted\n")
        code, _, err = until(lambda: stalled(capsys))
        assert code == 2
        assert "nothing has gone on for 0.5 s, as where its send queue has no room" in err
        mood("take")
        until(lambda: run(capsys, "requeue", "queue-a")[0] == 0 and set(taken()) == set(range(60)))
        running.signal(signal.SIGTERM)
        assert running.end()[0] == 0


def refused(capsys):
    said = run(capsys, "purge", "queue-a", "--before", "1")
    return said if "another command" in said[2] else None


def stalled(capsys):
    said = run(capsys, "requeue", "queue-a", "--timeout", "0.5")
    return said if "nothing has gone on" in said[2] else None


def waiting_numbers(path="queue-a"):
    return numbers(inspect.dump(Path(path)))


def command_of(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "batchqueue_async.cli.main", "dead-letters", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_service_that_ends_amid_a_command_loses_no_letter(how):
    count = 3_000
    options = DISK + ", max_records: 1000"
    with Running(service({"a": (options, f"count: {count}")}, drain_timeout="500ms")) as running:
        until(lambda: buried() == count)
        mood("away")
        command = command_of("requeue", "queue-a", "--progress", "--timeout", "300")
        until(waiting_numbers)
        running.signal(how)
        _, said = command.communicate(timeout=PATIENCE)
        assert command.returncode == 2
        assert "At least " in said
        assert "Traceback" not in said
        running.process.wait(timeout=PATIENCE)
    left = numbers(inspect.list_dead_letters(Path("queue-a")))
    assert left | waiting_numbers() | set(taken()) == set(range(count))
    assert asyncio.run(reopened()) >= 0


async def reopened():
    async with DurableQueue.open("queue-a") as queue:
        return queue.stats().records


def test_a_name_that_two_processes_have(capsys, tmp_path):
    text = service({"m": (MEMORY, "count: 2")})
    with Running(text) as one, Running(text) as other:
        one.until("running 1 exporter")
        other.until("running 1 exporter")
        code, _, err = run(capsys, "requeue", "m")
        assert code == 2
        assert "m: 2 exporters have that name; say which: " in err
        for each in (one, other):
            assert f"`batchqueue dead-letters requeue {each.process.pid} --exporter=m`" in err
            until(lambda each=each: len(run(capsys, "list", str(each.process.pid))[1].splitlines()) == 2)
        mood("take")
        assert run(capsys, "requeue", str(one.process.pid), "--exporter=m")[0] == 0
        # One that stands still is named, and does not keep the others from answering.
        other.signal(signal.SIGSTOP)
        client.TIMEOUT = 1.0
        code, out, _ = run(capsys, "list", "m")
        assert (code, out) == (0, "")
        code, _, err = run(capsys, "list", "nobody")
        assert code == 2
        assert f"process {other.process.pid} can't be asked: " in err
        other.signal(signal.SIGCONT)


def test_letters_that_another_exporter_takes(capsys):
    text = service({"b": (DISK, "count: 0"), "a": (MEMORY + ", dead_letters: b", "count: 2")})
    with Running(text) as running:
        running.until("running 2 exporters")
        pid = str(running.process.pid)
        code, out, _ = run(capsys, "requeue", pid, "--exporter", "a")
        assert (code, out) == (0, "a: hands its dead letters to exporter 'b', and keeps none\n")


def test_a_service_without_a_socket_of_its_own(capsys, tmp_path):
    with tempfile.TemporaryDirectory() as directory:
        listen = f"['127.0.0.1:0', 'unix:{directory}/named.sock']"
        with Running(service({"a": (DISK, "count: 2")}, listen=listen)) as running:
            until(lambda: buried() == 2)
            code, _, err = run(capsys, "requeue", "queue-a")
            assert code == 2
            assert "which takes no commands of this user, and nothing was changed; serve `unix:` there" in err
            code, _, err = run(capsys, "requeue", f"{directory}/named.sock")
            assert code == 2
            assert "takes no commands; only the socket that `unix:` alone makes does" in err
            assert buried() == 2
            assert running.process.poll() is None


def test_a_socket_that_a_killed_process_left_behind(capsys):
    with Running(service({"a": (DISK, "count: 2")})) as running:
        until(lambda: buried() == 2)
        path = until(find_processes)[0].path
        running.signal(signal.SIGKILL)
        running.process.wait(timeout=PATIENCE)
    assert path.is_socket()
    assert run(capsys, "requeue", "queue-a", "1")[1] == "1 dead letters put into the queue again\n"
    code, _, err = run(capsys, "list", str(path))
    assert (code, "the connection broke off" in err) == (2, True)
    assert run(capsys, "list", "m")[0] == 2
    assert not path.exists()


async def bury(path, count):
    async with DurableQueue.open(path) as queue:
        await queue.put_many([b"%d" % each for each in range(count)])
        await (await queue.lease(count)).dead_letter("refused by the table")


def test_a_durable_queue_and_odd_names(capsys):
    name = os.fsdecode(b"queue \xff\n'a'")
    asyncio.run(bury(name, 3))
    asyncio.run(bury("spare", 1))

    async def main_of(name):
        queue = DurableQueue.open(name)
        async with queue, observe.serve("unix:"), bq.Exporter(MemorySink(), name="-x\x1b[31m é") as exporter:
            commands = [
                ["requeue", name, "1"],
                ["purge", str(os.getpid()), "--exporter=-x\x1b[31m é"],
                ["requeue", str(os.getpid()), f"--exporter={Path(name).absolute()}", "2"],
                ["list", "--", "-x\x1b[31m é"],
                ["list", str(os.getpid())],
            ]
            said = [(await asyncio.to_thread(main, ["dead-letters", *each]), capsys.readouterr()) for each in commands]
            assert queue.stats().records == 2
            assert exporter.stats().records == 0
            return said

    first, second, third, fourth, fifth = asyncio.run(main_of(name))
    assert [each[0] for each in (first, second, third, fourth, fifth)] == [0, 0, 0, 0, 0]
    assert first[1].out.startswith("1 dead letters put into the queue again, by process")
    assert third[1].out.startswith("1 dead letters put into the queue again, by process")
    assert "\x1b" not in fifth[1].out


def test_nobody_listens(capsys):
    Path("s.sock").touch()
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind("deaf.sock")
        deaf.listen(1)
        client.TIMEOUT = 0.5
        code, _, err = run(capsys, "list", "deaf.sock")
        assert (code, "deaf.sock: no answer for 0.5 s" in err) == (2, True)
    assert run(capsys, "requeue", "99999999")[0] == 2
    assert run(capsys, "requeue", "queue-a", "--timeout", "0")[0] == 2
    assert run(capsys, "list", "queue-a", "--limit", "-1")[0] == 2
