"""An exporter that is given other policies while it runs, and one whose end is brought forward."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from export_kit import Destination, Keyed, check, down, exporter

import batchqueue_async as bq
from batchqueue_async.testing import advance


class Strict(Keyed):
    needs = bq.SinkNeeds(same_bytes=True)


async def test_fewer_attempts_divide_a_strict_batch_sooner():
    sink = Strict(answer=lambda batch: KeyError("odd") if 3 in batch else None)
    async with exporter(sink) as export:
        export.reconfigure(replace(export.config, retry=bq.RetryPolicy(initial=0.1, max_attempts=2)))
        await export.consume(list(range(8)))
        await export.flush(600.0)
        check(export)
    # With so few attempts it is sent once as it is; by the policy that the exporter began with it would be four times.
    assert [len(keys) for keys in sink.keys[:2]] == [8, 4]


async def test_batches_workers_and_the_breaker_follow_a_new_configuration():
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, drain_timeout=0, batch_records=10, workers=bq.WorkerPolicy.fixed(1)) as export:
        await export.consume(list(range(40)))
        await advance(120.0)
        assert export.stats().breaker_opens
        assert {len(call) for call in sink.calls} == {10}
        calls = len(sink.calls)
        batch, breaker = bq.BatchPolicy(linger=0.0, max_records=5), bq.BreakerPolicy(enabled=False)
        workers = bq.WorkerPolicy.fixed(4)
        export.reconfigure(replace(export.config, batch=batch, breaker=breaker, workers=workers))
        sink.answer, sink.latency = None, 1.0
        await export.consume(list(range(40, 80)))
        await export.flush(3_600.0)
        assert (export.stats().breaker, sink.most_active) == ("closed", 4)
        assert max(len(call) for call in sink.calls[calls:]) == 5
        assert check(export).delivered == 80


async def test_a_breaker_that_is_switched_off_lets_everything_try():
    sink = Destination(answer=lambda _: down())
    retry, breaker = bq.RetryPolicy(initial=1.0, max_delay=1.0), bq.BreakerPolicy(reset_timeout=7_200.0)
    async with exporter(sink, drain_timeout=0, retry=retry, breaker=breaker) as export:
        await export.consume([1])
        await advance(3_600.0)
        calls = len(sink.calls)
        assert export.stats().breaker == "open"
        export.reconfigure(replace(export.config, breaker=replace(breaker, threshold=1)))
        await advance(600.0)
        assert len(sink.calls) == calls
        export.reconfigure(replace(export.config, breaker=bq.BreakerPolicy(enabled=False)))
        await advance(120.0)
        assert len(sink.calls) - calls > 60
        assert export.stats().breaker_opens == 1


async def test_those_who_wait_for_room_come_in_when_there_is_more():
    sink = Destination(answer=lambda _: down())
    async with exporter(sink, drain_timeout=0, max_records=2, overflow="block", block_timeout=None) as export:
        await export.consume([1, 2])
        waiting = asyncio.create_task(export.consume([3, 4]))
        await advance(1.0)
        assert not waiting.done()
        export.reconfigure(replace(export.config, max_records=4))
        await waiting
        stats = check(export)
        assert (stats.records, stats.max_records) == (4, 4)
        with pytest.raises(bq.ConfigError, match="max_records can't be lowered while it runs; restart"):
            export.reconfigure(replace(export.config, max_records=3))


async def test_sends_that_the_stages_have_places_for_can_not_change():
    async with exporter(Destination(), split=bq.SplitPolicy(preparers=1, senders=2)) as export:
        with pytest.raises(bq.ConfigError, match="max_sends can't change while it runs and has split; restart"):
            export.reconfigure(replace(export.config, max_sends=1))


async def test_the_end_comes_nearer_with_each_call_that_asks_for_it():
    sink = Destination(latency=1_000.0)
    export = exporter(sink, drain_timeout=600.0)
    await export.__aenter__()
    await export.consume([1, 2, 3])
    start = asyncio.get_running_loop().time()
    ends = [asyncio.create_task(export.shutdown(timeout)) for timeout in (600.0, 900.0, 300.0, 200.0, 20.0)]
    reports = await asyncio.gather(*ends)
    assert asyncio.get_running_loop().time() - start <= 20.0
    assert all(report is reports[0] for report in reports)
    assert reports[0].undelivered == [1, 2, 3]
    assert sink.cancelled == 1


async def test_stuck_records_that_the_queue_has_dropped_are_forgotten(logs):
    sink = Destination(answer=lambda batch: KeyError("odd") if min(batch) < 0 else None)
    async with exporter(sink, max_records=4, batch_records=1, retry=bq.RetryPolicy(initial=60.0)) as export:
        await export.consume([-1])
        await advance(3_600.0)
        assert export.stats().stuck == 1
        await export.consume([1, 2, 3, 4])
        assert (check(export).dropped_after, export.stats().stuck) == (1, 0)
        await export.flush(3_600.0)
        await export.consume([-2])
        await advance(3_600.0)
        assert export.stats().stuck == 1
    assert [event["event"] for event in logs].count("records_stuck") == 2
