"""Faults of list X about errors that nobody knows, where a repetition must be the same request."""

from __future__ import annotations

from itertools import pairwise

import pytest
from export_kit import Destination, Keyed, check, exporter

import batchqueue_async as bq
from batchqueue_async.testing import advance

STRICT = bq.SinkNeeds(same_bytes=True)


class Strict(Keyed):
    needs = STRICT


class StrictWithoutKeys(Destination):
    needs = STRICT


@pytest.fixture(params=["memory", "disk"])
def place(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "queue"


def odd(bad):
    return lambda batch: KeyError("odd") if any(record in bad for record in batch) else None


async def test_x_39_one_odd_record_holds_up_no_others_of_its_strict_batch(place, logs):
    sink = Strict(answer=odd({333}))
    async with exporter(sink, place) as export:
        await export.consume(list(range(500)))
        await advance(3_600.0)
        stats = check(export)
        assert (stats.delivered, stats.records, stats.stuck, stats.healthy) == (499, 1, 1, False)
        sink.answer = None
        await export.flush(3_600.0)
        stats = check(export)
        assert (stats.delivered, stats.stuck, stats.healthy) == (500, 0, True)
    assert sorted(sink.records) == list(range(500))
    events = [event for event in logs if event["event"] == "records_stuck"]
    assert [(event["records"], event["reason"]) for event in events] == [(1, "KeyError")]
    # The same request while it is one; and no key in a request that was divided is ever in another of its size.
    requests = [tuple(keys) for keys in sink.keys]
    assert [len(request) for request in requests[:6]] == [500, 500, 500, 500, 250, 250]
    assert len(set(requests[:4])) == 1
    for key in requests[0]:
        own = [request for request in requests if key in request]
        assert len({len(request) for request in own}) == len(set(own))


async def test_x_39_within_its_attempts_the_odd_record_alone_is_given_up(place):
    sink = Strict(answer=odd({7}))
    async with exporter(sink, place, retry=bq.RetryPolicy(initial=0.1, max_attempts=12)) as export:
        await export.consume(list(range(32)))
        await export.flush(3_600.0)
        stats = check(export)
    assert (stats.delivered, stats.dead_lettered, stats.stuck) == (31, 1, 0)
    assert sorted(sink.records) == [*range(7), *range(8, 32)]


@pytest.mark.parametrize("ordering", ["key", "order"])
async def test_x_39_with_its_order_kept(ordering, place):
    turns = iter([True] * 9)
    sink = Strict(answer=lambda _: KeyError("odd") if next(turns, False) else None)
    options = {"key": lambda record: record % 5} if ordering == "key" else {}
    async with exporter(sink, place, ordering=ordering, batch_records=8, **options) as export:
        for start in range(0, 40, 4):
            await export.consume(list(range(start, start + 4)))
            await advance(0.5)
        await export.flush(36_000.0)
        assert check(export).delivered == 40
    assert sorted(sink.records) == list(range(40))
    for key in range(5 if ordering == "key" else 1):
        mine = [record for record in sink.records if ordering == "order" or record % 5 == key]
        assert mine == sorted(mine)


async def test_x_39_in_order_no_half_is_sent_again_without_a_delay(place):
    turns = iter([True] * 9)
    sink = Strict(answer=lambda _: KeyError("odd") if next(turns, False) else None)
    retry = bq.RetryPolicy(initial=8.0, jitter=False)
    async with exporter(sink, place, ordering="order", retry=retry) as export:
        await export.consume(list(range(8)))
        await export.flush(36_000.0)
    assert sink.records == list(range(8))
    assert [len(call) for call in sink.calls[:6]] == [8, 8, 8, 8, 4, 2]
    assert min(later - earlier for earlier, later in pairwise(sink.times[:10])) >= 7.9


async def test_x_39_without_keys_the_batch_stays_and_is_called_stuck(place, logs):
    sink = StrictWithoutKeys(answer=odd({3}))
    async with exporter(sink, place, batch_records=10) as export:
        await export.consume(list(range(20)))
        await advance(3_600.0)
        stats = check(export)
        assert (stats.delivered, stats.stuck, stats.healthy) == (10, 10, False)
        assert stats.last_error == "KeyError"
        sink.answer = None
        await export.flush(3_600.0)
        assert check(export).stuck == 0
    assert {tuple(call) for call in sink.calls} == {tuple(range(10)), tuple(range(10, 20))}
    assert [event["records"] for event in logs if event["event"] == "records_stuck"] == [10]


async def test_x_39_a_record_of_any_sink_that_fails_for_unknown_reasons_is_called_stuck(place):
    sink = Destination(answer=odd({3}))
    async with exporter(sink, place) as export:
        await export.consume(list(range(8)))
        await advance(7_200.0)
        stats = check(export)
        assert (stats.delivered, stats.stuck, stats.healthy) == (7, 1, False)


async def test_x_39_what_goes_to_the_failover_queue_is_not_stuck_and_is_divided_there():
    sink = Strict(answer=odd({3}))
    retry, failover = bq.RetryPolicy(initial=0.1, max_attempts=8), bq.FailoverPolicy(interval=1.0)
    async with exporter(sink, retry=retry, failover=failover, drain_timeout=0) as export:
        await export.consume(list(range(8)))
        await advance(60.0)
        stats = check(export)
        assert (stats.delivered, stats.failover_records, stats.stuck) == (7, 1, 0)
