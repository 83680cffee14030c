"""The exporter as it is used: real time, real threads, a real disk, a process that is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from export_kit import Destination, check, down

import batchqueue_async as bq
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.sqlite import SqliteSink


@pytest.mark.real_time
@pytest.mark.parametrize("disk", [False, True])
async def test_all_of_it_together(disk, tmp_path):
    sent = 0

    def answer(batch):
        nonlocal sent
        sent += 1
        return down() if sent % 5 == 0 else bq.TooLargeError("413") if len(batch) > 40 else None

    sink = Destination(answer=answer, latency=0.001)
    config = bq.ExportConfig(
        path=tmp_path / "queue" if disk else None,
        batch=bq.BatchPolicy(max_records=50, linger=0.005),
        retry=bq.RetryPolicy(initial=0.001, max_delay=0.01),
        breaker=bq.BreakerPolicy(threshold=3, reset_timeout=0.01),
        split=bq.SplitPolicy(prepare=lambda batch: [record + 1 for record in batch]),
        adaptive=bq.AdaptivePolicy(max_workers=8, interval=0.01),
        overflow="block",
        max_records=500,
    )
    async with bq.Exporter(sink, config) as exporter, bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=exporter, workers=bq.WorkerPolicy.fixed(3)))
        assert await queue.produce_many(range(3_000)) == 3_000
        await queue.flush()
        await exporter.flush()
        stats = check(exporter)
        assert stats.delivered == 3_000
        assert stats.retries > 0
        assert stats.splits > 0
    assert sorted(sink.records) == list(range(1, 3_001))


@pytest.mark.real_time
async def test_sqlite_holds_each_record_once_though_many_are_sent_twice(tmp_path):
    class Forgetful(SqliteSink):
        """Delivers, then says that it did not."""

        times = 0

        async def send_keyed(self, batch, keys):
            result = await super().send_keyed(batch, keys)
            self.times += 1
            if self.times % 2:
                raise bq.RetryableError("the answer was lost")
            return result

    sink = Forgetful(tmp_path / "out.db", table="numbers")
    config = bq.ExportConfig(
        path=tmp_path / "queue",
        batch=bq.BatchPolicy(max_records=20, linger=0.0),
        retry=bq.RetryPolicy(initial=0.001, max_delay=0.002),
    )
    async with bq.Exporter(sink, config) as exporter:
        for number in range(0, 200, 10):
            await exporter.consume([{"n": number + place} for place in range(10)])
        await exporter.flush()
        assert check(exporter).skipped > 0
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(tmp_path / "out.db")) as database:
        assert sorted(number for (number,) in database.execute("SELECT n FROM numbers")) == list(range(200))


def test_what_was_confirmed_survives_being_killed(tmp_path):
    confirmed = 0
    for lines in (3, 40, 15):
        command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path), str(confirmed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(lines):
                confirmed = int(process.stdout.readline())
            process.kill()
            # What it confirmed between the last line read and the kill.
            rest = [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
            confirmed = max([confirmed, *rest])

    async def finish():
        config = bq.ExportConfig(path=tmp_path / "queue")
        async with bq.Exporter(JsonLinesSink(tmp_path / "out.jsonl"), config) as exporter:
            await exporter.flush()
            assert exporter.stats().records == 0

    asyncio.run(finish())
    delivered = {json.loads(line)["n"] for line in (tmp_path / "out.jsonl").read_text().splitlines()}
    assert set(range(confirmed)) <= delivered
