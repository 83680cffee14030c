"""Bad configuration is a ConfigError that names queue, field, value and rule, before anything starts."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest

import batchqueue_async as bq
from batchqueue_async._support.wording import short
from batchqueue_async.testing import RecordingHandler

POLICY = bq.WorkerPolicy.fixed(1)
HANDLER = RecordingHandler()


def seconds(field: str, *, none: bool = False, zero: bool = False):
    """The rules of a field in seconds."""
    yield field, -0.5, "is below 0; set"
    for value in ("1", "fast", True, math.nan, math.inf, *(() if none else (None,))):
        yield field, value, "is not a finite number of seconds; give seconds as a float, or a text such as '250ms'"
    for value in (1e300, 10**400):
        yield field, value, f"is above 1e+09; set {field} to that or less"
    if not zero:
        yield field, 0, "is not above 0; set"


def whole(field: str):
    yield field, 0, f"is below 1; set {field} to 1 or more"
    yield field, -3, "is below 1"
    for value in (1.5, "10", True, None):
        yield field, value, "is not a whole number; give an int of 1 or more"
    for value in (2**63, 10**5_000):
        yield field, value, f"is above 1_000_000_000_000; set {field} to that or less"


RULES = [
    ("workers", 4, "is not a WorkerPolicy; give WorkerPolicy.fixed(4) or None"),
    ("workers", 0.5, "is not a WorkerPolicy; give WorkerPolicy.cpu_cores(0.5) or None"),
    ("workers", "many", "is not a WorkerPolicy; give WorkerPolicy.fixed(4) or None"),
    ("scheduler", 2, "is not a SharedScheduler; give SharedScheduler('IO_POOL', WorkerPolicy.fixed(2)) or None"),
    ("scheduler", "IO", "is not a SharedScheduler; give SharedScheduler('IO', WorkerPolicy.fixed(4)) or None"),
    ("partitions", 8, "is not a PartitionPolicy; give PartitionPolicy.fixed(8)"),
    ("partitions", True, "is not a PartitionPolicy; give PartitionPolicy.fixed(4)"),
    ("partitions", None, "is not a PartitionPolicy; give PartitionPolicy.fixed(4)"),
    ("strategy", "blocking", "is not a BufferStrategy; give a BufferStrategy such as BufferStrategy.BLOCKING"),
    ("strategy", "reject", "is not a BufferStrategy; give a BufferStrategy such as BufferStrategy.IF_POSSIBLE"),
    ("overflow", "if_possible", "is unknown; choose one of block, reject, drop_oldest, drop_newest"),
    ("overflow", "drop_oldst", "is unknown; did you mean drop_oldest? or choose one of block, reject, drop_oldest"),
    ("overflow", [1], "is unknown; choose one of block, reject, drop_oldest, drop_newest"),
    ("buffer_bytes", 0, "is below 1; set buffer_bytes to 1 or more, or None"),
    ("buffer_bytes", "16 potatoes", "is not a whole number of bytes; give an int of 1 or more, or a text such as"),
    ("buffer_bytes", 2**61, "is above 1_152_921_504_606_846_976; set buffer_bytes to that or less, or None"),
    ("size_of", 3, "is not callable; give a function of (item)"),
    ("feeds", "", "is not a name of a queue, nor several; give a text, or a tuple of texts"),
    ("feeds", ("spans", 3), "is not a name of a queue, nor several"),
    ("feeds", None, "is not a name of a queue, nor several"),
    ("log_errors", "all", "is unknown; choose one of redacted, full"),
    ("retry", 3, "is not a HandlerRetry; give HandlerRetry(max_attempts=3)"),
    ("retry", None, "is not a HandlerRetry; give HandlerRetry(max_attempts=5)"),
    ("selector", "round_robin", "is not callable; give type_hash(), round_robin(), by_key(fn) or a function"),
    ("consumer", 3, "is not a handler; give an async callable(batch) or an object with async consume(batch)"),
    ("fallback", "x", "is not a handler; give an async callable(batch) or an object with async consume(batch)"),
    ("on_error", 3, "is not callable; give a function of (batch, error)"),
    ("balancer", 3, "has no assign method; give throughput_weighted() or an object with assign"),
    *whole("buffer_size"),
    *whole("max_batch"),
    *seconds("block_timeout", none=True),
    *seconds("linger", zero=True),
    *seconds("min_idle"),
    *seconds("max_idle"),
    *seconds("handler_timeout", none=True),
    *seconds("drain_timeout", zero=True),
    *seconds("balance_interval"),
]


@pytest.mark.parametrize(
    ("field", "value", "rule"), RULES, ids=[f"{field}={short(value)}" for field, value, _ in RULES]
)
async def test_every_rule_has_its_message(field, value, rule):
    config = bq.QueueConfig(**{field: value})
    before = len(asyncio.all_tasks())
    manager = bq.BatchQueueManager()
    for make in (
        lambda: config.validate("spans"),
        lambda: bq.BatchQueue("spans", config),
        lambda: manager.create("spans", config),
        lambda: manager.get_or_create("spans", config),
    ):
        with pytest.raises(bq.ConfigError) as caught:
            make()
        assert str(caught.value).startswith(f"queue 'spans': {field}={short(value)} {rule}")
        assert [fault.path for fault in caught.value.faults] == [field]
    assert len(asyncio.all_tasks()) == before
    assert manager.names() == []
    assert manager.scheduler("IO") is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"min_idle": 0.001, "max_idle": 0.0005},
            "queue 'spans': max_idle=0.0005 is below min_idle=0.001; raise max_idle",
        ),
        (
            {"workers": POLICY, "scheduler": bq.SharedScheduler("IO", POLICY)},
            "is given together with workers; give at most one of the two",
        ),
        (
            {"consumer": HANDLER, "fallback": HANDLER},
            "is given together with consumer, which takes every item; give only one of the two",
        ),
        (
            {"strategy": bq.BufferStrategy.BLOCKING, "overflow": "reject"},
            "queue 'spans': overflow='reject' contradicts strategy=BLOCKING, which means 'block'; give only one of the",
        ),
        (
            {"buffer_bytes": "1MiB"},
            "queue 'spans': buffer_bytes=1048576 is given without size_of; give a function from an item to its bytes",
        ),
        ({"size_of": len}, "queue 'spans': size_of=len is given without buffer_bytes; give both or none"),
        ({"feeds": ("rows", "spans")}, "feeds=('rows', 'spans') names the queue itself; name only other queues"),
        (
            {"scheduler": bq.SharedScheduler("", POLICY)},
            "queue 'spans': scheduler.name='' is not a name; set scheduler.name to a text",
        ),
        (
            {"scheduler": bq.SharedScheduler("IO", 3)},
            "queue 'spans': scheduler.policy=3 is not a WorkerPolicy; give WorkerPolicy.fixed(3)",
        ),
    ],
)
def test_rules_about_two_fields(fields, message):
    with pytest.raises(bq.ConfigError) as caught:
        bq.QueueConfig(**fields).validate("spans")
    assert message in str(caught.value)
    assert str(caught.value).startswith("queue 'spans': ")


@pytest.mark.parametrize("name", ["", None, 3, "two\nlines", "\x00"])
async def test_a_queue_needs_a_name_that_can_be_printed(name):
    with pytest.raises(bq.ConfigError, match=r"name=.* is not a printable text; give the queue a name"):
        bq.BatchQueueManager().create(name)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"linger": 0, "drain_timeout": 0, "block_timeout": 1, "handler_timeout": 1},
        {"min_idle": 0.05, "max_idle": 0.05},
        {"buffer_size": 1, "max_batch": 1, "block_timeout": 1e-9},
        {"consumer": HANDLER},
        {"fallback": HANDLER, "on_error": print, "balancer": bq.throughput_weighted()},
        {"strategy": bq.BufferStrategy.IF_POSSIBLE, "overflow": "reject"},
        {"buffer_bytes": "16MiB", "size_of": len},
        {"feeds": "rows", "log_errors": "full", "retry": bq.HandlerRetry(max_attempts=1)},
        {"linger": 1e9, "buffer_size": 10**12},
    ],
)
def test_what_keeps_the_rules_is_accepted(fields):
    bq.QueueConfig(**fields).validate("spans")


def test_the_defaults_are_those_of_the_contract():
    config = bq.QueueConfig()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del values["_settled"]
    assert values == {
        "workers": None,
        "scheduler": None,
        "partitions": bq.PartitionPolicy.fixed(1),
        "selector": None,
        "buffer_size": 10_000,
        "strategy": bq.BufferStrategy.BLOCKING,
        "block_timeout": None,
        "consumer": None,
        "fallback": None,
        "on_error": None,
        "max_batch": 10_000,
        "linger": 0.0,
        "min_idle": 0.001,
        "max_idle": 0.050,
        "handler_timeout": None,
        "drain_timeout": 30.0,
        "balancer": None,
        "balance_interval": 10.0,
        "overflow": "block",
        "buffer_bytes": None,
        "size_of": None,
        "feeds": (),
        "log_errors": "redacted",
        "retry": bq.HandlerRetry(initial=0.1, multiplier=2.0, max_delay=5.0, max_attempts=5),
    }
    assert config.make_selector() == bq.type_hash()
    assert bq.QueueConfig(consumer=HANDLER).make_selector() == bq.round_robin()
    assert bq.QueueConfig(consumer=HANDLER, selector=bq.type_hash()).make_selector() == bq.type_hash()


def test_a_configuration_is_frozen_and_keyword_only():
    config = bq.QueueConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.buffer_size = 3
    with pytest.raises(TypeError):
        bq.QueueConfig(POLICY)


def test_differences_name_the_fields():
    assert bq.QueueConfig().differences(bq.QueueConfig()) == []
    assert bq.QueueConfig(linger=1.0, max_batch=5).differences(bq.QueueConfig(linger=1)) == ["max_batch"]
    assert bq.QueueConfig(selector=bq.round_robin()).differences(bq.QueueConfig(selector=bq.round_robin())) == []
    assert bq.QueueConfig(consumer=HANDLER).differences(bq.QueueConfig(selector=bq.round_robin())) == ["consumer"]
    assert bq.QueueConfig(overflow="reject").differences(bq.QueueConfig()) == ["strategy", "overflow"]
