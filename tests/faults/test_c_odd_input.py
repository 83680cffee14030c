"""List C of the fault register: what callers, selectors, classes and handlers give that makes no sense (C-5, C-18)."""

from __future__ import annotations

import asyncio
import functools
import math
from enum import IntEnum
from typing import Any

import pytest
from bridge_tools import PATIENCE, Held, until
from queue_tools import check, make

import batchqueue_async as bq
from batchqueue_async.testing import RecordingHandler, settle

ODD_TIMEOUTS: list[tuple[Any, str]] = [
    (math.nan, "timeout=nan is not a number of seconds"),
    (-1, "timeout=-1 is below 0"),
    (-0.001, "timeout=-0.001 is below 0"),
    (-math.inf, "timeout=-inf is below 0"),
    ("5s", "timeout='5s' is not a number of seconds"),
    (True, "timeout=True is not a number of seconds"),
    ([1], r"timeout=\[1\] is not a number of seconds"),
]


# -- timeouts: one rule for every call


@pytest.mark.parametrize(("timeout", "rule"), ODD_TIMEOUTS)
async def test_c_18_calls_of_a_queue_refuse_odd_timeouts_before_anything_is_begun(timeout, rule):
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=RecordingHandler()))
        calls = {
            "queue 'q': flush": queue.flush,
            "queue 'q': shutdown": queue.shutdown,
            "shutdown_all": manager.shutdown_all,
        }
        for subject, call in calls.items():
            with pytest.raises(bq.ConfigError, match=f"{subject}: {rule}; pass seconds such as timeout=5.0"):
                await call(timeout=timeout)
        with pytest.raises(bq.ConfigError, match=f"queue 'q': shutdown: {rule}"):
            await manager.shutdown("q", timeout)
        assert not queue.closed
        await queue.flush(timeout=math.inf)


@pytest.mark.parametrize(("timeout", "rule"), ODD_TIMEOUTS)
def test_c_18_calls_of_a_bridge_refuse_odd_timeouts_before_anything_is_begun(timeout, rule):
    handler = Held()
    with bq.SyncBridge() as bridge:
        queue: Any = bridge.get_or_create("q", bq.QueueConfig(consumer=handler, buffer_size=2, max_batch=1))
        assert queue.produce(1)
        handler.wait_for_call()
        calls: list[Any] = [
            functools.partial(queue.produce_many, [2, 3, 4]),
            functools.partial(queue.deliver, [2]),
            queue.flush,
            queue.stats,
            queue.shutdown,
            functools.partial(queue.add_handler, int, Held()),
            functools.partial(bridge.call, asyncio.sleep, 0),
            functools.partial(bridge.get_or_create, "other"),
            bridge.close,
        ]
        for call in calls:
            with pytest.raises(bq.ConfigError, match=f": {rule}"):
                call(timeout=timeout)

        async def others() -> None:
            for name, arguments in {
                "produce_async": [2],
                "produce_many_async": [[2, 3, 4]],
                "deliver_async": [[2]],
                "flush_async": [],
                "stats_async": [],
                "shutdown_async": [],
            }.items():
                with pytest.raises(bq.ConfigError, match=f"queue 'q': .*: {rule}"):
                    await getattr(queue, name)(*arguments, timeout=timeout)

        asyncio.run(others())
        assert queue.stats(timeout=PATIENCE).accepted == 1
        handler.open()


def test_c_18_the_runner_and_schedulers_refuse_odd_timeouts():
    async def main(manager: bq.BatchQueueManager) -> None:
        raise AssertionError

    with pytest.raises(bq.ConfigError, match="run: drain_timeout=nan is not a number of seconds"):
        bq.run(main, drain_timeout=math.nan)
    scheduler = bq.Scheduler("POOL", bq.WorkerPolicy.fixed(1))
    with pytest.raises(bq.ConfigError, match="scheduler 'POOL': stop: timeout=nan"):
        scheduler.stop(math.nan)
    assert scheduler.stop(PATIENCE)


# -- selectors


class Second(IntEnum):
    INDEX = 1


@pytest.mark.parametrize("answer", [None, 1.0, "1", math.nan, [0], b"\1"])
@pytest.mark.parametrize("way", ["produce", "bulk", "bridge"])
def test_c_18_a_selector_that_gives_no_index_is_named_with_what_it_gave(answer, way):
    def odd(item: object, count: int) -> Any:
        return answer

    config: Any = bq.QueueConfig(consumer=Held(held=False), selector=odd, partitions=bq.PartitionPolicy.fixed(2))
    with bq.SyncBridge() as bridge:
        queue: Any = bridge.get_or_create("q", config)
        own: Any = bridge.manager.get("q")
        calls = {
            "produce": lambda: bridge.call(own.produce, 1),
            "bulk": lambda: bridge.call(own.produce_many, [1, 2]),
            "bridge": lambda: queue.produce(1),
        }
        text = r"queue 'q': selector=.*odd.* gave .* for 2 partitions, which is not a"
        with pytest.raises(bq.ConfigError, match=text):
            calls[way]()
        assert queue.stats().accepted == 0


@pytest.mark.parametrize("answer", [True, Second.INDEX])
async def test_c_18_a_selector_may_give_what_stands_for_an_index(answer):
    queue = make(
        consumer=RecordingHandler(), selector=lambda item, count: answer, partitions=bq.PartitionPolicy.fixed(2)
    )
    assert await queue.produce(1)
    assert [each.accepted for each in check(queue).partitions] == [0, 1]
    await queue.shutdown()


# -- in_thread and in_process


async def write(batch: list[int]) -> None:
    pass


class Writer:
    async def __call__(self, batch: list[int]) -> None: ...


@pytest.mark.parametrize("adapter", [bq.in_thread, bq.in_process])
@pytest.mark.parametrize("function", [write, functools.partial(write), Writer(), RecordingHandler[int]().consume])
def test_c_18_an_async_function_needs_no_thread_and_is_told_so(adapter, function):
    name = adapter.__name__
    text = f"{name}: function=.* is async, and nothing would await it; give it to the queue as it is, without {name}"
    with pytest.raises(bq.ConfigError, match=text):
        adapter(function)


@pytest.mark.parametrize("adapter", [bq.in_thread, bq.in_process])
def test_c_18_a_function_for_a_thread_takes_one_batch(adapter):
    with pytest.raises(bq.ConfigError, match=r"function=.* takes \(\), not \(batch\); give a function of \(batch\)"):
        adapter(lambda: None)
    for good in (sum, list, lambda batch, more=None: None, [].extend):
        adapter(good)


# -- a retry that asks for a very long time


@pytest.mark.parametrize(("asked", "waited"), [(3600.0, 20.0), (1e300, 20.0), (7.0, 7.0)])
async def test_c_18_a_handler_that_asks_to_be_left_alone_for_long_is_called_after_max_delay(asked, waited):
    handler = RecordingHandler[int](
        fail=lambda batch: bq.RetryableError("away", retry_after=asked) if len(handler.batches) < 2 else None
    )
    queue = make(consumer=handler, retry=bq.HandlerRetry(max_delay="20s"))
    await queue.produce(1)
    began = asyncio.get_running_loop().time()
    await queue.flush()
    assert asyncio.get_running_loop().time() - began == pytest.approx(waited)
    assert queue.stats().handled == 1
    await queue.shutdown()


async def test_c_18_putting_a_failed_batch_back_into_a_full_queue_names_the_way_out():
    told: list[BaseException] = []

    async def again(batch: list[int], error: BaseException) -> Any:
        try:
            await queue.produce_many(batch)
        except bq.DeadlockError as deadlock:
            told.append(deadlock)
        return bq.RETRY

    handler = RecordingHandler[int](fail=lambda batch: ValueError() if not told else None)
    queue = make(consumer=handler, buffer_size=2, max_batch=2, on_error=again)
    await queue.produce_many(range(6))
    await queue.flush()
    assert "return bq.RETRY from on_error" in str(told[0])
    assert queue.stats().failed == 0
    await queue.shutdown()


# -- C-5: classes whose hash raises at some moments


class Moody(type):
    broken = False

    def __hash__(cls) -> int:
        if Moody.broken:
            raise ValueError("no hash now")
        return type.__hash__(cls)


@pytest.fixture
def moody():
    """A class that changes its partition as a queue grows from one to nine."""
    for number in range(100):
        kind = Moody(f"Moody{number}", (), {})
        if bq.type_hash()(kind(), 9):
            break
    yield kind
    Moody.broken = False


async def grown_queue(kind: type, handler: Any) -> bq.BatchQueue[Any]:
    """One item of the class is with its handler, and another on its way to its new partition."""
    queue = make(partitions=bq.PartitionPolicy.adaptive())
    queue.add_handler(kind, handler, 0.1)
    items = [kind(), kind()]
    assert await queue.produce(items[0])
    await settle()
    queue.add_handler(int, RecordingHandler(), 8.0)
    assert queue.partition_count == 9
    assert await queue.produce(items[1])
    assert check(queue).partitions
    return queue


async def test_c_5_a_class_whose_hash_raises_as_its_move_arrives_keeps_its_items_and_their_order(moody):
    handler = RecordingHandler[Any](delay=1.0)
    queue = await grown_queue(moody, handler)
    Moody.broken = True
    await asyncio.sleep(2.0)  # the first item is handled, and what moves arrives
    Moody.broken = False
    third = moody()
    assert await queue.produce(third)
    await queue.flush(timeout=60)
    assert not queue.closed
    report = await queue.shutdown()
    assert report.accepted == 3
    assert report.handled + report.failed == 3
    assert handler.handled[-1] is third
    assert report.undelivered == []


async def test_c_5_a_class_whose_hash_raises_as_a_queue_grows_holds_up_no_other(moody):
    handler = RecordingHandler[Any](delay=1.0)
    queue = await grown_queue(moody, handler)
    Moody.broken = True
    queue.add_handler(str, RecordingHandler(), 8.0)
    assert queue.partition_count > 9
    assert await queue.produce("text")
    for _ in range(50):
        queue.add_handler(float, RecordingHandler(), 0.1)
        assert queue.remove_handler(float)
    Moody.broken = False
    assert await queue.produce(moody())
    await queue.flush(timeout=60)
    report = await queue.shutdown()
    assert (report.accepted, report.handled) == (4, 4)


def test_c_5_a_class_whose_hash_raises_as_the_loop_collects_loses_no_item(moody):
    handler = Held(held=False)
    with bq.SyncBridge() as bridge:
        queue: Any = bridge.get_or_create("q", bq.QueueConfig(fallback=handler, partitions=bq.PartitionPolicy.fixed(3)))
        queue.stats()
        hold = Held()
        queue.add_handler(int, hold)
        blocked = bridge.manager.get("q").loop

        def block() -> None:
            entered.append(1)
            until(lambda: not entered[1:] or entered[-1] == "go")

        entered: list[Any] = []
        blocked.call_soon_threadsafe(block)
        until(lambda: entered)
        entered.append("wait")
        assert queue.produce(moody())
        assert queue.produce("text")
        Moody.broken = True
        entered.append("go")
        until(lambda: "text" in handler.items)
        Moody.broken = False
        queue.flush(timeout=PATIENCE)
        stats = queue.stats()
        assert stats.accepted == stats.handled + stats.failed + stats.unhandled == 2
