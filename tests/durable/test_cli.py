"""`batchqueue disk`, on real directories."""

from __future__ import annotations

import asyncio
import json

import pytest
from durable_kit import ROOT, RecordingFiles, flip, segments

from batchqueue_async.cli.main import main
from batchqueue_async.durable import DurableConfig, DurableQueue
from batchqueue_async.durable.disk import inspect, segment


@pytest.fixture
async def spool(tmp_path):
    async with DurableQueue.open(tmp_path, DurableConfig(segment_bytes=2_000)) as queue:
        for number in range(30):
            await queue.put(b"record %03d " % number + bytes(100))
        lease = await queue.lease(12)
        await lease.ack([record.seq for record in lease.records[3:]])
        await lease.dead_letter("no use", [1])
    return tmp_path


async def run(capsys, *arguments) -> tuple[int, str]:
    # In a thread: some commands run a loop of their own.
    status = await asyncio.to_thread(main, ["disk", *map(str, arguments)])
    return status, capsys.readouterr().out


def content(path):
    return {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()}


async def test_reading_commands_change_nothing(spool, capsys):
    before = content(spool)
    for arguments in (["inspect"], ["stats"], ["verify"], ["dump"], ["repair", "--dry-run"], ["dead-letters", "list"]):
        for extra in ([], ["--json"]):
            assert (await run(capsys, *arguments, spool, *extra))[0] == 0
    assert content(spool) == before


async def test_inspect_and_stats(spool, capsys):
    _, text = await run(capsys, "inspect", spool, "--json")
    view = json.loads(text)
    assert (view["records"], view["dead_letters"], view["owner"], view["next_seq"]) == (20, 1, None, 31)
    assert sum(entry["unsettled"] for entry in view["segments"]) == 20
    assert all(entry["sealed"] for entry in view["segments"])
    assert json.loads((await run(capsys, "stats", spool, "--json"))[1])["segments"] == len(view["segments"])
    assert "20 records wait" in (await run(capsys, "stats", spool))[1]


async def test_beside_a_running_owner(spool, capsys):
    async with DurableQueue.open(spool) as queue:
        await queue.put(b"now")
        for action in ("inspect", "stats", "verify", "dump"):
            assert (await run(capsys, action, spool, "--json"))[0] == 0
        text = (await run(capsys, "inspect", spool))[1]
        assert '"pid"' in text
        assert "opening would" not in text
        assert "open" in text
        assert (await run(capsys, "repair", spool))[0] == 2
        assert (await run(capsys, "dead-letters", "requeue", spool))[0] == 2
        assert await queue.put(b"the owner goes on") > 0


async def test_looking_at_a_busy_queue_never_fails_and_finds_no_damage(tmp_path):
    # Small segments: files come and go, and are cut, between any two calls of the reader.
    looking = True
    config = DurableConfig(durability="os", segment_bytes=1_000, max_bytes=100_000)
    async with DurableQueue.open(tmp_path, config) as queue:

        async def work() -> None:
            number = 0
            while looking:
                number += 1
                await queue.put(b"record %06d " % number + bytes(number % 300))
                if not number % 7:
                    await (await queue.lease(9, wait=0)).ack()

        def look() -> list[dict]:
            problems = []
            for _ in range(60):
                inspect.overview(tmp_path)
                problems += inspect.verify(tmp_path).problems
                for record in inspect.dump(tmp_path):
                    assert record.payload.startswith(b"record ")
            return problems

        working = asyncio.create_task(work())
        problems = await asyncio.to_thread(look)
        looking = False
        await working
    assert problems == []


def test_verifying_a_file_that_is_cut_meanwhile_ends(tmp_path):
    """As beside an owner that gives room back: the file is far shorter than its size said."""
    files = RecordingFiles(base={ROOT / "x": bytes(300)})
    walk = segment.Walk(files, files.open_read(ROOT / "x"), b"12345678", start=128, end=1 << 40)
    assert list(walk) == [segment.Gap(128, 300)]
    assert walk.end == 300


async def test_dump_shows_payloads_only_when_asked(spool, capsys):
    _, text = await run(capsys, "dump", spool, "--json")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["seq"] for line in lines] == [2, 3, *range(13, 31)]
    assert "payload" not in lines[0]
    _, text = await run(capsys, "dump", spool, "--json", "--payloads", "--limit", 1)
    assert bytes.fromhex(json.loads(text)["payload"]).startswith(b"record 001")
    assert "record 001" in (await run(capsys, "dump", spool, "--payloads"))[1]
    assert len((await run(capsys, "dump", spool, "--settled"))[1].splitlines()) > 20


async def test_verify_finds_damage(spool, capsys):
    path = segments(spool)[-1]
    flip(path, path.read_bytes().index(b"record 029"))
    status, text = await run(capsys, "verify", spool, "--json")
    assert status == 1
    assert json.loads(text)["damaged_records"] == 1
    flip(path, path.read_bytes().index(b"record 028") - 40)
    path.write_bytes(path.read_bytes())
    status, text = await run(capsys, "verify", spool)
    assert status == 1
    assert "no valid frame" in text
    assert "missing" in text
    other = segments(spool)[0]
    other.write_bytes(bytes(500))
    assert "no valid header" in (await run(capsys, "verify", spool))[1]


async def test_repair(spool, capsys):
    path = segments(spool)[-1]
    path.write_bytes(path.read_bytes()[:-100])
    (spool / "queue.id").unlink()
    before = content(spool)
    text = (await run(capsys, "repair", spool, "--dry-run"))[1]
    assert "would seal" in text
    assert "queue.id as the segments have it" in text
    assert content(spool) == before
    assert "opening would" in (await run(capsys, "inspect", spool))[1]
    assert (await run(capsys, "repair", spool))[0] == 0
    assert (await run(capsys, "repair", spool, "--dry-run"))[1] == "nothing to repair\n"
    assert json.loads((await run(capsys, "repair", spool, "--json"))[1])["clean"]
    assert "quarantine/" in (await run(capsys, "inspect", spool))[1]


async def test_dead_letters(spool, capsys):
    _, text = await run(capsys, "dead-letters", "list", spool, "--json")
    letter = json.loads(text)
    assert (letter["reason"], letter["original_seq"], letter["seq"]) == ("no use", 1, 1)
    assert "record 000" in (await run(capsys, "dead-letters", "list", spool, "--payloads"))[1]


async def test_dead_letters_requeue_and_nothing_there(tmp_path, capsys):
    async with DurableQueue.open(tmp_path / "q") as queue:
        await queue.put(b"x")
        await (await queue.lease()).dead_letter("why")
    assert json.loads((await run(capsys, "dead-letters", "requeue", tmp_path / "q", "--json"))[1]) == {"requeued": 1}
    assert "0 dead" in (await run(capsys, "dead-letters", "requeue", tmp_path / "q", 7))[1]
    path = segments(tmp_path / "q")[-1]
    path.write_bytes(path.read_bytes()[:-10])
    assert "seal" in (await run(capsys, "repair", tmp_path / "q"))[1]
    assert (await run(capsys, "inspect", tmp_path))[0] == 2
    assert not (tmp_path / "queue.id").exists()
    assert (await run(capsys, "dead-letters", "list", tmp_path / "q"))[0] == 0
