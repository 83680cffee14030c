"""Fault BQ-h on queues with handlers by type: fewer types than workers is told, once, and only where it is so."""

from __future__ import annotations

import pytest

import batchqueue_async as bq
from batchqueue_async.queue.drain import REVIEW_AFTER
from batchqueue_async.testing import RecordingHandler


def warnings(logs):
    return [event for event in logs if event["event"] == "type_hash_cannot_spread"]


@pytest.mark.parametrize(("types", "told"), [(1, 1), (3, 1), (40, 0)])
async def test_bq_h_fewer_types_than_workers_are_told_once(types, told, logs):
    kinds = [type(f"Kind{number}", (), {}) for number in range(types)]
    config = bq.QueueConfig(workers=bq.WorkerPolicy.fixed(4), partitions=bq.PartitionPolicy.fixed(64))
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", config)
        for kind in kinds:
            queue.add_handler(kind, RecordingHandler())
        for _ in range(3):
            await queue.produce_many([kinds[number % types]() for number in range(REVIEW_AFTER * types)])
            await queue.flush()
    assert len(warnings(logs)) == told
    assert all(event["queue"] == "q" and "round_robin" in event["way_out"] for event in warnings(logs))
