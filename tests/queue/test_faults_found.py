"""Faults that the model, the seeds or a hostile reading found in the in-memory queue; each stays as a named test."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import batchqueue_async as bq
from batchqueue_async.testing import RecordingHandler, advance, settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def manager() -> AsyncIterator[bq.BatchQueueManager]:
    async with bq.BatchQueueManager() as manager:
        yield manager


# -- lingering -------------------------------------------------------------------------------------------------------


async def test_a_batch_that_the_fast_path_fills_leaves_at_once(manager):
    handler = RecordingHandler[int]()
    queue = manager.create("q", bq.QueueConfig(consumer=handler, linger=10.0, max_batch=5))
    for item in range(5):
        assert queue.produce_nowait(item)
        await settle()
    assert handler.batches == [[0, 1, 2, 3, 4]]


async def test_a_partition_that_is_full_before_the_batch_does_not_linger(manager):
    handler = RecordingHandler[int]()
    queue = manager.create("q", bq.QueueConfig(consumer=handler, linger=10.0, max_batch=50, buffer_size=4))
    for item in range(4):
        assert queue.produce_nowait(item)
        await settle()
    assert handler.batches == [[0, 1, 2, 3]]


async def test_a_batch_spread_over_partitions_leaves_when_it_is_full(manager):
    handler = RecordingHandler[int]()
    config = bq.QueueConfig(
        consumer=handler, linger=10.0, max_batch=10, partitions=bq.PartitionPolicy.fixed(3), selector=lambda i, n: i % 3
    )
    queue = manager.create("q", config)
    for item in [0, 0, 0, 1, 1, 1, 1, 0, 2, 2]:
        assert queue.produce_nowait(item)
        await settle()
    assert len(handler.items) == 10
