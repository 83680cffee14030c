"""Faults of list C in configurations and handlers: what was accepted and failed later, or meant something else."""

from __future__ import annotations

import asyncio
import functools
import math
import sys
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import batchqueue_async as bq
from batchqueue_async.testing import RecordingErrorHandler, RecordingHandler

if TYPE_CHECKING:
    from collections.abc import Awaitable

FOUR = {"workers": bq.WorkerPolicy.fixed(4), "partitions": bq.PartitionPolicy.fixed(4)}


def accepted(queue):
    return [partition.accepted for partition in queue.stats().partitions]


# -- C-8: a configuration is a value -----------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", [None, bq.round_robin()])
async def test_c_8_queues_of_one_configuration_take_turns_each_for_itself(selector):
    config = bq.QueueConfig(consumer=RecordingHandler(delay=10.0), selector=selector, **FOUR)
    async with bq.BatchQueueManager() as manager:
        first, second = manager.create("first", config), manager.create("second", config)
        for number in range(8):
            await first.produce(number)
            await second.produce(number)
        assert accepted(first) == accepted(second) == [2, 2, 2, 2]
        await manager.shutdown_all(0)


async def test_c_8_bulk_and_bridge_take_turns_of_their_own_too():
    config = bq.QueueConfig(consumer=RecordingHandler(delay=10.0), selector=bq.round_robin(), **FOUR)
    async with bq.BatchQueueManager() as manager:
        queues = [manager.create(name, config) for name in ("bulk", "more", "bridged")]
        for queue in queues[:2]:
            assert queue.produce_many_nowait(range(6)) == 6
            assert queue.produce_many_nowait(range(3)) == 3
        assert await queues[2].bridge().produce_many_async(range(6)) == 6
        assert await queues[2].bridge().produce_many_async(range(3)) == 3
        assert [sorted(accepted(queue)) for queue in queues] == [[2, 2, 2, 3]] * 3
        await manager.shutdown_all(0)


async def test_c_8_a_copy_chooses_its_selector_for_its_own_use():
    by_type = bq.QueueConfig(**FOUR)
    assert by_type.selector is None
    consumed = replace(by_type, consumer=RecordingHandler(delay=10.0))
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("consumed", consumed)
        await queue.produce_many(range(400))
        assert accepted(queue) == [100, 100, 100, 100]
        await manager.shutdown_all(0)
    assert replace(consumed, consumer=None).make_selector() == bq.type_hash()
    chosen = replace(consumed, selector=bq.type_hash())
    assert replace(chosen, consumer=None, linger=1.0).selector == bq.type_hash()


STRATEGY = bq.BufferStrategy


@pytest.mark.parametrize("word", ["block", "reject", "drop_oldest", "drop_newest"])
@pytest.mark.parametrize("strategy", list(STRATEGY))
def test_c_8_a_copy_keeps_strategy_and_overflow_together(word, strategy):
    by_word, by_strategy = bq.QueueConfig(overflow=word), bq.QueueConfig(strategy=strategy)
    for config in (
        replace(by_strategy, overflow=word),
        replace(by_word, linger=1.0),
        replace(replace(by_strategy, linger=1.0), overflow=word),
        replace(by_strategy, strategy=None, overflow=word),
    ):
        assert (config.overflow, config.strategy) == (word, by_word.strategy)
        config.validate("q")
    for config in (
        replace(by_word, strategy=strategy),
        replace(by_strategy, linger=1.0),
        replace(replace(by_word, linger=1.0), strategy=strategy),
        replace(by_word, overflow=None, strategy=strategy),
    ):
        assert (config.overflow, config.strategy) == (by_strategy.overflow, strategy)
        config.validate("q")
    both = bq.QueueConfig(overflow=word, strategy=strategy)
    if by_word.strategy is strategy:
        assert both == by_word == by_strategy
    else:
        with pytest.raises(bq.ConfigError, match="contradicts strategy="):
            both.validate("q")
        with pytest.raises(bq.ConfigError, match="contradicts strategy="):
            replace(both, linger=1.0).validate("q")


# -- C-18, e14 and e38: numbers and policies that pass, and fail later -------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bq.WorkerPolicy("fixed"), "WorkerPolicy: base=0 with per_core=0.0 is not a fixed number of workers"),
        (lambda: bq.WorkerPolicy("fixed", base=-3), "WorkerPolicy: base=-3 is below 0"),
        (lambda: bq.WorkerPolicy("fixed", 3, 0.5), "WorkerPolicy: base=3 with per_core=0.5 is not a fixed number"),
        (lambda: bq.WorkerPolicy("xxx", 3), "WorkerPolicy: kind='xxx' is unknown; choose one of fixed, cpu_cores"),
        (lambda: bq.WorkerPolicy("cpu_cores"), "WorkerPolicy: per_core=0.0 with base=0 gives no worker"),
        (lambda: bq.WorkerPolicy("io_bound"), "per_core=0.0 is not the number of io_bound; use WorkerPolicy.io_bound"),
        (lambda: bq.WorkerPolicy.fixed(10**12), "count=1000000000000 is above 100_000; set count to that or less"),
        (lambda: bq.WorkerPolicy.cpu_cores(1e300), "multiplier=1e+300 is above 100000"),
        (lambda: bq.WorkerPolicy.cpu_cores(10**400), "multiplier=<int of 1329 bits> is above 100000"),
        (lambda: bq.WorkerPolicy.cpu_cores(math.nan), "multiplier=nan is not a finite number"),
        (lambda: bq.PartitionPolicy("x", 0), "PartitionPolicy: kind='x' is unknown"),
        (lambda: bq.PartitionPolicy("fixed", -3), "PartitionPolicy: number=-3 is below 1"),
        (lambda: bq.PartitionPolicy("fixed", True), "PartitionPolicy: number=True is not a whole number"),
        (lambda: bq.PartitionPolicy.fixed(10**12), "count=1000000000000 is above 100_000"),
        (lambda: bq.throughput_weighted("x"), "throughput_weighted: skip_ratio='x' is not a finite number"),
        (lambda: bq.throughput_weighted(True), "throughput_weighted: skip_ratio=True is not a finite number"),
        (lambda: bq.throughput_weighted(1e300), "skip_ratio=1e+300 is above 1e+09"),
        (lambda: bq.HandlerRetry(initial=math.inf), "HandlerRetry: initial=inf is not a finite number of seconds"),
        (lambda: bq.HandlerRetry(initial=2, max_delay=1), "HandlerRetry: max_delay=1 is below initial=2"),
        (lambda: bq.HandlerRetry(max_attempts=0), "HandlerRetry: max_attempts=0 is below 1"),
        (lambda: bq.BatchPolicy(linger=1e300), "BatchPolicy: linger=1e+300 is above 1e+09"),
        (lambda: bq.BreakerPolicy(enabled="no"), "BreakerPolicy: enabled='no' is not True or False"),
        (lambda: bq.DurableConfig(sync_interval=True), "DurableConfig: sync_interval=True is not a finite number"),
        (lambda: bq.ExportConfig(on_dead_letter=RecordingHandler), "on_dead_letter=RecordingHandler is a class"),
    ],
)
def test_c_18_constructors_refuse_what_makes_no_sense(make, message):
    with pytest.raises(bq.ConfigError) as caught:
        make()
    assert message in str(caught.value)


def selector_of_three(item, count, more): ...


async def async_selector(item, count): ...


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"block_timeout": 10**400}, "block_timeout=<int of 1329 bits> is above 1e+09"),
        ({"buffer_size": 2**63}, "buffer_size=9223372036854775808 is above 1_000_000_000_000"),
        ({"buffer_size": 10**30}, "is above 1_000_000_000_000; set buffer_size to that or less"),
        ({"max_batch": 2**70}, "is above 1_000_000_000_000"),
        ({"drain_timeout": 1e308}, "drain_timeout=1e+308 is above 1e+09"),
        ({"selector": dict}, "selector=dict is a class; give type_hash(), round_robin(), by_key(fn)"),
        ({"selector": async_selector}, "selector=async_selector is async, and nothing would await it"),
        ({"selector": selector_of_three}, "takes (item, count, more), not (item, partition_count)"),
        ({"selector": bq.round_robin}, "selector=round_robin takes (), not (item, partition_count); give type_hash()"),
        ({"balancer": bq.throughput_weighted}, "balancer=throughput_weighted has no assign method"),
        ({"workers": bq.WorkerPolicy.io_bound}, "is not a WorkerPolicy; call it: WorkerPolicy.io_bound(...)"),
        ({"workers": bq.WorkerPolicy}, "workers=WorkerPolicy is not a WorkerPolicy; give WorkerPolicy.fixed(4)"),
        ({"scheduler": bq.SharedScheduler("", bq.WorkerPolicy.fixed(1))}, "scheduler.name='' is not a printable text"),
        ({"on_error": 5}, "on_error=5 is not callable; give a function of (batch, error)"),
    ],
)
async def test_c_18_queues_refuse_what_makes_no_sense(fields, rule):
    manager = bq.BatchQueueManager()
    with pytest.raises(bq.ConfigError) as caught:
        manager.create("q", bq.QueueConfig(consumer=RecordingHandler(), **fields))
    assert str(caught.value).startswith("queue 'q': ")
    assert rule in str(caught.value)
    assert manager.names() == []


@pytest.mark.parametrize("weight", [True, 10**400, 1e308, 1e6, math.nan, 0])
async def test_c_18_a_weight_that_makes_no_sense_registers_nothing(weight):
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(partitions=bq.PartitionPolicy.adaptive()))
        with pytest.raises(bq.ConfigError, match="queue 'q': add_handler: weight="):
            queue.add_handler(int, RecordingHandler(), weight=weight)
        assert queue.remove_handler(int) is False
        assert queue.partition_count == 1


def test_c_18_partitions_stay_within_reason_whatever_the_weights():
    assert bq.PartitionPolicy.adaptive().resolve(8, 1e9) == 100_000
    assert bq.PartitionPolicy.worker_multiply(100_000).resolve(8) == 100_000
    assert bq.WorkerPolicy.cpu_cores(100_000).resolve(64) == 100_000


# -- C-18, e14 and e31: what is a handler ------------------------------------------------------------------------------


async def write(batch): ...


def write_sync(batch): ...


async def write_to(table, batch): ...


async def write_both(batch, error): ...


async def write_nothing(): ...


async def write_all(batch):
    yield batch


def promise(batch) -> Awaitable[None]: ...


def start(batch) -> asyncio.Task[None]: ...


def start_evaluated(batch): ...


start_evaluated.__annotations__["return"] = asyncio.Future


def decorate(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments)

    return wrapper


def decorate_without_a_word(function):
    def wrapper(*arguments):
        return function(*arguments)

    return wrapper


class Writer:
    async def consume(self, batch): ...

    def consume_sync(self, batch): ...


class SyncWriter:
    def consume(self, batch): ...


class WrongWriter:
    async def consume(self): ...


class IdlingWriter(Writer):
    def on_idle(self): ...


class ClosingWriter(Writer):
    async def on_close(self, reason): ...


class GeneratingWriter:
    async def consume(self, batch):
        yield batch


class Call:
    async def __call__(self, batch): ...


class SyncCall:
    def __call__(self, batch): ...


class Proxy:
    """Gives on what it does not have itself."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Odd:
    """Claims a signature that nobody can read."""

    __signature__ = "none"

    async def __call__(self, batch): ...


HANDLERS: dict[str, Any] = {
    "async def": write,
    "bound method": Writer().consume,
    "object with consume": Writer(),
    "object with async call": Call(),
    "partial": functools.partial(write_to, "rows"),
    "partial of a partial": functools.partial(functools.partial(write_to), "rows"),
    "partial of an object": functools.partial(Call()),
    "decorated": decorate(write),
    "decorated twice": decorate(decorate(write)),
    "says Awaitable": promise,
    "says Task": start,
    "says Future": start_evaluated,
    "wrapped": bq.in_thread(write_sync),
    "AsyncMock": mock.AsyncMock(),
    "AsyncMock of a function": mock.AsyncMock(spec=write),
    "mock of a class": mock.Mock(spec=Writer),
    "autospec of a function": mock.create_autospec(write),
    "proxy": Proxy(Writer()),
    "no signature": Odd(),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "def": (
        write_sync,
        "=write_sync is a plain function, and would block the event loop; wrap it: bq.in_thread(write_sync)",
    ),
    "lambda": (lambda batch: None, "is a plain function, and would block the event loop; wrap it: bq.in_thread(...)"),
    "method": (Writer().consume_sync, "is a plain function, and would block the event loop; wrap it"),
    "partial of a def": (functools.partial(write_sync), "is a plain function, and would block the event loop; wrap it"),
    "built in": (print, "=print is a plain function, and would block the event loop; wrap it: bq.in_thread(print)"),
    "built-in method": ([].append, "=append is a plain function"),
    "silent decorator": (decorate_without_a_word(write), "is a plain function"),
    "class": (Writer, "=Writer is a class; give an object of it, as Writer(...) makes it"),
    "sync consume": (
        SyncWriter(),
        "has a consume that is not async, and would block the event loop; make it async def",
    ),
    "sync call": (SyncCall(), "is an object whose call is not async, and would block the event loop; wrap it"),
    "MagicMock": (mock.MagicMock(), "is an object whose call is not async"),
    "generator": (write_all, "is an async generator function; write an async def without yield"),
    "generator method": (GeneratingWriter(), "has a consume that is an async generator function"),
    "two parameters": (write_both, "takes (batch, error), not one batch; give it one parameter, the batch"),
    "no parameter": (write_nothing, "takes (), not one batch"),
    "consume without a parameter": (WrongWriter(), "has a consume that takes (), not one batch"),
    "sync on_idle": (IdlingWriter(), "has an on_idle that is not async, and would block the event loop"),
    "on_close of a reason": (ClosingWriter(), "has an on_close that takes (reason); make it async def on_close(self)"),
    "text": ("write", "='write' is not a handler; give an async callable(batch) or an object with async consume"),
    "None": (None, "handler=None is not a handler"),
}


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
async def test_c_18_what_is_async_is_a_handler(handler):
    async with bq.BatchQueueManager() as manager:
        manager.create("consumed", bq.QueueConfig(consumer=handler))
        manager.create("fallen back", bq.QueueConfig(fallback=handler)).add_handler(int, handler)


@pytest.mark.parametrize(("handler", "rule"), REFUSED.values(), ids=REFUSED)
async def test_c_18_what_would_block_or_fail_is_refused(handler, rule):
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q")
        with pytest.raises(bq.ConfigError) as caught:
            queue.add_handler(int, handler)
        assert str(caught.value).startswith("queue 'q': add_handler: handler=")
        assert rule in str(caught.value)
        for field in ("consumer", "fallback"):
            if handler is not None:
                with pytest.raises(bq.ConfigError) as caught:
                    manager.create("refused", bq.QueueConfig(**{field: handler}))
                assert str(caught.value).startswith(f"queue 'refused': {field}=")
        assert manager.names() == ["q"]


def _async_in_name_alone(result: Any) -> Any:
    @functools.wraps(write)
    def store(batch):
        return result

    return store


class CallsBack(SyncCall):
    def __call__(self, batch) -> Awaitable[None]:
        return len(batch)


AWAITED_IN_VAIN = {
    "decorated": (_async_in_name_alone(3), "handler write returned 3, which can't be awaited; make it async def, or"),
    "object": (CallsBack(), "handler CallsBack returned 1, which can't be awaited; make it async def, or wrap it"),
    "method": (types.SimpleNamespace(consume=_async_in_name_alone([])), "handler SimpleNamespace.consume returned []"),
}


@pytest.mark.parametrize(("handler", "text"), AWAITED_IN_VAIN.values(), ids=AWAITED_IN_VAIN)
async def test_c_18_a_handler_that_returns_nothing_to_await_says_so_by_its_own_name(handler, text):
    errors = RecordingErrorHandler()
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=handler, on_error=errors))
        await queue.produce(1)
        await queue.flush()
    [(items, error)] = errors.failures
    assert (items, type(error)) == ([1], bq.ConfigError)
    assert str(error).startswith(text)


async def test_c_18_an_async_mock_is_called_itself():
    handler = mock.AsyncMock()
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=handler))
        await queue.produce(1)
        await queue.flush()
        await asyncio.sleep(10.0)
    assert [call.args for call in handler.await_args_list] == [([1],)]
    assert handler.mock_calls == handler.await_args_list  # neither `consume` nor `on_idle`


async def test_c_18_an_object_that_stands_for_a_consumer_has_its_consume_called():
    handler = mock.Mock(spec=Writer)
    async with bq.BatchQueueManager() as manager:
        queue = manager.create("q", bq.QueueConfig(consumer=handler))
        await queue.produce(1)
        await queue.flush()
    handler.consume.assert_awaited_once_with([1])
    handler.assert_not_called()


def on_error_of_one(batch): ...


async def on_error(batch, error): ...


def on_error_sync(batch, error, log=None): ...


@pytest.mark.parametrize(
    "function", [on_error, on_error_sync, print, mock.Mock(), mock.AsyncMock(), Proxy(Writer()).consume]
)
def test_c_18_an_error_handler_takes_batch_and_error(function):
    config = bq.QueueConfig(on_error=function)
    if isinstance(function, mock.Mock) or function in (on_error, on_error_sync, print):
        config.validate("q")
    else:
        with pytest.raises(bq.ConfigError, match=r"on_error=consume takes \(batch\), not \(batch, error\)"):
            config.validate("q")


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (on_error_of_one, "on_error=on_error_of_one takes (batch), not (batch, error)"),
        (Writer, "on_error=Writer is a class"),
        (write_all, "on_error=write_all is an async generator function"),
    ],
)
def test_c_18_other_error_handlers_are_refused(function, rule):
    with pytest.raises(bq.ConfigError) as caught:
        bq.QueueConfig(on_error=function).validate("q")
    assert rule in str(caught.value)


# -- C-18, e35: deep JSON in the environment ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ['{"a":' * 100_000, '{"a":' * 20 + "1" + "}" * 20, '{"a": [' + "1," * 10_001 + "1]}"],
    ids=["endless", "deep", "wide"],
)
def test_c_18_json_in_the_environment_is_bounded(text):
    with pytest.raises(bq.ConfigError) as caught:
        bq.load_config(environ={"BATCHQUEUE_QUEUES__A__SCHEDULER": text})
    message = str(caught.value)
    assert message.startswith("environment variable BATCHQUEUE_QUEUES__A__SCHEDULER: ")
    assert "nested more than 16 deep, or has more than 10000 values" in message or "is not JSON" in message
    assert len(message) < 300


def test_c_18_deep_json_is_a_config_error_near_the_end_of_the_stack_too():
    def dive(depth: int) -> str:
        if depth:
            return dive(depth - 1)
        with pytest.raises(bq.ConfigError) as caught:
            bq.load_config(environ={"BATCHQUEUE_QUEUES__A__SCHEDULER": '{"a":' * 500 + "1" + "}" * 500})
        return str(caught.value)

    assert "nested more than 16 deep" in dive(sys.getrecursionlimit() // 2)
