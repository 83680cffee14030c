"""Programs whose interpreter ends amid a call of the hot path; `python tests/_native/endings.py NAME` runs one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import warnings
from typing import Any

import batchqueue_async as bq

KINDS: list[Any] = [type(f"Kind{number}", (), {}) for number in range(20)]


def queue_in_a_daemon(*, typed: bool) -> tuple[bq.BatchQueue[Any], threading.Event]:
    """A queue on a loop of a daemon thread, which the interpreter does not wait for; and when it has had rounds."""
    made: list[bq.BatchQueue[Any]] = []
    ready, drained = threading.Event(), threading.Event()

    async def handle(batch: list[Any]) -> None:
        if made[0].stats().handled > 10 * len(KINDS):
            drained.set()

    async def main() -> None:
        partitions = bq.PartitionPolicy.fixed(8 if typed else 1)
        config: bq.QueueConfig[Any] = bq.QueueConfig(consumer=None if typed else handle, partitions=partitions)
        queue = bq.BatchQueue("ending", config)
        for kind in KINDS if typed else ():
            queue.add_handler(kind, handle)
        made.append(queue)
        ready.set()
        while True:
            for kind in KINDS:
                queue.produce_nowait(kind())
                await queue.produce(kind())
            await queue.produce_many([kind() for kind in KINDS])
            await asyncio.sleep(0)

    threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
    ready.wait()
    return made[0], drained


def put(queue: bq.BatchQueue[Any]) -> None:
    """Put items in from this thread, for ever."""
    bridge = queue.bridge()
    while True:
        for kind in KINDS:
            bridge.produce(kind())
        bridge.produce_many([kind() for kind in KINDS])


def amid_a_drain(*, typed: bool) -> None:
    """The main thread ends while the queue's loop, in another one, drains."""
    _, drained = queue_in_a_daemon(typed=typed)
    drained.wait()


def amid_a_put(*, typed: bool) -> None:
    """The main thread ends while others put items in."""
    queue, drained = queue_in_a_daemon(typed=typed)
    for _ in range(4):
        threading.Thread(target=put, args=(queue,), daemon=True).start()
    drained.wait()


class Late:
    """It is let go of with the modules, and calls a queue that has lost its loop."""

    def __init__(self, queue: bq.BatchQueue[Any]) -> None:
        # of its own, since the names of the modules are gone by then
        self.calls = queue.produce_nowait, queue.produce, queue.bridge().produce
        self.item, self.suppress, self.write = KINDS[0](), contextlib.suppress, os.write

    def __del__(self) -> None:
        for call in self.calls:
            with self.suppress(Exception):
                call(self.item)
        self.write(1, b"called late\n")


def with_what_is_left(*, typed: bool) -> None:
    """Coroutines, items, queues and a bridge are there when the modules go."""

    async def handle(batch: list[Any]) -> None:
        """Handle nothing."""

    async def main() -> None:
        queue: bq.BatchQueue[Any] = bq.BatchQueue("left", bq.QueueConfig(consumer=None if typed else handle))
        if typed:
            queue.add_handler(KINDS[0], handle)
        KINDS.append(Late(queue))
        KINDS.append([queue.produce(KINDS[0]()) for _ in range(3)])
        queue.produce_nowait(KINDS[0]())

    warnings.simplefilter("ignore")
    asyncio.run(main())


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    {"drain": amid_a_drain, "put": amid_a_put, "left": with_what_is_left}[sys.argv[1]](typed=sys.argv[2] == "typed")
    sys.stdout.write(f"ends now, {bq.accelerated}\n")
    sys.stdout.flush()
