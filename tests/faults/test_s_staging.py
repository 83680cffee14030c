"""What tasks of Spark stage: nothing of a zombie is published, nothing of a failed job stays; without a Spark."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
from contextlib import closing, suppress

import pytest

import batchqueue_async as bq
from batchqueue_async.sinks import jsonl
from batchqueue_async.sinks._shared import staging as shared
from batchqueue_async.sinks.base import Attempt, BatchKey, PrunableSink
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.sqlite import SqliteSink

KEY = BatchKey("query", 3)
FAILED = BatchKey("failed job", 0)


@pytest.fixture(params=["jsonl", "sqlite"])
def sink(request, tmp_path):
    made = JsonLinesSink(tmp_path / "out") if request.param == "jsonl" else SqliteSink(tmp_path / "out.db")
    assert isinstance(made, PrunableSink)
    return made


async def stage(sink, name, value, key=KEY):
    part = sink.stage(Attempt(key, 0, name))
    await part.open()
    await part.send([{"v": value}])
    await part.close()
    return Attempt(key, 0, name)


def published(sink):
    if isinstance(sink, JsonLinesSink):
        lines = (line for file in sink.path.glob("[!.]*/*.jsonl") for line in file.read_text().split())
        return sorted(json.loads(line)["v"] for line in lines)
    with closing(sqlite3.connect(sink.path)) as database:
        return [value for (value,) in database.execute("SELECT v FROM rows ORDER BY v")]


def root(sink):
    return sink.path / ".staging" if isinstance(sink, JsonLinesSink) else sink.path.with_name("out.db.staging")


# --- zombies


@pytest.mark.parametrize("moment", ["before", "taken", "renamed"])
async def test_s_9_a_zombie_is_never_published_by_the_sink_alone(tmp_path, monkeypatch, moment):
    """The zombie writes before, amid and after the publication's own steps, and nothing of Spark is in between."""
    sink = JsonLinesSink(tmp_path / "out")
    good = await stage(sink, "good", 1)
    if moment == "before":
        await stage(sink, "zombie", 2)
    else:
        real, done = jsonl.sync_directory, []

        def zombie_first(path):
            if (path == sink.path) == (moment == "renamed") and not done:
                done.append(path)
                thread = threading.Thread(target=lambda: asyncio.run(stage(sink, "zombie", 2)))
                thread.start()
                thread.join()
            real(path)

        monkeypatch.setattr(jsonl, "sync_directory", zombie_first)
    assert await sink.publish(KEY, [good])
    assert published(sink) == [1]
    await stage(sink, "late", 3)
    assert not await sink.publish(KEY, [good])
    assert published(sink) == [1]
    assert not root(sink).exists()


async def test_s_9_a_publication_that_broke_off_goes_on_with_what_it_took(tmp_path, monkeypatch):
    """Between the two renames the commit dies; a zombie is in the staged directory when it is repeated."""
    sink = JsonLinesSink(tmp_path / "out")
    good = await stage(sink, "good", 1)

    def broken(path):
        raise OSError("the disk is away")

    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(jsonl, "sync_directory", broken)
        with pytest.raises(OSError, match="the disk is away"):
            await sink.publish(KEY, [good])
    await stage(sink, "zombie", 2)
    assert await sink.publish(KEY, [good])
    assert published(sink) == [1]
    assert not root(sink).exists()


async def test_s_9_what_was_taken_and_never_published_is_not_in_the_repetition(tmp_path, monkeypatch):
    sink = JsonLinesSink(tmp_path / "out")
    first = await stage(sink, "first", 1)
    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(jsonl, "sync_directory", lambda path: (_ for _ in ()).throw(OSError("away")))
        with pytest.raises(OSError, match="away"):
            await sink.publish(KEY, [first])
    second = await stage(sink, "second", 1)  # the query was started again, and Spark made all parts anew
    assert await sink.publish(KEY, [second])
    assert published(sink) == [1]


# --- what failed jobs leave


async def test_s_15_what_a_failed_job_staged_goes(sink):
    await stage(sink, "early", 1, FAILED)
    late = sink.stage(Attempt(FAILED, 1, "late"))
    await late.open()
    await late.send([{"v": 2}])
    await sink.abandon(FAILED)  # the driver gives the job up while a task still writes
    assert not list(root(sink).rglob("*early*"))
    await stage(sink, "zombie", 3, FAILED)  # it cleans up after itself
    assert not list(root(sink).rglob("*zombie*"))
    with suppress(OSError, bq.RetryableError):  # its file is gone already
        await late.close()
    assert not [path for path in root(sink).rglob("*late*") if path.is_file()]
    assert await sink.publish(KEY, [await stage(sink, "a", 4)])
    assert published(sink) == [4]
    assert not root(sink).exists()


async def test_s_15_what_a_zombie_staged_goes_with_the_next_batch_of_its_query(sink):
    for number in range(3):
        key = KEY._replace(number=number)
        assert await sink.publish(key, [await stage(sink, "good", number, key)])
        await stage(sink, "zombie", 9, key)
    left = [part.key.number for part in await sink.staged()]
    assert left == [2]
    assert published(sink) == [0, 1, 2]


async def test_s_15_what_nobody_touched_for_a_week_goes_by_itself(sink):
    lost, other = BatchKey("killed driver", 0), BatchKey("under way", 5)
    await stage(sink, "lost", 1, lost)
    under_way = await stage(sink, "busy", 2, other)
    old = [path for path in root(sink).rglob("*") if "killed" in str(path)]
    for path in sorted(old, reverse=True):
        os.utime(path, (1e9, 1e9))
    await sink.publish(KEY, [await stage(sink, "a", 3)])
    assert [part.key for part in await sink.staged()] == [other]
    assert await sink.publish(other, [under_way])
    assert published(sink) == [2, 3]


async def test_s_15_what_is_staged_is_listed_and_pruned(sink):
    odd = BatchKey("a-b/c%2 ü", 12)
    await stage(sink, "77-abc", 1, odd)
    (part,) = await sink.staged()
    assert (part.key, part.part, part.name, part.state) == (odd, 0, "77-abc", "staged")
    assert part.bytes > 0
    assert await sink.prune(shared.OLD) == []
    assert await sink.prune(-1.0) == [odd]
    assert await sink.staged() == []
    assert not root(sink).exists()
