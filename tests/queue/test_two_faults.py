"""Two faults at once: a retry, a removal, a close or a cancellation in the midst of something else."""

from __future__ import annotations

import asyncio
import contextlib
import math

import pytest
from queue_tools import Item, check, check_report, make

import batchqueue_async as bq
from batchqueue_async.queue.limiter import CallLimiter
from batchqueue_async.testing import RecordingHandler, advance, settle

RETRY = bq.HandlerRetry(initial=1.0, multiplier=2.0, max_delay=10.0, max_attempts=3)


class Other(Item):
    pass


class Closing:
    """A handler whose calls take a second, and whose last call is seen."""

    def __init__(self):
        self.batches, self.closes, self.running = [], 0, 0

    async def consume(self, batch):
        self.batches.append(list(batch))
        self.running += 1
        await asyncio.sleep(1)
        self.running -= 1

    async def on_close(self):
        assert not self.running, "closed in the midst of a call"
        self.closes += 1


# --- a scheduler's bound on calls


async def test_a_call_that_waits_for_the_scheduler_is_the_handlers_of_the_moment():
    limiter = CallLimiter(1)
    queues = [bq.BatchQueue(f"q{index}", bq.QueueConfig(), limiter=limiter) for index in range(2)]
    first, removed, after = Closing(), Closing(), RecordingHandler()
    queues[0].add_handler(Item, first)
    queues[1].add_handler(Item, removed)
    queues[1].add_handler(Other, removed)
    await queues[0].produce(Item(1))
    await settle()
    await queues[1].produce_many([Item(2), Other(3)])
    await advance(0.5)
    queues[1].add_handler(Item, after)
    queues[1].remove_handler(Other)
    await advance(5)
    assert not removed.batches
    assert after.batches == [[Item(2)], [Other(3)]]  # its base class's handler is the next one for the type
    assert check(queues[1]).handled == 2
    for queue in queues:
        check_report(await queue.shutdown())
    assert removed.closes == 1
