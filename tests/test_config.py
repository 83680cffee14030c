"""Bad configuration is a ConfigError that names queue, field, value and rule, before anything starts."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle

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
    ("feeds", "", "is not the name of a queue, or a list of names; give a text, or a tuple of texts"),
    ("feeds", ("spans", 3), "is not the name of a queue, or a list of names"),
    ("feeds", None, "is not the name of a queue, or a list of names"),
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
            "queue 'spans': scheduler.name='' is not a printable text; set name to one",
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
        "retry": bq.HandlerRetry(initial=0.1, multiplier=2.0, max_delay=60.0, max_attempts=5),
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


# -- all faults at once ------------------------------------------------------------------------------------------------


def faults_of(make):
    with pytest.raises(bq.ConfigError) as caught:
        make()
    return caught.value.faults


def test_all_faults_of_a_queue_are_said_at_once():
    config = bq.QueueConfig(max_batch=0, linger="soon", min_idle=1.0, workers=4, feeds="spans", consumer=print)
    with pytest.raises(bq.ConfigError) as caught:
        config.validate("spans")
    assert str(caught.value) == (
        "6 faults in the configuration:\n"
        "  queue 'spans': workers=4 is not a WorkerPolicy; give WorkerPolicy.fixed(4) or None\n"
        "  queue 'spans': consumer=print is a plain function, and would block the event loop; "
        "wrap it: bq.in_thread(print), or make it async def\n"
        "  queue 'spans': max_batch=0 is below 1; set max_batch to 1 or more\n"
        "  queue 'spans': linger='soon' is not a finite number of seconds; "
        "give seconds as a float, or a text such as '250ms'\n"
        "  queue 'spans': max_idle=0.05 is below min_idle=1.0; raise max_idle\n"
        "  queue 'spans': feeds=('spans',) names the queue itself; name only other queues"
    )
    assert caught.value.faults[2] == bq.ConfigFault(
        owner="queue 'spans'", path="max_batch", value="0", rule="is below 1", way_out="set max_batch to 1 or more"
    )


def test_one_fault_is_one_line():
    with pytest.raises(bq.ConfigError) as caught:
        bq.QueueConfig(max_batch=0).validate("spans")
    assert str(caught.value) == "queue 'spans': max_batch=0 is below 1; set max_batch to 1 or more"
    assert [str(fault) for fault in caught.value.faults] == [str(caught.value)]


def test_a_name_that_is_none_is_said_with_the_rest():
    assert [fault.path for fault in faults_of(lambda: bq.QueueConfig(max_batch=0).validate(""))] == [
        "name",
        "max_batch",
    ]


def test_rules_between_fields_look_at_sound_fields_alone():
    assert [fault.path for fault in faults_of(lambda: bq.QueueConfig(min_idle="1", max_idle=0.1).validate("q"))] == [
        "min_idle"
    ]
    config = bq.QueueConfig(overflow="all", strategy=bq.BufferStrategy.BLOCKING)
    assert [fault.path for fault in faults_of(lambda: config.validate("q"))] == ["overflow"]


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (
            lambda: bq.DurableConfig(order="key", max_bytes=1, overflow="wait", sync_interval=0),
            ["sync_interval", "max_bytes", "overflow", "key"],
        ),
        (lambda: bq.DurableConfig(max_record="1TiB", key=len), ["key", "max_record"]),
        (
            lambda: bq.ExportConfig(
                batch=500, workers=4, ordering="key", encode=str, path="x", failover=bq.FailoverPolicy()
            ),
            ["batch", "workers", "key", "encode", "failover", "failover", "failover"],
        ),
        (lambda: bq.RetryPolicy(initial=0, multiplier=0.5, jitter="yes"), ["initial", "multiplier", "jitter"]),
        (lambda: bq.HandlerRetry(initial=0, max_attempts=10**6), ["initial", "max_attempts"]),
        (lambda: bq.WorkerPolicy("x", -1, -1.0), ["kind", "base", "per_core"]),
    ],
)
def test_all_faults_of_other_configurations_are_said_at_once(make, paths):
    assert [fault.path for fault in faults_of(make)] == paths


def test_a_long_list_of_faults_is_cut_and_kept():
    error = bq.ConfigError.of(
        bq.ConfigFault(path=f"field{number}", rule="is wrong", way_out="-") for number in range(75)
    )
    assert len(str(error).splitlines()) == 52
    assert str(error).endswith("and 25 more; the error's `faults` has them all")
    assert len(error.faults) == 75


def test_an_error_travels_between_processes_with_its_faults():
    (fault,) = faults_of(lambda: bq.QueueConfig(max_batch=0).validate("q"))
    error = pickle.loads(pickle.dumps(bq.ConfigError.of([fault, fault])))
    assert error.faults == (fault, fault)
    assert str(error).startswith("2 faults")
    assert bq.ConfigError("no").faults == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bq.QueueConfig(max_bacth=1), "QueueConfig: max_bacth is not a field of it; did you mean max_batch?"),
        (lambda: bq.ExportConfig(retires=1), "ExportConfig: retires is not a field of it; did you mean retry?"),
        (lambda: bq.DurableConfig(max_byte=1), "DurableConfig: max_byte is not a field of it; did you mean max_bytes?"),
        (lambda: bq.DurableConfig.for_memory(max_byte=1), "DurableConfig: max_byte is not a field of it; did you"),
        (lambda: bq.BatchPolicy(lingers=1), "BatchPolicy: lingers is not a field of it; did you mean linger?"),
        (
            lambda: bq.HandlerRetry(attempts=1),
            "HandlerRetry: attempts is not a field of it; did you mean max_attempts?",
        ),
        (lambda: dataclasses.replace(bq.QueueConfig(), lingr=1), "lingr is not a field of it; did you mean linger?"),
    ],
)
def test_a_misspelled_field_is_told_the_nearest_one(make, message):
    with pytest.raises(bq.ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message) or message in str(caught.value)
    assert isinstance(caught.value, TypeError)  # as Python has it for any wrong argument


def test_all_misspelled_fields_are_told_at_once():
    assert [fault.path for fault in faults_of(lambda: bq.QueueConfig(max_bacth=1, lingr=2, linger=3))] == [
        "max_bacth",
        "lingr",
    ]


@pytest.mark.parametrize(
    ("field", "value", "example"),
    [
        ("batch", 500, "give BatchPolicy(max_records=500)"),
        ("workers", 4, "give WorkerPolicy.fixed(4)"),
        ("retry", 3, "give RetryPolicy(max_attempts=3)"),
        ("breaker", 5, "give BreakerPolicy(threshold=5)"),
        ("adaptive", 16, "give AdaptivePolicy(max_workers=16) or None"),
        ("breaker", False, "give a BreakerPolicy"),
        ("durable", "disk", "give a DurableConfig"),
    ],
)
def test_where_a_policy_is_wanted_the_message_shows_one(field, value, example):
    (fault,) = faults_of(lambda: bq.ExportConfig(**{field: value}))
    assert fault.way_out == example


# -- times, sizes, words -----------------------------------------------------------------------------------------------


def test_times_and_sizes_as_texts_are_kept_as_numbers():
    queue = bq.QueueConfig(linger="250ms", drain_timeout="1m30s", block_timeout="2s", buffer_bytes="16MiB", size_of=len)
    assert (queue.linger, queue.drain_timeout, queue.block_timeout, queue.buffer_bytes) == (0.25, 90.0, 2.0, 2**24)
    assert queue == dataclasses.replace(queue, linger=0.25, buffer_bytes=2**24)
    queue.validate("q")
    durable = bq.DurableConfig(max_bytes="1GiB", max_age="1d", sync_interval="100ms")
    assert (durable.max_bytes, durable.max_age, durable.sync_interval) == (2**30, 86_400.0, 0.1)
    export = bq.ExportConfig(max_bytes="64MB", send_timeout="10s", batch=bq.BatchPolicy(max_bytes="1MiB", linger="1s"))
    assert (export.max_bytes, export.send_timeout, export.batch.max_bytes, export.batch.linger) == (
        64_000_000,
        10.0,
        2**20,
        1.0,
    )
    assert bq.RetryPolicy(initial="1s", max_delay="5m").max_delay == 300.0
    assert bq.BreakerPolicy(reset_timeout="1m").reset_timeout == 60.0
    assert bq.AdaptivePolicy(interval="500ms").interval == 0.5
    assert bq.FailoverPolicy(interval="1s", max_bytes="1k").max_bytes == 1_000


WORDS = ["block", "reject", "drop_oldest", "drop_newest"]


@pytest.mark.parametrize("word", WORDS)
def test_one_vocabulary_wherever_something_can_be_full(word, tmp_path):
    strategies = dict(zip(WORDS, bq.BufferStrategy, strict=True))
    assert bq.QueueConfig(overflow=word).strategy is strategies[word]
    assert bq.QueueConfig(strategy=strategies[word]).overflow == word
    assert bq.DurableConfig(overflow=word).overflow == word
    assert bq.ExportConfig(overflow=word).overflow == word
    path = tmp_path / "queues.yaml"
    path.write_text(f"queues: {{q: {{overflow: {word}}}}}")
    assert bq.load_config(path, environ={})["q"] == bq.QueueConfig(strategy=strategies[word])


@pytest.mark.parametrize("kind", [bq.QueueConfig, bq.DurableConfig, bq.ExportConfig])
def test_other_words_are_told_the_nearest(kind):
    with pytest.raises(
        bq.ConfigError, match=r"overflow='drop_old' is unknown; did you mean drop_oldest\? or choose one"
    ):
        getattr(kind(overflow="drop_old"), "validate", print)("q")


def test_feeds_are_names_once_each():
    assert bq.QueueConfig(feeds="rows").feeds == ("rows",)
    assert bq.QueueConfig(feeds=["rows", "logs", "rows"]).feeds == ("rows", "logs")
    assert bq.QueueConfig(feeds=("rows",)) == bq.QueueConfig(feeds={"rows"})


def test_the_delays_of_a_retry_grow_to_their_limit():
    retry = bq.HandlerRetry(initial=0.5, multiplier=3.0, max_delay="10s")
    assert [retry.delay(attempt) for attempt in range(1, 6)] == [0.5, 1.5, 4.5, 10.0, 10.0]
    assert bq.HandlerRetry(multiplier=1e9, max_attempts=1_000).delay(1_000) == 60.0
    assert bq.HandlerRetry(multiplier=1.0).delay(1_000) == 0.1
