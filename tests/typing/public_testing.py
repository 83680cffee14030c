"""Type-only uses of the public test tools: checked by mypy and pyright, never run."""

from __future__ import annotations

import asyncio
from typing import assert_type

from batchqueue_async.testing import (
    FaultCounts,
    FaultProxy,
    IdleRecordingHandler,
    RecordingErrorHandler,
    RecordingHandler,
    VirtualTimeLoop,
    advance,
    run_virtual,
    settle,
)


async def main() -> int:
    handler = RecordingHandler[str](delay=lambda batch: 0.1 * len(batch), fail=ValueError("no"))
    await handler.consume(("a", "b"))
    await handler.wait_for(2, timeout=1.0)
    handler.fail = lambda batch: None if "a" in batch else KeyError("b")
    assert_type(handler.batches, list[list[str]])
    assert_type(handler.items, list[str])
    idle: RecordingHandler[str] = IdleRecordingHandler[str]()
    idle.hold()
    on_error = RecordingErrorHandler()
    on_error(["a"], KeyError("a"))
    await settle()
    await advance(1)
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        with loop.hold_clock():
            assert_type(await loop.run_in_executor(None, len, "ab"), int)
        loop.call_at(1.0, print, "a", "b")
    async with FaultProxy("127.0.0.1:5432") as proxy:
        await proxy.switch("delay", seconds=0.5)
        assert_type(proxy.address, str)
        assert_type(proxy.counts(), FaultCounts)
    return 1


def entry() -> None:
    assert_type(run_virtual(main), int)
    assert_type(run_virtual(main(), seed=3, timeout=None), int)
