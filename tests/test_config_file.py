"""`load_config`: three layers, exact types, errors that name the place, and files that mean harm."""

from __future__ import annotations

import os
import re
import string
import sys
from dataclasses import fields

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import batchqueue_async as bq
from batchqueue_async import config, config_file
from batchqueue_async._support import wording

EVERYTHING = """
queues:
  spans:
    workers: cpu_cores(0.5)
    partitions: adaptive
    selector: type_hash
    strategy: drop_oldest
    buffer_size: 20000
    block_timeout: null
    max_batch: 500
    linger: 0.05
    min_idle: 0.002
    max_idle: 1
    handler_timeout: 10
    drain_timeout: 5.5
    balancer: throughput_weighted(1.2)
    balance_interval: 300
  writer:
    scheduler: {name: IO_POOL, policy: {cpu_cores_with_base: [1, 0.25]}}
    partitions: 4
    selector: round_robin()
    block_timeout: 2.5
"""


@pytest.fixture
def load(tmp_path):
    def load(text, *, environ=None, **options):
        path = tmp_path / "queues.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return config.load_config(path, environ=environ or {}, **options)

    return load


@pytest.fixture
def refuse(load):
    def refuse(text, **options):
        with pytest.raises(bq.ConfigError) as caught:
            load(text, **options)
        message = str(caught.value)
        assert len(message) < 500
        return message

    return refuse


def test_every_field_of_a_file(load):
    configs = load(EVERYTHING)
    assert list(configs) == ["spans", "writer"]
    assert configs["spans"] == bq.QueueConfig(
        workers=bq.WorkerPolicy.cpu_cores(0.5),
        partitions=bq.PartitionPolicy.adaptive(),
        selector=bq.type_hash(),
        strategy=bq.BufferStrategy.DROP_OLDEST,
        buffer_size=20_000,
        max_batch=500,
        linger=0.05,
        min_idle=0.002,
        max_idle=1.0,
        handler_timeout=10.0,
        drain_timeout=5.5,
        balancer=bq.throughput_weighted(1.2),
        balance_interval=300.0,
    )
    assert configs["writer"] == bq.QueueConfig(
        scheduler=bq.SharedScheduler("IO_POOL", bq.WorkerPolicy.cpu_cores_with_base(1, 0.25)),
        partitions=bq.PartitionPolicy.fixed(4),
        selector=bq.round_robin(),
        block_timeout=2.5,
    )
    assert type(configs["spans"].max_idle) is float


def test_no_field_of_a_queue_is_forgotten():
    assert [*config.QUEUE_RULES, "_settled"] == [field.name for field in fields(bq.QueueConfig)]


def test_nothing_to_read_gives_no_queue(load):
    assert config.load_config(environ={}) == {}
    assert load("") == load("# nothing\n") == load("queues:\n") == {}
    assert load("queues:\n  spans:\n") == {"spans": bq.QueueConfig()}


def test_the_later_layer_wins(load):
    text = "queues: {spans: {max_batch: 1, linger: 0.1, buffer_size: 10}}"
    environ = {"BATCHQUEUE_QUEUES__SPANS__MAX_BATCH": "2", "BATCHQUEUE_QUEUES__SPANS__LINGER": "0.2", "PATH": "/bin"}
    found = load(text, environ=environ, overrides={"spans": {"max_batch": 3}})["spans"]
    assert (found.max_batch, found.linger, found.buffer_size) == (3, 0.2, 10)


def test_the_process_environment_is_the_default(monkeypatch):
    for variable in [name for name in os.environ if name.startswith("BATCHQUEUE_")]:
        monkeypatch.delenv(variable)  # those that steer the suite begin so too
    monkeypatch.setenv("BATCHQUEUE_QUEUES__SPANS__MAX_BATCH", "7")
    assert bq.load_config()["spans"].max_batch == 7


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("WORKERS", "3", bq.WorkerPolicy.fixed(3)),
        ("WORKERS", "io_bound", bq.WorkerPolicy.io_bound()),
        ("WORKERS", '{"cpu_cores": 2}', bq.WorkerPolicy.cpu_cores(2)),
        ("workers", "null", None),
        ("PARTITIONS", "worker_multiply( 2 )", bq.PartitionPolicy.worker_multiply(2)),
        ("STRATEGY", "IF_POSSIBLE", bq.BufferStrategy.IF_POSSIBLE),
        ("BLOCK_TIMEOUT", "null", None),
        ("BLOCK_TIMEOUT", "2", 2.0),
        ("SCHEDULER", '{"name": "IO", "policy": "fixed(2)"}', bq.SharedScheduler("IO", bq.WorkerPolicy.fixed(2))),
        ("SELECTOR", "null", None),
        ("SELECTOR", "round_robin", bq.round_robin()),
        ("BALANCER", "throughput_weighted", bq.throughput_weighted()),
        ("LINGER", "0.05", 0.05),
        ("LINGER", " 1e-3 ", 0.001),
        ("LINGER", "50ms", 0.05),
        ("DRAIN_TIMEOUT", "1m30s", 90.0),
        ("MAX_BATCH", " 7 ", 7),
        ("OVERFLOW", "drop_newest", "drop_newest"),
        ("OVERFLOW", "Reject", "reject"),
        ("FEEDS", "rows, logs", ("rows", "logs")),
        ("LOG_ERRORS", "full", "full"),
        ("RETRY", '{"initial": "1s", "max_attempts": 3}', bq.HandlerRetry(initial=1.0, max_attempts=3)),
    ],
)
def test_values_in_the_environment(field, text, value):
    found = config.load_config(environ={f"APP_QUEUES__SPANS__{field}": text}, prefix="APP_")
    assert getattr(found["spans"], field.lower()) == value


def test_a_queue_is_found_by_its_name_in_capitals(load):
    text = "queues: {Spans.grpc-1: {}, a__b: {}}"
    environ = {"BATCHQUEUE_QUEUES__SPANS_GRPC_1__MAX_BATCH": "5", "BATCHQUEUE_QUEUES__A__B__MAX_BATCH": "6"}
    found = load(text, environ=environ)
    assert {name: queue.max_batch for name, queue in found.items()} == {"Spans.grpc-1": 5, "a__b": 6}


def test_each_layer_may_name_queues_of_its_own(load):
    found = load("queues: {a: {}}", environ={"BATCHQUEUE_QUEUES__B__LINGER": "1"}, overrides={"c": {}})
    assert list(found) == ["a", "b", "c"]


def test_overrides_hold_objects_and_handlers(load):
    async def consume(batch): ...

    overrides = {"spans": {"consumer": consume, "on_error": print, "workers": bq.WorkerPolicy.fixed(2)}}
    assert load("queues: {spans: {partitions: 2}}", overrides=overrides) == {
        "spans": bq.QueueConfig(
            consumer=consume,
            on_error=print,
            workers=bq.WorkerPolicy.fixed(2),
            partitions=bq.PartitionPolicy.fixed(2),
        )
    }
    objects = {
        "selector": bq.by_key(len),
        "strategy": bq.BufferStrategy.BLOCKING,
        "balancer": bq.throughput_weighted(),
        "scheduler": bq.SharedScheduler("IO", bq.WorkerPolicy.fixed(1)),
        "partitions": "fixed(2)",
        "fallback": None,
    }
    found = config.load_config(environ={}, overrides={"q": objects})["q"]
    assert (found.selector, found.partitions) == (objects["selector"], bq.PartitionPolicy.fixed(2))


def test_anchors_and_merges(load):
    text = """
queues:
  spans: &spans {linger: 0.5, max_batch: 9}
  more: &more {max_batch: 10, buffer_size: 11}
  logs: {<<: *spans, max_batch: 8}
  both: {<<: [*spans, *more]}
"""
    found = load(text)
    assert (found["logs"].linger, found["logs"].max_batch) == (0.5, 8)
    assert (found["both"].max_batch, found["both"].buffer_size) == (9, 11)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("max_bacth: 1", "queue 'spans': max_bacth is not a field of a queue; did you mean max_batch?"),
        ("zzz: 1", "zzz is not a field of a queue; there are workers, scheduler, partitions"),
        ("max_batch: '500'", "max_batch='500' is not a whole number; give an int of 1 or more"),
        ("max_batch: 1.0", "max_batch=1.0 is not a whole number"),
        ("max_batch: yes", "max_batch=True is not a whole number"),
        ("max_batch: [1]", "max_batch=[1] is not a whole number"),
        (
            "linger: 50 miles",
            "linger='50 miles' is not a finite number of seconds; give seconds as a float, or a text su",
        ),
        ("linger: '0.05'", "linger='0.05' is not a finite number of seconds"),
        ("linger: -5ms", "linger='-5ms' is not a finite number of seconds"),
        ("linger: null", "linger=None is not a finite number of seconds"),
        ("linger: 9e99", "linger='9e99' is not a finite number of seconds"),
        ("linger: " + "9" * 400, "linger=<int of 1329 bits> is above 1e+09; set linger to that or less"),
        ("linger: .nan", "queue 'spans': linger=nan is not a finite number of seconds"),
        ("max_batch: 0", "queue 'spans': max_batch=0 is below 1; set max_batch to 1 or more"),
        ("min_idle: 0.5", "max_idle=0.05 is below min_idle=0.5; raise max_idle"),
        ("consumer: print", "consumer is code, which no file or variable can hold; give it as overrides={'spans': "),
        ("on_error: null", "on_error is code"),
        ("workers: cpu_cores(0)", "workers='cpu_cores(0)' has multiplier=0, which is not above 0; set multiplier to"),
        ("workers: cores(2)", "workers='cores(2)' asks for 'cores', which is unknown; did you mean cpu_cores?"),
        ("workers: cpu_cores(__import__)", "has the argument '__import__', which is not a number; give numbers"),
        ("workers: cpu_cores()", "gives cpu_cores 0 arguments, which it does not take; see its signature"),
        ("workers: fixed(1, 2)", "gives fixed 2 arguments, which it does not take"),
        ("workers: {fixed: '2'}", "has the argument '2', which is not a number"),
        ("workers: {fixed: 1, cpu_cores: 2}", "is not understood; write name, name(number) or {name: number}"),
        ("workers: 1.5", "workers=1.5 is not understood; write name, name(number) or {name: number}"),
        ("workers: 0", "workers=0 has count=0, which is below 1; set count to 1 or more"),
        ("workers: 'fixed(2); import os'", "is not understood"),
        (
            "partitions: cpu_cores(1)",
            "asks for 'cpu_cores', which is unknown; there are fixed, worker_multiply, adaptive",
        ),
        ("selector: by_key(len)", "selector='by_key(len)' needs a function, which is code; give selector=by_key(fn)"),
        ("selector: random", "asks for 'random', which is unknown; there are round_robin, type_hash"),
        ("strategy: drop_latest", "strategy='drop_latest' is not a strategy; did you mean drop_"),
        ("strategy: 3", "strategy=3 is not a strategy; there are blocking, if_possible"),
        ("balancer: throughput_weighted(0.5)", "has skip_ratio=0.5, which is below 1; set skip_ratio to a"),
        ("scheduler: IO", "scheduler='IO' is not a mapping; write {name: ..., policy: ...}"),
        ("scheduler: {name: IO}", "scheduler.policy is missing; write policy: ..."),
        ("scheduler: {name: IO, policy: 1, size: 2}", "scheduler.size is unknown; there are name, policy"),
        ("scheduler: {name: IO, policy: 0}", "scheduler.policy=0 has count=0, which is below 1"),
        ("scheduler: {name: 5, policy: 1}", "scheduler.name=5 is not a printable text; set name to one"),
        ("overflow: drop_first", "overflow='drop_first' is unknown; did you mean drop_"),
        ("buffer_bytes: 16 MB", "buffer_bytes='16 MB' is given without size_of; give a function from an item"),
        (
            "buffer_bytes: lots",
            "buffer_bytes='lots' is not a whole number of bytes; give an int of 1 or more, or a text",
        ),
        ("size_of: sys.getsizeof", "size_of='sys.getsizeof' is not understood"),
        ("size_of: id", "size_of='id' asks for 'id', which is unknown; there are len"),
        ("feeds: [rows, 5]", "feeds=['rows', 5] is not the name of a queue, or a list of names"),
        ("feeds: spans", "feeds='spans' names the queue itself"),
        ("log_errors: none", "log_errors='none' is unknown; choose one of redacted, full"),
        (
            "retry: 5",
            "retry=5 is not a mapping; write {initial: ..., multiplier: ..., max_delay: ..., max_attempts: ...}",
        ),
        ("retry: {initial: 0}", "retry.initial=0 is not above 0"),
        ("retry: {intial: 1}", "retry.intial is unknown; did you mean initial?"),
        ("retry: null", "retry=None is not a HandlerRetry; give HandlerRetry(max_attempts=5)"),
    ],
)
def test_what_is_wrong_in_a_file(refuse, section, expected):
    message = refuse(f"queues:\n  spans:\n    {section}\n")
    assert re.search(r"queues\.yaml, line 3, column [0-9]+: queue 'spans': ", message)
    assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1\n", "queues.yaml: [1] is not a mapping; write name: value lines"),
        ("just text", "'just text' is not a mapping"),
        ("queues: 5", "queues.yaml, line 1, column 1: queues: 5 is not a mapping"),
        ("queues: {spans: 5}", "queues.yaml, line 1, column 10: queue 'spans': 5 is not a mapping"),
        ("queus: {}", "queues.yaml, line 1, column 1: queus is not a section of the file; did you mean queues?"),
        ("queues: {5: {}}", "queues: the name 5 is not a text; put it in quotes"),
        ("queues: {no: {}}", "the name False is not a text"),
        ("queues: {'': {}}", "name='' is not a printable text"),
        ("queues: {spans: {5: 1}}", "queue 'spans': the name 5 is not a text"),
    ],
)
def test_what_is_no_configuration(refuse, text, expected):
    assert expected in refuse(text)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SPANS", "1", "names no field; write BATCHQUEUE_QUEUES__<QUEUE>__<FIELD>=<value>"),
        ("SPANS__", "1", "names no field"),
        ("__MAX_BATCH", "1", "names no field"),
        ("SPANS__MAX_BACTH", "1", "queue 'spans': max_bacth is not a field of a queue; did you mean max_batch?"),
        ("SPANS__PASSWORD", "secret", "queue 'spans': password is not a field of a queue"),
        ("SPANS__WORKERS", "secret-hunter2", "queue 'spans': workers=<text of 14 characters> is not understood"),
        ("SPANS__MAX_BATCH", "1.5", "max_batch='1.5' is not a whole number"),
        ("SPANS__MAX_BATCH", "1_000", "max_batch='1_000' is not a whole number"),
        ("SPANS__MAX_BATCH", "0x10", "max_batch='0x10' is not a whole number"),
        ("SPANS__LINGER", "", "linger='' is not a finite number of seconds"),
        ("SPANS__LINGER", "inf", "linger='inf' is not a finite number of seconds"),
        ("SPANS__LINGER", "-1", "linger='-1' is below 0"),
        ("SPANS__CONSUMER", "os:remove", "consumer is code"),
        ("SPANS__WORKERS", "{cpu_cores: 1}", "begins with a brace and is not JSON"),
        ("SPANS__WORKERS", '{"fixed": "1"}', "has the argument '1', which is not a number"),
    ],
)
def test_what_is_wrong_in_the_environment(variable, value, expected):
    variable = f"BATCHQUEUE_QUEUES__{variable}"
    with pytest.raises(bq.ConfigError) as caught:
        config.load_config(environ={variable: value})
    assert f"environment variable {variable}: " in str(caught.value)
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_variable_that_may_mean_two_queues(refuse):
    message = refuse("queues: {a-b: {}, a.b: {}}", environ={"BATCHQUEUE_QUEUES__A_B__LINGER": "1"})
    assert "may mean any of the queues 'a-b', 'a.b'; rename one of the queues" in message


def test_what_is_wrong_in_overrides():
    with pytest.raises(bq.ConfigError, match="overrides: queue 'q': max_batch='5' is not a whole number"):
        config.load_config(environ={}, overrides={"q": {"max_batch": "5"}})
    with pytest.raises(bq.ConfigError, match="overrides: queue 'q': 5 is not a mapping"):
        config.load_config(environ={}, overrides={"q": 5})
    with pytest.raises(bq.ConfigError, match="consumer=5 is not a handler"):
        config.load_config(environ={}, overrides={"q": {"consumer": 5}})


def test_an_error_of_several_values_names_all_places(refuse):
    message = refuse("queues: {q: {min_idle: 2}}", environ={"BATCHQUEUE_QUEUES__Q__MAX_IDLE": "1"})
    place = "environment variable BATCHQUEUE_QUEUES__Q__MAX_IDLE and {path}, line 1, column 14: queue 'q': "
    assert message.startswith(place.format(path=message.partition(" and ")[2].partition(",")[0]))
    assert message.endswith("max_idle='1' is below min_idle=2.0; raise max_idle")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(bq.ConfigError, match=r"no\.yaml: can't be read \(No such file or directory\)"):
        config.load_config(tmp_path / "no.yaml")
    with pytest.raises(bq.ConfigError, match="can't be read"):
        config.load_config(str(tmp_path))


def test_without_pyyaml_the_message_names_the_command(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(bq.ConfigError, match=r"needs PyYAML; run: pip install 'batchqueue-async\[yaml\]'"):
        load("queues: {}")
    assert config.load_config(environ={}) == {}


# -- files that mean harm --------------------------------------------------------------------------------------------

LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
)
MERGES = "\n".join(
    ["a0: &a0 {x: 1}"]
    + [f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}" for level in range(1, 10)]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("queues: !!python/object/apply:os.system ['echo gotcha > hacked']", "has the tag 'tag:yaml.org"),
        ("!!python/object/new:os.system [echo gotcha]", "has the tag"),
        ("queues: !!python/name:os.system", "line 1, column 9: has the tag"),
        ("queues: !!set {a, b}", "has the tag"),
        ("queues: !local {a: 1}", "has the tag '!local'"),
        ("queues: {q: {linger: 2024-01-01}}", "has the tag"),
        ("queues: {q: {linger: 2024-99-99}}", "has the tag"),
        ("queues: {q: {linger: !!int ''}}", "has the tag"),
        ("queues: {q: {linger: !!float x}}", "has the tag"),
        ("queues: {q: {linger: !!bool x}}", "has the tag"),
        ("queues: {q: {linger: =}}", "has the tag"),
        ("queues: {q: {max_batch: " + "9" * 5_000 + "}}", "has a value that can't be read"),
        ("queues: {q: {max_batch: 1, max_batch: 2}}", "line 1, column 28: has the name 'max_batch' twice"),
        ("queues: {q: {}, 'q': {}}", "has the name 'q' twice"),
        ("queues: {? [a] : 1}", "has a name that is not a text"),
        ("queues: {<<: 5}", "merges (<<) what is not a mapping"),
        (LAUGHS, "has more than 10000 values, aliases counted where they are used"),
        (MERGES, "has more than 10000 values"),
        ("a: &a {b: *a}", "is nested more than 16 deep"),
        ("a: " + "[" * 40 + "]" * 40, "is nested more than 16 deep"),
        ("a: " + "[" * 50_000, "is nested more than 16 deep"),
        ("a: *nowhere", "is not valid YAML: found undefined alias"),
        ("a: 1\n---\nb: 2", "is not valid YAML: but found another document"),
        ("a: [1", "is not valid YAML: expected ',' or ']'"),
        ("a: \x07", "is not valid YAML: special characters are not allowed"),
        (b"a: \xff\xfe\xfa", "is not valid YAML: invalid start byte"),
        ("# " + "x" * 300_000, "has more than 262144 bytes"),
    ],
)
def test_hostile_files(refuse, tmp_path, monkeypatch, text, expected):
    monkeypatch.chdir(tmp_path)
    message = refuse(text)
    assert "queues.yaml" in message
    assert expected in message
    assert [path.name for path in tmp_path.iterdir()] == ["queues.yaml"]


@given(st.binary(max_size=200) | st.text(alphabet=string.printable, max_size=200).map(str.encode))
def test_any_bytes_give_a_configuration_or_a_config_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    try:
        config.load_config(path, environ={})
    except bq.ConfigError as error:
        message = str(error)
    else:
        return
    assert "any.yaml" in message


@given(st.text(alphabet="fixed_cpu(),. 0123456789{}eE+-infa", max_size=30))
def test_any_text_as_a_policy_gives_a_policy_or_a_config_error(text):
    try:
        found = config.load_config(environ={"BATCHQUEUE_QUEUES__Q__WORKERS": text})
    except bq.ConfigError:
        return
    assert isinstance(found["q"].workers, bq.WorkerPolicy | None)


# -- round trips -----------------------------------------------------------------------------------------------------

multipliers = st.floats(0.01, 100)
worker_policies = st.one_of(
    st.integers(1, 500).map(bq.WorkerPolicy.fixed),
    multipliers.map(bq.WorkerPolicy.cpu_cores),
    st.builds(bq.WorkerPolicy.cpu_cores_with_base, st.integers(1, 50), multipliers),
    st.just(bq.WorkerPolicy.io_bound()),
)
partition_policies = st.one_of(
    st.integers(1, 500).map(bq.PartitionPolicy.fixed),
    st.integers(1, 50).map(bq.PartitionPolicy.worker_multiply),
    st.integers(1, 50).map(bq.PartitionPolicy.adaptive),
)
seconds = st.floats(0.001, 1e6)
plain_fields = st.fixed_dictionaries(
    {},
    optional={
        "partitions": partition_policies,
        "selector": st.sampled_from([bq.type_hash(), bq.round_robin()]),
        "strategy": st.sampled_from(list(bq.BufferStrategy)),
        "feeds": st.lists(st.sampled_from(["the rows", "the logs"]), unique=True).map(tuple),
        "log_errors": st.sampled_from(["redacted", "full"]),
        "buffer_size": st.integers(1, 10**9),
        "max_batch": st.integers(1, 10**9),
        "block_timeout": st.none() | seconds,
        "linger": seconds,
        "max_idle": seconds.map(lambda value: value + 0.001),
        "handler_timeout": st.none() | seconds,
        "drain_timeout": seconds,
        "balancer": st.none() | st.floats(1, 10).map(bq.throughput_weighted),
        "balance_interval": seconds,
    },
)
names = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=20)
runners = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"workers": worker_policies}),
    st.fixed_dictionaries({"scheduler": st.builds(bq.SharedScheduler, names, worker_policies)}),
)
queue_fields = st.builds(lambda first, second: first | second, plain_fields, runners)


def written(value):
    if isinstance(value, bq.SharedScheduler):
        return {"name": value.name, "policy": str(value.policy)}
    if isinstance(value, bq.BufferStrategy):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, int | float) else str(value)


@given(st.dictionaries(names, queue_fields, max_size=4))
def test_a_configuration_survives_a_file(tmp_path_factory, queues):
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    sections = {name: {field: written(value) for field, value in settings.items()} for name, settings in queues.items()}
    path.write_text(yaml.safe_dump({"queues": sections}, allow_unicode=True), encoding="utf-8")
    expected = {name: bq.QueueConfig(**settings) for name, settings in queues.items()}
    assert config.load_config(path, environ={}) == expected


@given(plain_fields)
def test_a_configuration_survives_the_environment(settings):
    texts = {field: "null" if value is None else str(written(value)) for field, value in settings.items()}
    texts |= {"feeds": ", ".join(settings["feeds"])} if "feeds" in settings else {}
    environ = {f"BATCHQUEUE_QUEUES__Q__{field.upper()}": text for field, text in texts.items()}
    expected = {"q": bq.QueueConfig(**settings)} if settings else {}
    assert config.load_config(environ=environ) == expected


def test_the_limits_leave_room_for_real_files(load):
    text = "queues:\n" + "".join(f"  queue-{number}: {{max_batch: 5, linger: 0.1}}\n" for number in range(500))
    assert len(load(text)) == 500
    assert config_file.MAX_DEPTH > 5


# -- all faults at once ------------------------------------------------------------------------------------------------

WRONG = """\
queues:
  spans:
    max_bacth: 500
    linger: soon
    retry:
      initial: 0
      attempts: 3
  logs: &logs
    scheduler: {name: IO, policy: none}
    consumer: os.remove
  traces:
    <<: *logs
    max_batch: 1
qeues: {}
"""


def faults(path, **options):
    with pytest.raises(bq.ConfigError) as caught:
        config.load_config(path, **{"environ": {}} | options)
    return [str(fault).replace(f"{path}, ", "") for fault in caught.value.faults]


def test_all_queues_and_all_layers_are_judged_at_once(tmp_path):
    path = tmp_path / "queues.yaml"
    path.write_text(WRONG)
    environ = {
        "BATCHQUEUE_QUEUES__LOGS__MAX_BATCH": "many",
        "BATCHQUEUE_QUEUES__SPANS__PARTITIONS": "{",
        "BATCHQUEUE_MAX_BATCH": "5",
    }
    overrides = {"logs": {"consumer": print}, "more": {"min_idle": 1}, "spans": {"max_idle": "2m"}, "": 5}
    found = faults(path, environ=environ, overrides=overrides)
    truncated = "BATCHQUEUE_QUEUES__SPANS__PARTITIONS"
    assert [fault.partition("; ")[0] for fault in found] == [
        "line 14, column 1: qeues is not a section of the file",
        "overrides: queue '': 5 is not a mapping",
        "environment variable BATCHQUEUE_MAX_BATCH: is not a setting of a queue",
        f"environment variable {truncated}: begins with a brace and is not JSON (Input data was truncated)",
        "line 3, column 5: queue 'spans': max_bacth is not a field of a queue",
        "line 4, column 5: queue 'spans': linger='soon' is not a finite number of seconds",
        "line 7, column 7: queue 'spans': retry.attempts is unknown",
        "line 6, column 7: queue 'spans': retry.initial=0 is not above 0",
        "line 9, column 27: queue 'logs': scheduler.policy='none' asks for 'none', which is unknown",
        "overrides: queue 'logs': consumer=print is a plain function, and would block the event loop",
        "environment variable BATCHQUEUE_QUEUES__LOGS__MAX_BATCH: queue 'logs': max_batch='many' is not a whole number",
        "line 9, column 27: queue 'traces': scheduler.policy='none' asks for 'none', which is unknown",
        "line 10, column 5: queue 'traces': consumer is code, which no file or variable can hold",
        "queue '': name='' is not a printable text",
    ]


@pytest.mark.parametrize(
    "text", ["queues: {a: [1}", "queues: !tag {a: {max_idle: 1}}", "queues: {a: {max_idle: !x 1}}"]
)
def test_what_a_broken_file_may_have_held_is_not_guessed_at(tmp_path, text):
    path = tmp_path / "queues.yaml"
    path.write_text(text)
    environ = {"BATCHQUEUE_QUEUES__A__MIN_IDLE": "0.5", "BATCHQUEUE_QUEUES__A__MAX_BATCH": "0"}
    found = faults(path, environ=environ)
    # Nothing about min_idle=0.5 and max_idle, which the file may set.
    assert [fault.partition(":")[0].split(",")[0] for fault in found] == [
        "line 1",
        "environment variable BATCHQUEUE_QUEUES__A__MAX_BATCH",
    ]


def test_a_misspelled_field_is_not_held_against_its_partner(tmp_path):
    path = tmp_path / "queues.yaml"
    path.write_text("queues: {a: {min_idle: 1, max_idel: 2}}")
    (fault,) = faults(path)
    assert fault.endswith("max_idel is not a field of a queue; did you mean max_idle?")


def test_every_tag_and_every_name_that_is_there_twice(tmp_path):
    path = tmp_path / "queues.yaml"
    path.write_text("queues:\n  a: {linger: !x 1, max_batch: 1, max_batch: 2}\n  b: {? [a] : 1, feeds: [!y c, 5]}\n")
    assert [fault.partition(": ")[0] for fault in faults(path)] == [
        "line 2, column 15",
        "line 2, column 35",
        "line 3, column 9",
        "line 3, column 26",
        "line 3, column 18",
    ]


settings = {
    "max_batch": 0,
    "linger": "soon",
    "workers": "cores(2)",
    "strategy": "all",
    "retry": {"initial": -1},
    "feeds": [""],
    "buffer_bytes": "much",
    "lingr": 1,
    "consumer": "print",
    "log_errors": True,
}


@given(st.dictionaries(names, st.sets(st.sampled_from(list(settings)), min_size=1), min_size=1, max_size=3))
def test_every_fault_of_a_file_is_found_and_nothing_else(tmp_path_factory, queues):
    path = tmp_path_factory.getbasetemp() / "wrong.yaml"
    sections = {queue: {field: settings[field] for field in wrong} | {"max_idle": 1} for queue, wrong in queues.items()}
    path.write_text(yaml.safe_dump({"queues": sections}, allow_unicode=True), encoding="utf-8")
    with pytest.raises(bq.ConfigError) as caught:
        config.load_config(path, environ={})
    found = {(fault.owner, fault.path.partition(".")[0]) for fault in caught.value.faults}
    assert found == {(wording.clip(f"queue {queue!r}"), field) for queue, wrong in queues.items() for field in wrong}
    assert len(caught.value.faults) == len(found)
    assert all(fault.origin.startswith(str(path)) and fault.way_out for fault in caught.value.faults)


values = (
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.just(5_000).map(lambda digits: 10**digits)
    | st.sampled_from([len, print, bq.WorkerPolicy, bq.WorkerPolicy.io_bound, bq.round_robin, object()])
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=5)
)
anything = values | st.lists(values, max_size=3) | st.dictionaries(values, values, max_size=3)


def paths_of_faults(make):
    try:
        make()
    except bq.ConfigError as error:
        faults = error.faults
    else:
        faults = ()
    assert all(
        fault.owner == "queue 'q'" and fault.rule and fault.way_out and len(str(fault)) < 600 for fault in faults
    )
    return {fault.path.partition(".")[0] for fault in faults}


@given(st.sampled_from(list(config.QUEUE_RULES)), anything)
def test_any_value_is_taken_or_is_a_fault_of_its_field(field, value):
    partners = {field, "max_idle"}  # min_idle may be above it
    assert paths_of_faults(lambda: bq.QueueConfig(**{field: value}).validate("q")) <= partners
    assert paths_of_faults(lambda: config.load_config(environ={}, overrides={"q": {field: value}})) <= partners


# -- variables that mean nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "way_out"),
    [
        ("BATCHQUEUE_QUEUE__SPANS__MAX_BATCH", "did you mean BATCHQUEUE_QUEUES__SPANS__MAX_BATCH?"),
        ("BATCHQUEUE_QUEUES_SPANS_MAX_BATCH", "write BATCHQUEUE_QUEUES__<QUEUE>__<FIELD>=<value>, or unset it"),
        ("BATCHQUEUE_MAX_BATCH", "write BATCHQUEUE_QUEUES__<QUEUE>__MAX_BATCH=<value>, or unset it"),
        ("BATCHQUEUE_MAX_BACTH", "write BATCHQUEUE_QUEUES__<QUEUE>__MAX_BATCH=<value>, or unset it"),
        ("BATCHQUEUE_PASSWORD", "write BATCHQUEUE_QUEUES__<QUEUE>__<FIELD>=<value>, or unset it"),
        ("BATCHQUEUE_", "write BATCHQUEUE_QUEUES__<QUEUE>__<FIELD>=<value>, or unset it"),
        ("batchqueue_queues__a__linger", "did you mean BATCHQUEUE_QUEUES__A__LINGER?"),
        ("Batchqueue_Queue__a__linger", "did you mean BATCHQUEUE_QUEUES__A__LINGER?"),
    ],
)
def test_a_variable_that_sets_nothing_is_a_fault(variable, way_out):
    with pytest.raises(bq.ConfigError) as caught:
        config.load_config(environ={variable: "hunter2", "PATH": "/bin"})
    assert str(caught.value) == f"environment variable {variable}: is not a setting of a queue; {way_out}"


SERVICE = {
    "SERVICE_HOST": "10.0.0.1",
    "SERVICE_PORT": "80",
    "SERVICE_PORT_HTTP_ALT": "80",
    "PORT": "tcp://10.0.0.1:80",
    "PORT_80_TCP": "tcp://10.0.0.1:80",
    "PORT_80_TCP_PROTO": "tcp",
    "PORT_80_TCP_PORT": "80",
    "PORT_53_UDP_ADDR": "10.0.0.1",
}


@pytest.mark.parametrize("service", ["BATCHQUEUE_", "BATCHQUEUE_METRICS_", "BATCHQUEUE_MY_2ND_"])
def test_what_kubernetes_sets_for_its_services_is_passed_over(service):
    environ = {f"{service}{name}": value for name, value in SERVICE.items()}
    assert config.load_config(environ=environ) == {}


@pytest.mark.parametrize("switch", ["BATCHQUEUE_PURE", "BATCHQUEUE_NO_EXTENSIONS"])
def test_a_switch_of_the_library_is_no_setting_of_a_queue(switch):
    assert config.load_config(environ={switch: "1"}) == {}


def test_under_a_prefix_of_its_own_a_program_has_other_variables_too():
    environ = {"MYAPP_DATABASE": "x", "MYAPP_DATABASE__URL": "x", "BATCHQUEUE_X": "y", "MYAPP_QUEUES__A__LINGER": "1"}
    assert config.load_config(environ=environ, prefix="MYAPP_") == {"a": bq.QueueConfig(linger=1.0)}
    with pytest.raises(bq.ConfigError, match=r"MYAPP_QUEUE__A__LINGER: .*; did you mean MYAPP_QUEUES__A__LINGER\?"):
        config.load_config(environ=environ | {"MYAPP_QUEUE__A__LINGER": "1"}, prefix="MYAPP_")


def test_two_variables_for_one_field_are_a_fault():
    environ = {"BATCHQUEUE_QUEUES__A__LINGER": "1", "BATCHQUEUE_QUEUES__a__linger": "2"}
    with pytest.raises(bq.ConfigError, match=r"QUEUES__a__linger: sets what BATCHQUEUE_QUEUES__A__LINGER sets; unset"):
        config.load_config(environ=environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"A__WORKERS": "postgres://app:hunter2@db/shop"}, "workers=<text of 30 characters> is not understood"),
        ({"A__SCHEDULER": '{"name": "IO", "password": "hunter2"}'}, "scheduler.password is unknown; there are name"),
        ({"A__RETRY": '{"api_key": "hunter2"}'}, "retry.api_key is unknown"),
        ({"A__CONSUMER": "hunter2"}, "consumer is code"),
        (
            {"A__WORKERS": "my_token_is_hunter"},
            "workers=<text of 18 characters> asks for <text of 18 characters>, which",
        ),
        ({"A__LINGER": "token=hunter2"}, "linger=<text of 13 characters> is not a finite number of seconds"),
    ],
)
def test_no_secret_is_quoted(environ, expected):
    with pytest.raises(bq.ConfigError) as caught:
        config.load_config(environ={f"BATCHQUEUE_QUEUES__{name}": value for name, value in environ.items()})
    assert expected in str(caught.value)
    assert "hunter" not in str(caught.value) + repr(caught.value.faults)
