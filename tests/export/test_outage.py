"""A real outage under load, of BATCHQUEUE_OUTAGE seconds, or 1 for the suite; `make chaos-export` takes more."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc

import pytest
from export_kit import Destination, check, down

import batchqueue_async as bq

SECONDS = float(os.environ.get("BATCHQUEUE_OUTAGE", "1"))
RECORD = 1_000
LIMIT = 4_000_000


@pytest.mark.real_time
@pytest.mark.timeout(SECONDS * 2 + 60)
@pytest.mark.parametrize("disk", [False, True])
async def test_memory_and_disk_stay_within_their_bounds_and_the_loop_stays_responsive(disk, tmp_path):
    sink = Destination(answer=lambda _: down())
    config = bq.ExportConfig(
        path=tmp_path / "queue" if disk else None,
        durable=bq.DurableConfig(durability="os", memory_bytes=1_000_000),
        max_bytes=LIMIT,
        batch=bq.BatchPolicy(max_records=100, linger=0.01),
        retry=bq.RetryPolicy(initial=0.05, max_delay=1.0),
        breaker=bq.BreakerPolicy(threshold=5, reset_timeout=0.5),
        drain_timeout=60.0,
    )
    loop = asyncio.get_running_loop()
    async with bq.Exporter(sink, config) as exporter:
        tracemalloc.start()
        try:
            number, most, lags = 0, 0, []
            end = loop.time() + SECONDS
            while loop.time() < end:
                await exporter.consume([b"%010d" % (number + place) + bytes(RECORD - 10) for place in range(20)])
                number += 20
                sink.calls.clear()
                sink.times.clear()
                before = loop.time()
                await asyncio.sleep(0.002)
                lags.append(loop.time() - before)
                if number % 2_000 == 0:
                    gc.collect()
                    most = max(most, tracemalloc.get_traced_memory()[0])
                    assert check(exporter).bytes <= LIMIT
            assert most < LIMIT + 3_000_000
        finally:
            tracemalloc.stop()
        assert len(lags) > 10
        stats = check(exporter)
        sink.answer = None
        exporter.resume()
        await exporter.flush(timeout=60.0)
        stats = check(exporter)
        assert stats.delivered + stats.dropped_after == number
    kept = {int(record[:10]) for record in sink.records}
    assert max(kept) == number - 1
    assert len(kept) == stats.delivered
