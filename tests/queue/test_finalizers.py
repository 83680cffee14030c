"""A finalizer, or a signal handler, on the loop's own thread that puts an item in, amid any step of a drain task."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import batchqueue_async as bq
from batchqueue_async.queue.partition import Partition
from batchqueue_async.testing import VirtualTimeLoop, settle

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

STEPS = {"take_runs", "_open_runs", "_set_fast_slots", "_drain", "_nap", "_take", "backoff", "wants_idle"}
FOLDER = str(Path(bq.__file__).parent / "queue")


class Interrupt:
    """Acts once, before the line with number `at` of those that the steps run."""

    def __init__(self, at: int, act: Callable[[], object], steps: set[str] = STEPS) -> None:
        self.at, self.act, self.steps = at, act, steps
        self.lines = 0

    def on_call(self, frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        return self.on_line if code.co_name in self.steps and code.co_filename.startswith(FOLDER) else None

    def on_line(self, _: FrameType, event: str, __: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.act()
        return self.on_line


async def interrupted(at: int) -> bool:
    """Whether there was such a line; every item that was accepted has to be handled without a further one."""
    handled: list[object] = []

    async def handle(batch: list[object]) -> None:
        handled.extend(batch)
        await asyncio.sleep(0)

    accepted = 0
    queue = bq.BatchQueue("q", bq.QueueConfig(consumer=handle, buffer_size=4))

    def put(item: object) -> None:
        nonlocal accepted
        taken = queue.produce_nowait(item)  # which may be interrupted itself
        accepted += taken

    interrupt = Interrupt(at, lambda: put("finalizer"))
    await settle()
    tracer = sys.gettrace()
    sys.settrace(interrupt.on_call)
    try:
        put(1)
        many = await queue.produce_many([2, 3, 4, 5, 6])
        accepted += many
        for _ in range(3):
            await asyncio.sleep(0)
        put(7)
        await settle()
    finally:
        sys.settrace(tracer)
    await settle()
    assert len(handled) == accepted, at
    assert queue.stats().adds_up
    report = await queue.shutdown()
    assert (report.handled, report.accepted) == (accepted, accepted), at
    return interrupt.lines >= at


def test_c_21_a_finalizer_may_produce_amid_any_step_of_the_drain_task():
    points = 0
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        while runner.run(interrupted(points + 1)):
            points += 1
    assert points > 50


STEPS_OF_A_TAKE = {"take_runs", "qsize", "seal", "_open_runs", "_remove", "serve", "rearm", "_set_fast_slots"}


def interrupted_take(at: int) -> bool:
    """Whether there was such a line in a take, as a producer has a place there that it then gives up."""
    told: list[Partition[str]] = []

    def on_ready(partition: Partition[str]) -> float:
        told.append(partition)
        return 0.0

    partition = Partition[str](0, 4, on_ready)
    for item in "abcd":
        assert partition.offer(item)
    quits, stays = partition.wait_for(["x", "y", "z"]), partition.wait_for(["last"])
    partition.take(3)
    partition.leave(quits)
    assert (partition.room(), partition.reserved) == (2, 1)
    told.clear()

    def put() -> None:
        for _ in partition.fast_slots:
            partition.tail.append("finalizer")
            return
        assert partition.offer("finalizer")

    interrupt = Interrupt(at, put, STEPS_OF_A_TAKE)
    tracer = sys.gettrace()
    sys.settrace(interrupt.on_call)
    try:
        taken = partition.take(4)
    finally:
        sys.settrace(tracer)
    partition.leave(stays)
    assert taken + partition.items() == ["d", *["finalizer"] * (interrupt.lines >= at)], at
    assert partition.listed or partition.empty(), at
    assert len(told) <= 1, at
    return interrupt.lines >= at


async def test_c_32_a_finalizer_may_produce_amid_any_step_of_a_take_while_a_producer_has_a_place():
    """What it put into the fast path, which is open then, was not known to the drain task."""
    points = 0
    while interrupted_take(points + 1):
        points += 1
    assert points > 25
