"""Bad configuration is a ConfigError that names queue, field, value and rule, before anything starts."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest

import batchqueue_async as bq
from batchqueue_async.testing import RecordingHandler

POLICY = bq.WorkerPolicy.fixed(1)
HANDLER = RecordingHandler()


def seconds(field: str, *, none: bool = False, zero: bool = False):
    """The rules of a field in seconds."""
    yield field, -0.5, "is below 0; set"
    for value in ("1", True, math.nan, math.inf, *(() if none else (None,))):
        yield field, value, "is not a finite number of seconds; give seconds as a float"
    if not zero:
        yield field, 0, "is not above 0; set"


def whole(field: str):
    yield field, 0, f"is below 1; set {field} to 1 or more"
    yield field, -3, "is below 1"
    for value in (1.5, "10", True, None):
        yield field, value, "is not a whole number; give an int of 1 or more"


RULES = [
    ("workers", 4, "is not a WorkerPolicy; give a WorkerPolicy"),
    ("scheduler", "IO_POOL", "is not a SharedScheduler; give a SharedScheduler"),
    ("scheduler", bq.SharedScheduler("", POLICY), "has no name; give SharedScheduler a name"),
    ("scheduler", bq.SharedScheduler("IO", 3), "has no WorkerPolicy; give SharedScheduler a WorkerPolicy"),
    ("partitions", 8, "is not a PartitionPolicy; give a PartitionPolicy"),
    ("partitions", None, "is not a PartitionPolicy"),
    ("strategy", "blocking", "is not a BufferStrategy; give a BufferStrategy"),
    ("selector", "round_robin", "is not callable; give type_hash(), round_robin(), by_key(fn) or a function"),
    ("consumer", 3, "is no handler; give an async callable(batch) or an object with async consume(batch)"),
    ("fallback", "x", "is no handler; give an async callable(batch) or an object with async consume(batch)"),
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


@pytest.mark.parametrize(("field", "value", "rule"), RULES, ids=[f"{field}={value!r}" for field, value, _ in RULES])
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
        assert str(caught.value).startswith(f"queue 'spans': {field}={value!r} {rule}")
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
            "is given beside workers; give at most one of the two",
        ),
        (
            {"consumer": HANDLER, "fallback": HANDLER},
            "is given beside consumer, which takes every item; give only one of the two",
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
    ],
)
def test_what_keeps_the_rules_is_accepted(fields):
    bq.QueueConfig(**fields).validate("spans")


def test_the_defaults_are_those_of_the_contract():
    config = bq.QueueConfig()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert values == {
        "workers": None,
        "scheduler": None,
        "partitions": bq.PartitionPolicy.fixed(1),
        "selector": bq.type_hash(),
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
    }
    assert bq.QueueConfig(consumer=HANDLER).selector == bq.round_robin()
    assert bq.QueueConfig(consumer=HANDLER, selector=bq.type_hash()).selector == bq.type_hash()


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
