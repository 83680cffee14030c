"""Every rule of a `QueueConfig`, with a message that names queue, field, value, rule and way out."""

from __future__ import annotations

import re

import pytest

import batchqueue_async as bq


async def consume(batch): ...


FIXED = bq.WorkerPolicy.fixed(1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"workers": 4}, "workers=4 is not a WorkerPolicy; give a WorkerPolicy"),
        ({"scheduler": "IO"}, "scheduler='IO' is not a SharedScheduler; give a SharedScheduler"),
        ({"scheduler": bq.SharedScheduler("IO", FIXED), "workers": FIXED}, "is given beside workers; give at most one"),
        ({"scheduler": bq.SharedScheduler("", FIXED)}, "has no name; give SharedScheduler a name"),
        ({"scheduler": bq.SharedScheduler("IO", 2)}, "has no WorkerPolicy; give SharedScheduler a WorkerPolicy"),
        ({"partitions": 4}, "partitions=4 is not a PartitionPolicy"),
        ({"partitions": None}, "partitions=None is not a PartitionPolicy"),
        ({"strategy": "blocking"}, "strategy='blocking' is not a BufferStrategy"),
        ({"selector": 3}, "selector=3 is not callable; give type_hash(), round_robin(), by_key(fn) or a function"),
        ({"consumer": 3}, "consumer=3 is no handler; give an async callable(batch) or an object with async consume"),
        ({"fallback": 3}, "fallback=3 is no handler"),
        ({"on_error": 3}, "on_error=3 is not callable; give a function of (batch, error)"),
        ({"consumer": consume, "fallback": consume}, "is given beside consumer, which takes every item"),
        ({"buffer_size": 0}, "buffer_size=0 is below 1; set buffer_size to 1 or more"),
        ({"buffer_size": 1.5}, "buffer_size=1.5 is not a whole number; give an int of 1 or more"),
        ({"max_batch": True}, "max_batch=True is not a whole number"),
        ({"max_batch": -1}, "max_batch=-1 is below 1"),
        ({"block_timeout": 0}, "block_timeout=0 is not above 0; set block_timeout to a positive number"),
        ({"block_timeout": "1"}, "block_timeout='1' is not a finite number of seconds; give seconds as a float"),
        ({"linger": -0.1}, "linger=-0.1 is below 0; set linger to a positive number"),
        ({"linger": None}, "linger=None is not a finite number of seconds"),
        ({"min_idle": 0}, "min_idle=0 is not above 0"),
        ({"max_idle": float("inf")}, "max_idle=inf is not a finite number of seconds"),
        ({"max_idle": 0.0005}, "max_idle=0.0005 is below min_idle=0.001; raise max_idle"),
        ({"handler_timeout": -1}, "handler_timeout=-1 is below 0"),
        ({"drain_timeout": float("nan")}, "drain_timeout=nan is not a finite number of seconds"),
        ({"balance_interval": 0}, "balance_interval=0 is not above 0"),
        ({"balancer": consume}, "has no assign method; give throughput_weighted() or an object with assign"),
    ],
)
def test_a_broken_rule(options, expected):
    config = bq.QueueConfig(**options)
    with pytest.raises(bq.ConfigError, match=re.escape(expected)) as caught:
        config.validate("spans")
    assert str(caught.value).startswith(f"queue 'spans': {next(iter(options))}=") or len(options) == 2


@pytest.mark.parametrize("name", ["", None, 5, "two\nlines"])
def test_a_name_that_is_none(name):
    with pytest.raises(bq.ConfigError, match="is not a printable text; give the queue a name"):
        bq.QueueConfig().validate(name)


def test_the_limits_themselves_are_allowed():
    bq.QueueConfig(
        buffer_size=1, max_batch=1, linger=0, min_idle=0.05, max_idle=0.05, drain_timeout=0, block_timeout=1e-9
    ).validate("q")


def test_the_selector_follows_from_the_use():
    assert bq.QueueConfig().selector == bq.type_hash()
    assert bq.QueueConfig(consumer=consume).selector == bq.round_robin()
    assert bq.QueueConfig(consumer=consume, selector=bq.type_hash()).selector == bq.type_hash()


def test_differences():
    assert bq.QueueConfig().differences(bq.QueueConfig()) == []
    assert bq.QueueConfig().differences(bq.QueueConfig(linger=1, max_batch=2)) == ["max_batch", "linger"]


def test_nothing_of_a_configuration_can_be_set_later():
    with pytest.raises(AttributeError):
        bq.QueueConfig().linger = 1
