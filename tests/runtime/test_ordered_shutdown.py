"""Queues that feed each other end upstream first, wherever they live, within one deadline for all."""

from __future__ import annotations

import asyncio

import pytest
from bridge_tools import PATIENCE, Held, run_script
from queue_tools import now

import batchqueue_async as bq
from batchqueue_async.testing import RecordingHandler, settle


def config(handler, *feeds, **options):
    return bq.QueueConfig(consumer=handler, feeds=feeds, **options)


class Forward:
    """A handler that passes on what it got, after a while."""

    def __init__(self, manager, target, delay=1.0):
        self.manager, self.target, self.delay = manager, target, delay
        self.refused = []

    async def consume(self, batch):
        await asyncio.sleep(self.delay)
        for item in batch:
            if not await self.manager.get(self.target).produce(item):
                self.refused.append(item)


@pytest.mark.parametrize("downstream_first", [True, False])
async def test_a_pipeline_loses_nothing(downstream_first):
    manager = bq.BatchQueueManager()
    handler = RecordingHandler()
    makers = [
        lambda: manager.create("c", config(handler)),
        lambda: manager.create("b", config(Forward(manager, "c"), "c")),
        lambda: manager.create("a", config(Forward(manager, "b"), "b")),
    ]
    for make in makers if downstream_first else reversed(makers):
        make()
    assert await manager.get("a").produce_many(range(10)) == 10
    reports = await manager.shutdown_all()
    assert handler.handled == list(range(10))
    assert {name: report.handled for name, report in reports.items()} == {"a": 10, "b": 10, "c": 10}
    assert now() == 2.0


async def test_those_downstream_take_items_in_until_their_turn_comes():
    manager = bq.BatchQueueManager()
    rows = manager.create("rows", config(RecordingHandler()))
    lines = manager.create("lines", config(Forward(manager, "rows"), "rows"))
    assert await lines.produce(1)
    ending = asyncio.create_task(manager.shutdown_all())
    await settle()
    assert (lines.closed, rows.closed) == (True, False)
    assert await rows.produce("from elsewhere")
    reports = await ending
    assert reports["rows"].handled == 2


async def test_a_stage_has_what_is_left_of_the_time():
    manager = bq.BatchQueueManager()
    stuck = RecordingHandler()
    stuck.hold()
    manager.create("rows", config(stuck))
    manager.create("lines", config(Forward(manager, "rows", delay=3.0), "rows"))
    assert await manager.get("lines").produce(1)
    reports = await manager.shutdown_all(timeout=5.0)
    assert now() == 5.0
    assert reports["lines"].handled == 1
    assert reports["rows"].undelivered == [1]


async def test_when_the_time_is_over_everything_ends_at_once():
    manager = bq.BatchQueueManager()
    held = [RecordingHandler() for _ in range(3)]
    for handler in held:
        handler.hold()
    for name, feeds, handler in zip("cba", ([], ["c"], ["b"]), held, strict=True):
        assert await manager.create(name, config(handler, *feeds)).produce(name)
    reports = await manager.shutdown_all(timeout=2.0)
    assert now() == 2.0
    assert {name: report.undelivered for name, report in reports.items()} == {name: [name] for name in "abc"}


async def test_without_a_timeout_each_has_its_own_and_all_together_the_longest():
    manager = bq.BatchQueueManager()
    held = [RecordingHandler() for _ in range(3)]
    for handler in held:
        handler.hold()
    for name, feeds, seconds, handler in zip("cba", ([], ["c"], ["b"]), (2.0, 10.0, 4.0), held, strict=True):
        assert await manager.create(name, config(handler, *feeds, drain_timeout=seconds)).produce(name)
    reports = await manager.shutdown_all()
    assert now() == 10.0  # 4 for a, then 6 of the 10 of b, and nothing is left for c
    assert all(report.undelivered for report in reports.values())


async def test_queues_that_feed_each_other_in_a_circle_end_together():
    manager = bq.BatchQueueManager()
    sink = RecordingHandler()
    manager.create("out", config(sink))
    manager.create("a", config(Forward(manager, "b"), "b"))
    manager.create("b", config(Forward(manager, "a"), "a", "out"))
    for name in "ab":
        assert await manager.get(name).produce(name)
    ending = asyncio.create_task(manager.shutdown_all())
    await settle()
    assert [manager.get(name).closed for name in ("a", "b", "out")] == [True, True, False]
    reports = await ending
    assert now() == 1.0
    assert (reports["a"].handled, reports["b"].handled) == (1, 1)


async def test_a_name_that_nobody_has_is_no_reason_to_wait():
    manager = bq.BatchQueueManager()
    handler = RecordingHandler()
    assert await manager.create("a", config(handler, "nowhere")).produce(1)
    assert (await manager.shutdown_all())["a"].handled == 1


async def test_a_shutdown_that_is_cancelled_goes_on_and_a_further_one_returns_all_reports():
    manager = bq.BatchQueueManager()
    handler = RecordingHandler(delay=5.0)
    manager.create("rows", config(handler))
    manager.create("lines", config(Forward(manager, "rows"), "rows"))
    assert await manager.get("lines").produce(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await manager.shutdown_all()
    assert manager.names() == ["rows", "lines"]
    reports = await manager.shutdown_all()
    assert {name: report.handled for name, report in reports.items()} == {"rows": 1, "lines": 1}
    assert manager.names() == []


# -- across loops and threads, in real time


def pooled(name, handler, *feeds, **options):
    return config(handler, *feeds, scheduler=bq.SharedScheduler(name, bq.WorkerPolicy.fixed(1)), **options)


class ForwardByBridge:
    """A handler that passes on what it got to a queue on another loop."""

    def __init__(self, target, gate=None):
        self.target, self.gate = target, gate
        self.refused = []

    async def consume(self, batch):
        if self.gate is not None:
            await asyncio.to_thread(self.gate.wait, PATIENCE)
        for item in batch:
            if not await self.target.produce_async(item):
                self.refused.append(item)


@pytest.mark.real_time
@pytest.mark.parametrize("way", ["coroutine", "bridge"])
async def test_a_pipeline_across_schedulers_loses_nothing(way):
    bridge = bq.SyncBridge()
    handler = Held(held=False)
    rows = await asyncio.to_thread(bridge.get_or_create, "rows", pooled("A", handler, linger=PATIENCE))
    parse = ForwardByBridge(rows)
    lines = await asyncio.to_thread(bridge.get_or_create, "lines", pooled("B", parse, "rows", linger=PATIENCE))
    read = ForwardByBridge(lines)
    files = await asyncio.to_thread(bridge.get_or_create, "files", config(read, "lines", linger=PATIENCE))
    assert await files.produce_many_async(range(100)) == 100
    if way == "coroutine":
        reports = await bridge.manager.shutdown_all()
    else:
        reports = await asyncio.to_thread(bridge.close)
    assert handler.items == list(range(100))
    assert {name: report.handled for name, report in reports.items()} == {"rows": 100, "lines": 100, "files": 100}
    assert not parse.refused
    assert not read.refused
    await asyncio.to_thread(bridge.close)


@pytest.mark.real_time
def test_a_bridge_beside_a_manager_ends_its_own_queues_in_order():
    manager = bq.BatchQueueManager()
    handler = Held(held=False)
    with bq.SyncBridge(manager) as bridge:
        rows = bridge.get_or_create("rows", config(handler, linger=PATIENCE))
        parse = ForwardByBridge(rows)
        lines = bridge.get_or_create("lines", config(parse, "rows", linger=PATIENCE))
        lines.produce_many(range(10))
        assert set(bridge.close()) == {"rows", "lines"}
    assert handler.items == list(range(10))


def test_a_pipeline_is_drained_in_order_at_the_exit_of_a_program():
    done = run_script(
        """
import asyncio
import batchqueue_async as bq

async def store(batch):
    print("stored", len(batch), flush=True)

async def parse(batch):
    await asyncio.sleep(0.05)
    await rows.produce_many_async(batch)

bridge = bq.SyncBridge()
rows = bridge.get_or_create("rows", bq.QueueConfig(consumer=store, linger=60.0))
pool = bq.SharedScheduler("B", bq.WorkerPolicy.fixed(1))
lines = bridge.get_or_create("lines", bq.QueueConfig(consumer=parse, linger=60.0, feeds=("rows",), scheduler=pool))
lines.produce_many(range(10))
"""
    )
    assert "stored 10" in done.stdout
    assert "queue='rows' handled=10 undelivered=0" in done.stderr
