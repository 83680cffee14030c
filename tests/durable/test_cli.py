"""`batchqueue disk`, on real directories."""

from __future__ import annotations

import asyncio
import base64
import json
import os

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
        for action in ("requeue", "purge"):
            assert await asyncio.to_thread(main, ["disk", "dead-letters", action, str(spool)]) == 2
            error = capsys.readouterr().err
            assert f'"pid": {os.getpid()}' in error
            assert "and nothing was changed; `batchqueue dead-letters " in error
            assert f"DurableQueue.{action}_dead_letters()" in error
            assert callable(getattr(queue, f"{action}_dead_letters"))
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


@pytest.fixture
async def letters(tmp_path):
    """A closed queue with three dead letters, one of them not text."""
    place = tmp_path / "q"
    async with DurableQueue.open(place) as queue:
        await queue.put_many([b"one", b"two\nlines", bytes(range(256))])
        for reason in ("first", "second\nline", "third"):
            await (await queue.lease(1)).dead_letter(reason)
    return place


async def test_export_writes_everything_that_is_known(letters, tmp_path, capsys):
    target = tmp_path / "out.jsonl"
    before = content(letters)
    status, text = await run(capsys, "dead-letters", "export", letters, target, "--json")
    assert (status, json.loads(text)) == (
        0,
        {"exported": 3, "bytes": target.stat().st_size, "damaged": [], "missing": []},
    )
    assert target.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [base64.b64decode(line["payload_base64"]) for line in lines] == [b"one", b"two\nlines", bytes(range(256))]
    assert [(line["seq"], line["original_seq"], line["attempts"]) for line in lines] == [
        (1, 1, 1),
        (2, 2, 1),
        (3, 3, 1),
    ]
    assert [line["reason"] for line in lines] == ["first", "second\nline", "third"]
    assert content(letters) == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.jsonl"]


async def test_export_beside_a_running_owner(letters, tmp_path, capsys):
    async with DurableQueue.open(letters) as queue:
        await queue.put(b"four")
        await (await queue.lease(1)).dead_letter("fourth")
        status, text = await run(capsys, "dead-letters", "export", letters, tmp_path / "out")
        assert status == 0
        assert text.startswith("4 dead letters")


async def test_export_of_some_and_of_payloads_alone(letters, tmp_path, capsys):
    target = tmp_path / "out"
    assert (await run(capsys, "dead-letters", "export", letters, target, 1, "--format", "raw"))[0] == 0
    assert target.read_bytes() == b"one\n"
    assert (await run(capsys, "dead-letters", "export", letters, target, 1))[0] == 2
    status, _ = await run(capsys, "dead-letters", "export", letters, target, "--format", "raw", "--force")
    assert status == 2
    assert target.read_bytes() == b"one\n", "what was there is replaced by a whole export alone"
    assert (await run(capsys, "dead-letters", "export", letters, target, 2, 9, "--force"))[0] == 1
    assert json.loads(target.read_text())["seq"] == 2
    assert len(list(tmp_path.iterdir())) == 2


async def test_export_follows_no_link_and_overwrites_nothing(letters, tmp_path, capsys):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(precious)
    assert (await run(capsys, "dead-letters", "export", letters, link))[0] == 2
    assert (await run(capsys, "dead-letters", "export", letters, link, "--force"))[0] == 0
    assert precious.read_text() == "mine"
    assert not link.is_symlink()
    assert (await run(capsys, "dead-letters", "export", letters, tmp_path / "no" / "such" / "place"))[0] == 2
    assert (await run(capsys, "dead-letters", "export", tmp_path, tmp_path / "x"))[0] == 2
    assert not (tmp_path / "x").exists()


async def test_export_and_list_name_what_is_damaged(letters, tmp_path, capsys):
    (path,) = segments(letters / "dead")
    flip(path, path.read_bytes().index(b"second"), 1)
    status = await asyncio.to_thread(main, ["disk", "dead-letters", "export", str(letters), str(tmp_path / "out")])
    said = capsys.readouterr()
    assert status == 1
    assert "1 records" in said.err
    assert "damaged" in said.err
    assert [json.loads(line)["seq"] for line in (tmp_path / "out").read_text().splitlines()] == [1, 3]
    assert await asyncio.to_thread(main, ["disk", "dead-letters", "list", str(letters)]) == 1
    assert "damaged" in capsys.readouterr().err


async def test_export_says_how_far_it_is(letters, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("batchqueue_async.cli.letters._EVERY", 0.0)
    await asyncio.to_thread(main, ["disk", "dead-letters", "export", str(letters), str(tmp_path / "out"), "--progress"])
    assert "2 dead letters" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["verify"], ["repair"], ["dead-letters"], ["dead-letters", "export"]])
def test_help_says_what_the_exit_status_means(command, capsys):
    with pytest.raises(SystemExit):
        main(["disk", *command, "--help"])
    assert "Exit status: 0" in " ".join(capsys.readouterr().out.split())


async def test_restore_refuses_what_the_next_opening_would_set_aside_again(tmp_path, capsys):
    for name in ("one", "two"):
        async with DurableQueue.open(tmp_path / name, DurableConfig(segment_bytes=300)) as queue:
            await queue.put_many([b"x" * 100] * 4)
            await queue.put_many([b"y" * 100] * 4)
    (tmp_path / "one" / "quarantine").mkdir()
    foreign = segments(tmp_path / "two")[0]
    foreign.rename(tmp_path / "one" / "quarantine" / f"{foreign.name}.1234")
    status = await asyncio.to_thread(main, ["disk", "restore", str(tmp_path / "one"), f"{foreign.name}.1234"])
    assert status == 2
    assert "belongs to queue" in capsys.readouterr().err
    # Nothing outside the quarantine is looked at, and no directory becomes a queue.
    assert (await run(capsys, "restore", tmp_path / "one", f"../{segments(tmp_path / 'one')[0].name}"))[0] == 2
    assert (await run(capsys, "restore", tmp_path, "x"))[0] == 2
    assert not (tmp_path / "lock").exists()


@pytest.mark.untraced
@pytest.mark.timeout(600)
async def test_d_29_verify_finds_a_flipped_bit_in_every_byte(tmp_path):
    """Of every file: nothing that the queue has written is passed over."""
    place = tmp_path / "q"
    async with DurableQueue.open(place, DurableConfig(segment_bytes=300)) as queue:
        for number in range(3):
            await queue.put_many([b"%d/%d" % (number, at) for at in range(2)])
        lease = await queue.lease(2)
        await lease.dead_letter("why", [lease.records[0].seq])
        await (await queue.lease(1)).ack()
    assert inspect.verify(place).problems == []
    found = 0
    for path, data in content(place).items():
        if path.name == "lock":
            continue
        for at in range(len(data)):
            if path.suffix == ".bqs" and 64 <= at < 512:
                continue  # zeros between the copies of the header
            flip(path, at, 1 << (at % 8))
            problems = inspect.verify(place).problems
            assert problems, (path.name, at)
            assert any(problem["segment"].removeprefix("dead/") == path.name for problem in problems), (at, problems)
            flip(path, at, 1 << (at % 8))
            found += 1
    assert found > 1_000
    assert inspect.verify(place).problems == []


async def test_what_a_limit_drops_is_logged_and_not_for_each_record(caplog):
    files = RecordingFiles()
    config = DurableConfig(max_records=10, overflow="drop_oldest")
    with caplog.at_level("WARNING"):
        async with DurableQueue.open(ROOT, config, files=files) as queue:
            for number in range(11):
                await queue.put(b"%d" % number)
            await asyncio.sleep(1)
            assert caplog.text.count("durable_records_dropped") == 1
            assert "oldest=1" in caplog.text
            for number in range(200):
                await queue.put(b"%d" % number)
            assert caplog.text.count("durable_records_dropped") == 1
            await asyncio.sleep(61)
            await queue.put(b"x")
            await asyncio.sleep(1)
            assert caplog.text.count("durable_records_dropped") == 2
            await queue.put(b"y")
        assert caplog.text.count("durable_records_dropped") == 3
    lines = [line for line in caplog.text.splitlines() if "durable_records_dropped" in line]
    assert sum(int(line.split("oldest=")[1].split()[0]) for line in lines) == 203


@pytest.mark.parametrize("reason", ["newest", "max_age"])
async def test_what_is_dropped_for_other_reasons_is_logged(caplog, reason):
    options = {"max_age": 10.0} if reason == "max_age" else {"max_records": 1, "overflow": "drop_newest"}
    with caplog.at_level("WARNING"):
        async with DurableQueue.open(ROOT, DurableConfig(**options), files=RecordingFiles()) as queue:
            await queue.put(b"1")
            if reason == "newest":
                await queue.put(b"2")
            await asyncio.sleep(100)
            assert f"{reason}=1" in caplog.text
