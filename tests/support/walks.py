"""How often the reader of a walk through the core has to change the file: counted from the calls that are made.

A walk is every call of a function of the package, in order; a change is a call whose file is not that of the call
before. Of a producer that waits, the walk is what its own task runs, from `produce` to its answer; of an item that a
thread puts in, what thread and loop run until the handler is called.

    python tests/support/walks.py       # both walks, step by step
"""

from __future__ import annotations

import asyncio
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import batchqueue_async as bq

if TYPE_CHECKING:
    from types import FrameType

PACKAGE = Path(bq.__file__).parent


class Walk:
    """The calls of the package's functions while it is recorded, each as task (or thread), file and function."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str, str]] = []
        self.ended = False

    def __enter__(self) -> Self:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and not self.ended and path.is_relative_to(PACKAGE):
            self.steps.append((_who(), str(path.relative_to(PACKAGE)), frame.f_code.co_name))

    async def record_here(self) -> None:
        """Record the loop's thread too, from now on."""
        sys.setprofile(self._on_event)

    def of(self, who: str) -> Walk:
        """Only what one task runs."""
        walk = Walk()
        walk.steps = [step for step in self.steps if step[0] == who]
        return walk

    @property
    def changes(self) -> int:
        """How often the file changes."""
        return sum(before[1] != after[1] for before, after in pairwise(self.steps))

    def __str__(self) -> str:
        lines = [f"{len(self.steps)} calls, {len({step[1] for step in self.steps})} files, {self.changes} changes"]
        return "\n".join([*lines, *(f"  {who:12} {path:28} {function}" for who, path, function in self.steps)])


def _who() -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.current_thread().name if task is None else task.get_name()


async def waiting_produce() -> Walk:
    """A producer that waits for room, in a queue of one place."""
    gate = asyncio.Event()

    async def handle(_: list[int]) -> None:
        await gate.wait()

    async with bq.BatchQueueManager() as manager:
        queue = manager.create("walk", bq.QueueConfig(consumer=handle, buffer_size=1, max_batch=1))
        for number in range(2):  # one with the handler, one in the partition's place
            await queue.produce(number)
            await asyncio.sleep(0.01)
        with Walk() as walk:
            producer = asyncio.create_task(queue.produce(2), name="producer")
            await asyncio.sleep(0.01)
            gate.set()
            assert await producer
    return walk


async def loop_here() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def thread_to_handler() -> Walk:
    """One item from a thread, into a queue that is idle."""
    walk, seen = Walk(), threading.Event()

    async def handle(_: list[int]) -> None:
        walk.ended = walk.ended or bool(walk.steps)
        seen.set()

    with bq.SyncBridge() as bridge:
        queue = bridge.get_or_create("walk", bq.QueueConfig(consumer=handle))
        queue.deliver([0])  # what is done for a first item alone is not of the walk
        seen.clear()
        bridge.call(asyncio.sleep, 0.2)  # until its drain task is parked
        bridge.call(walk.record_here)
        loop = bridge.call(loop_here)
        for _ in range(10):  # turns of the loop, in which the end of that call goes on
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(60)
        walk.steps.clear()
        with walk:
            assert queue.produce(1)
        assert seen.wait(60)
    walk.steps = [step for step in walk.steps if step[1] != "bridge/watchdog.py"]  # it beats whenever it likes
    return walk


if __name__ == "__main__":
    waiting = asyncio.run(waiting_produce())
    sys.stdout.write(f"produce that waits: {waiting.of('producer')}\n")
    sys.stdout.write(f"everything that ran meanwhile: {str(waiting).splitlines()[0]}\n")
    sys.stdout.write(f"thread to handler: {thread_to_handler()}\n")
