"""How many workers and partitions a queue has, and how it grows with its handlers."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_tools import check, kinds, make

import batchqueue_async as bq
from batchqueue_async.testing import RecordingHandler, run_virtual

ADAPTIVE = bq.PartitionPolicy.adaptive()


@pytest.mark.parametrize(("handlers", "partitions"), [(0, 8), (1, 8), (8, 8), (100, 100), (200, 200), (500, 350)])
async def test_adaptive_growth(handlers, partitions):
    """The documents' table: 8 workers x 25 = 200; below it 1:1, the excess 1:2."""
    queue = make(workers=bq.WorkerPolicy.fixed(8), partitions=ADAPTIVE)
    handler = RecordingHandler()
    types = kinds(handlers)
    for kind in types:
        queue.add_handler(kind, handler)
    assert queue.partition_count == partitions
    stats = check(queue)
    owned = [worker.partitions for worker in stats.workers]
    assert max(owned) - min(owned) <= 1
    assert await queue.produce_many([kind(1) for kind in types]) == handlers
    await queue.flush(timeout=10)
    assert check(queue).handled == handlers


async def test_weighted_handlers_of_the_documents():
    # 642 x 1.0 + 1247 x 0.05 = 642 + 62.35 = 704.35, and e = ceil(704.35) = 705 units of weight
    assert math.ceil(642 * 1.0 + 1247 * 0.05) == 705
    # 8 workers x 25 = 200 partitions 1:1; the other 705 - 200 = 505 units 1:2: 200 + 505 // 2 = 200 + 252 = 452
    assert 200 + 505 // 2 == 452
    queue = make(workers=bq.WorkerPolicy.fixed(8), partitions=ADAPTIVE)
    handler = RecordingHandler()
    types = kinds(642 + 1247)
    for kind in types[:642]:
        queue.add_handler(kind, handler, weight=1.0)
    assert queue.partition_count == 200 + (642 - 200) // 2
    for kind in types[642:]:
        queue.add_handler(kind, handler, weight=0.05)
    assert queue.partition_count == 452
    # Without weights: 1889 handlers, 200 + 1689 // 2 = 1044 (the documents print 1,045)
    assert ADAPTIVE.resolve(8, 1889) == 1044


async def test_a_replaced_or_removed_handler_never_shrinks_a_queue():
    queue = make(workers=bq.WorkerPolicy.fixed(2), partitions=ADAPTIVE)
    kind, other = kinds(2)
    queue.add_handler(kind, RecordingHandler(), weight=10.0)
    assert queue.partition_count == 10
    queue.add_handler(kind, RecordingHandler(), weight=2.0)
    queue.remove_handler(kind)
    queue.add_handler(other, RecordingHandler(), weight=9.5)
    assert queue.partition_count == 10
    queue.add_handler(other, RecordingHandler(), weight=10.5)
    assert queue.partition_count == 11
    check(queue)


async def test_only_adaptive_queues_grow():
    for policy, count in ((bq.PartitionPolicy.fixed(3), 3), (bq.PartitionPolicy.worker_multiply(2), 4)):
        queue = make(workers=bq.WorkerPolicy.fixed(2), partitions=policy)
        for kind in kinds(20):
            queue.add_handler(kind, RecordingHandler())
        assert queue.partition_count == count


async def test_more_workers_than_partitions_are_reduced_with_a_warning(logs):
    queue = make(workers=bq.WorkerPolicy.fixed(8), partitions=bq.PartitionPolicy.fixed(3))
    assert (queue.worker_count, queue.partition_count) == (3, 3)
    (event,) = [event for event in logs if event["log_level"] == "warning"]
    fields = {name: event[name] for name in ("event", "queue", "workers", "partitions")}
    assert fields == {"event": "workers_reduced", "queue": "q", "workers": 8, "partitions": 3}


async def test_partitions_go_round_the_workers():
    queue = make(workers=bq.WorkerPolicy.fixed(4), partitions=bq.PartitionPolicy.worker_multiply(2))
    assert [partition.owner for partition in check(queue).partitions] == [0, 1, 2, 3, 0, 1, 2, 3]


SELECTORS = {
    "type_hash": bq.type_hash,
    "by_key": lambda: bq.by_key(lambda item: item.number % 7),
    "by_type_and_key": lambda: bq.by_key(lambda item: (type(item).__name__, item.number % 3)),
}


@pytest.mark.untraced
@given(
    selector=st.sampled_from(sorted(SELECTORS)),
    strategy=st.sampled_from(list(bq.BufferStrategy)),
    bursts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6), st.floats(0, 0.3)), min_size=1, max_size=8),
    capacity=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)
def test_order_and_counts_hold_through_growth(selector, strategy, bursts, capacity, seed):
    """Each producer's items of one key stay in order, whatever grows while they wait; none is lost or doubled."""

    async def main() -> None:
        handler = RecordingHandler(delay=0.1)
        queue = make(
            workers=bq.WorkerPolicy.fixed(2),
            partitions=ADAPTIVE,
            selector=SELECTORS[selector](),
            strategy=strategy,
            buffer_size=capacity,
            max_batch=3,
            fallback=handler,
        )
        types = kinds(48)
        known = 0
        number = 0
        accepted = []
        for count, grow, pause in bursts:
            burst = [types[(number + index) % len(types)](number + index) for index in range(count)]
            number += count
            for item in burst[: count // 2]:
                if await queue.produce(item):
                    accepted.append(item)
                check(queue)
            accepted += burst[count // 2 : count // 2 + await queue.produce_many(burst[count // 2 :])]
            for kind in types[known : known + grow]:
                queue.add_handler(kind, handler)
            known += grow
            check(queue)
            await asyncio.sleep(pause)
        report = await queue.shutdown(timeout=10_000)
        stats = check(queue)
        assert report.undelivered == []
        assert stats.accepted == len(accepted)
        assert report.handled == len(accepted) - stats.dropped_after
        if not stats.dropped_after:
            assert sorted(handler.handled, key=lambda item: item.number) == accepted
        key = {"type_hash": type, "by_key": lambda item: item.number % 7}.get(
            selector, lambda item: (type(item).__name__, item.number % 3)
        )
        last = {}
        for item in handler.handled:
            # Two registrations may run at once, so order holds within a type and its key.
            kind = (type(item), key(item))
            assert last.get(kind, -1) < item.number
            last[kind] = item.number

    run_virtual(main, seed=seed)
