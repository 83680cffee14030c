"""The conformance suite of sinks: ours pass, and each that is broken on purpose fails by name."""

from __future__ import annotations

import asyncio
import json

import pytest
from export_kit import Destination

import batchqueue_async as bq
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.memory import MemorySink
from batchqueue_async.sinks.sqlite import SqliteSink
from batchqueue_async.testing import check_sink

pytestmark = pytest.mark.real_time


async def test_the_sink_in_memory_passes():
    sink = MemorySink()

    async def read():
        return sink.records

    await check_sink(lambda: sink, read=read)


async def test_the_sink_of_json_lines_passes(tmp_path):
    async def read():
        path = tmp_path / "out.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    await check_sink(lambda: JsonLinesSink(tmp_path / "out.jsonl"), read=read)


async def test_the_sink_of_sqlite_passes(tmp_path):
    import sqlite3

    async def read():
        with sqlite3.connect(tmp_path / "out.db") as db:
            return (
                db.execute("select * from sqlite_master where name = 'rows'").fetchall()
                and db.execute("select id from rows").fetchall()
            )

    await check_sink(lambda: SqliteSink(tmp_path / "out.db"), read=read)


class Loses(Destination):
    async def send(self, batch):
        await super().send(batch[:-1])


class Changes(Destination):
    async def send(self, batch):
        await super().send(batch)
        batch.pop()


class ClosesOnce(Destination):
    async def close(self):
        await super().close()
        if self.closes > 1:
            raise RuntimeError("closed already")


class Returns(Destination):
    async def send(self, batch):
        await super().send(batch)
        return len(batch)


class BreaksWhenCancelled(Destination):
    broken = False

    async def send(self, batch):
        if self.broken:
            return
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.broken = True
            raise
        await super().send(batch)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (Loses, "arrived"),
        (Changes, "has changed"),
        (ClosesOnce, "closed already"),
        (Returns, "not a SendResult"),
        (BreaksWhenCancelled, "nothing arrives any more"),
    ],
)
async def test_a_broken_sink_fails_by_name(kind, word):
    sink = kind()

    async def read():
        return sink.records

    with pytest.raises(AssertionError, match=word):
        await check_sink(lambda: sink, read=read)


async def test_an_outage_that_gives_records_up_is_named():
    sink = Destination(answer=lambda _: bq.PermanentError("connection refused"))
    with pytest.raises(AssertionError, match="away: PermanentError"):
        await check_sink(Destination, away=lambda: sink)
    await check_sink(Destination, away=lambda: Destination(opening=[ConnectionRefusedError()]))
