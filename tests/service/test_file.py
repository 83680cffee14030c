# ruff: noqa: E501, ISC004 - messages stand as they are printed
"""The service file: every fault at once with its place and exact text; layers, references, links."""

from __future__ import annotations

import inspect
import json

import fastjsonschema
import pytest
import yaml

from batchqueue_async.errors import ConfigError
from batchqueue_async.service.file.json_schema import json_schema, of_rule, of_shape
from batchqueue_async.service.file.kinds import SINKS, SOURCES
from batchqueue_async.service.file.reading import is_service_file, read_service, warnings_of, where
from batchqueue_async.service.file.shapes import Shape, Struct, Things
from batchqueue_async.service.file.templates import FROM, TO, program, template

WHOLE = """\
version: 1
service: {name: orders, drain_timeout: 25s}
observe: {listen: 127.0.0.1:0, token: env:UI_TOKEN, hosts: [ops.example]}
logs: {format: json, level: warning}
defaults:
  disk: &disk {max_bytes: 2Gi, overflow: block}
sources:
  events:
    type: kafka
    bootstrap: [localhost:9092]
    topics: [events]
    group: orders
    dead_letters: orders.dead
    decode: json
    ordered_by: partition
    retry: {initial: 500ms, budget: {per_second: 5}}
    batch: {max_records: 50, linger: 10ms}
    to: parse
queues:
  parse:
    handlers: {spans: {weight: 2, max_batch: 100}, logs: }
    fallback: rest
    partitions: worker_multiply(2)
    workers: 4
    max_batch: 500
    linger: 50ms
    key: customer
    feeds: [rows]
  rows: {exporter: warehouse, scheduler: {name: IO, policy: 2}, retry: {max_attempts: 2}}
exporters:
  warehouse:
    <<: *disk
    sink: db
    path: /var/lib/orders/warehouse
    batch: 1000
    retry: {initial: 1s, max_delay: 5m, budget: null}
    breaker: {threshold: 5, reset_timeout: 30s}
    workers: cpu_cores(2)
    adaptive: {min_workers: 2, max_workers: 16}
    durable: {min_free_bytes: 512Mi}
    dead_letters: refused
  refused: {sink: file, overflow: block}
sinks:
  db: {type: postgres, dsn: env:DATABASE_URL, table: orders, upsert_on: [id], tls: {ca: /etc/ca.pem}}
  file: {type: jsonl, path: refused.jsonl, max_bytes: 10MB}
"""
ENVIRON = {"PATH": "/bin"}


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql://localhost/shop")
    monkeypatch.setenv("UI_TOKEN", "t0ken")


def read(tmp_path, text, *settings, environ=ENVIRON, **options):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return read_service(path, settings=settings, environ=environ, **options)


def faults(tmp_path, text, *settings, **options):
    """Each fault as `line:column text`."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, *settings, **options)
    found = []
    for each in caught.value.faults:
        _, line, column = where(each)
        place = f"{line}:{column}" if line else str(each.origin).replace(str(tmp_path / "s.yaml"), "FILE")
        named = each.path if each.value is None else f"{each.path}={each.value}"
        found.append(f"{place} {named} {each.rule}; {each.way_out}".replace("  ", " "))
    return found


# --- what is right


def test_a_whole_file_is_read(tmp_path):
    spec = read(tmp_path, WHOLE)
    assert spec.name == "orders"
    assert spec.drain_timeout == 25.0
    assert spec.counts() == "1 source, 2 queues, 2 exporters, 2 sinks"
    warehouse = spec.exporters["warehouse"].values
    assert (warehouse["max_bytes"], warehouse["overflow"], warehouse["batch"]) == (
        2 << 30,
        "block",
        {"max_records": 1000},
    )
    assert warehouse["retry"] == {"initial": 1.0, "max_delay": 300.0, "budget": None}
    assert spec.queues["parse"].values["linger"] == 0.05
    assert str(spec.queues["parse"].values["partitions"]) == "worker_multiply(2)"
    assert spec.sources["events"].values["retry"]["budget"] == {"per_second": 5.0}
    assert spec.origins["exporters.warehouse.sink"].endswith("line 33, column 5")
    assert warnings_of(spec) == []


def test_the_name_of_a_file_is_that_of_its_service(tmp_path):
    assert read(tmp_path, "queues: {q: {handler: h}}").name == "s"


def test_later_layers_win(tmp_path):
    environ = {
        "BATCHQUEUE_EXPORTERS__WAREHOUSE__BATCH__LINGER": "2s",
        "BATCHQUEUE_EXPORTERS__WAREHOUSE__BATCH__MAX_RECORDS": "7",
        "BATCHQUEUE_SINKS__DB__TABLE": "facts",
        "BATCHQUEUE_QUEUES__ROWS__MAX_BATCH": "9",
        "BATCHQUEUE_SERVICE__DRAIN_TIMEOUT": "1m",
        "BATCHQUEUE_SERVICE_HOST": "10.0.0.1",  # what Kubernetes sets for a service named batchqueue
        "BATCHQUEUE_PURE": "1",
    }
    text = WHOLE.replace("batch: 1000", "batch: {max_records: 1000}")
    spec = read(tmp_path, text, "queues.rows.max_batch=11", "logs.level=debug", environ=environ)
    assert spec.exporters["warehouse"].values["batch"] == {"max_records": 7, "linger": 2.0}
    assert spec.sinks["db"].values["table"] == "facts"
    assert spec.queues["rows"].values["max_batch"] == 11
    assert spec.drain_timeout == 60.0
    assert spec.logs["level"] == "debug"
    assert spec.origins["sinks.db.table"] == "environment variable BATCHQUEUE_SINKS__DB__TABLE"
    assert spec.origins["queues.rows.max_batch"] == "--set queues.rows.max_batch"


def test_what_an_anchor_shares_is_changed_in_one_place_alone(tmp_path):
    text = """\
defaults: {q: &q {handler: h, retry: {max_attempts: 3}}}
queues: {a: *q, b: *q}
"""
    spec = read(tmp_path, text, "queues.a.retry.max_attempts=4")
    assert spec.queues["a"].values["retry"].max_attempts == 4
    assert spec.queues["b"].values["retry"].max_attempts == 3


def test_secrets_may_be_away_where_nobody_needs_them(tmp_path, monkeypatch):
    monkeypatch.delenv("DATABASE_URL")
    assert read(tmp_path, WHOLE, secrets=False).sinks["db"].values["dsn"] == "env:DATABASE_URL"


@pytest.mark.parametrize(
    ("text", "is_service"),
    [
        ("queues: {}", True),
        ("sources: {}\nsinks: {}", True),
        ("sources: {}", True),
        ("sources: {}\nviews: {}\noutputs: {}", False),
        ("spark: {master: local}", False),
        ("", True),
        ("[", True),
    ],
)
def test_a_service_is_known_by_its_sections(tmp_path, text, is_service):
    (tmp_path / "f.yaml").write_text(text)
    assert is_service_file(tmp_path / "f.yaml") is is_service


# --- what is wrong: the exact words

Q = "queues: {q: {handler: h}}\n"
SOURCE = "type: redis, url: redis://localhost, stream: s, group: g"
TABLE = [
    (
        "",
        ["FILE has nothing that runs; add sources, queues or exporters; `batchqueue new` writes a file to begin with"],
    ),
    (
        Q + "version: 2",
        ["2:1 version=2 is above 1; set version to that or less"],
    ),
    (
        Q + "queus: {}",
        ["2:1 queus is not a field of a service file; did you mean queues?"],
    ),
    (
        "queues: {q: {handlr: h}}",
        ["1:14 queues.q.handlr is not a field of a queue; did you mean handler?"],
    ),
    (
        "queues: {q: {max_batch: 0, linger: soon, handler: h}}",
        [
            "1:14 queues.q.max_batch=0 is below 1; set max_batch to 1 or more",
            "1:28 queues.q.linger='soon' is not a finite number of seconds; give seconds as a float, or a text such as '250ms'",
        ],
    ),
    (
        "queues: {q: {max_idle: 1ms, min_idle: 1s, handler: h}}",
        ["1:14 queues.q.max_idle=0.001 is below min_idle=1.0; raise max_idle"],
    ),
    ("queues: {q: {}}", ["1:10 queues.q.handler is missing; give exactly one of handler, handlers, exporter"]),
    (
        "queues: {q: {handler: h, exporter: e}}\nexporters: {e: {sink: s}}\nsinks: {s: {type: memory}}",
        ["1:26 queues.q.exporter is given together with handler; give exactly one of handler, handlers, exporter"],
    ),
    (
        "queues: {q: {handler: h, fallback: f}}",
        ["1:26 queues.q.fallback goes with handlers, and there is handler; leave it out"],
    ),
    (
        "queues: {q: {handler: h, key: k, selector: round_robin}}",
        ["1:26 queues.q.key is given together with selector; give only one of the two"],
    ),
    (
        "queues: {q: {handler: 'shop.code:parse'}}",
        [
            "1:14 queues.q.handler='shop.code:parse' is not the name of a handler; register it in code with "
            "@app.handler('name'), name it here, and run with --app module:app"
        ],
    ),
    (
        "queues: {q: {handler: 3}}",
        [
            "1:14 queues.q.handler=3 is not the name of a handler; write handler: the name that @app.handler('name') gave it"
        ],
    ),
    (
        "queues: {q: {handler: h, feeds: [r]}}",
        ["1:26 queues.q.feeds='r' is not a queue of this file; there are q"],
    ),
    ("queues: {q: {handler: h, feeds: q}}", ["1:26 queues.q.feeds names the queue itself; name only other queues"]),
    ("queues: {a.b: {handler: h}}", ["1:10 queues.a.b is not a name for a queue; give it a text without dots"]),
    ("queues: [q]", ["1:1 queues=['q'] is not a mapping; write name: {...}"]),
    (Q + "logs: loud", ["2:1 logs.='loud' is not a mapping; write {level: ..., format: ...}"]),
    (Q + "logs: {level: lowd}", ["2:8 logs.level='lowd' is unknown; choose one of debug, info, warning, error"]),
    (
        Q + "observe: {listen: '9464'}",
        [
            "2:11 observe.listen[0]='9464' is not HOST:PORT or unix:PATH; write 127.0.0.1:9464, '[::1]:9464', unix:/path, or 'unix:' for the socket of this user"
        ],
    ),
    (
        Q + "observe: {token: hunter2}",
        ["2:11 observe.token is not a reference; write env:NAME or file:/path, never the secret itself"],
    ),
    (
        Q + "observe: {token: env:NOT_THERE}",
        [
            "2:11 observe.token can't be read: a credential is to come from the environment variable 'NOT_THERE', which is not set; set it"
        ],
    ),
    (
        Q + "observe: {token: file:/there-is-no-such-secret}",
        [
            "2:11 observe.token can't be read: a credential is to come from the file '/there-is-no-such-secret', which cannot be read "
            "(No such file or directory); make it, readable for this user only"
        ],
    ),
    (Q + "sinks: {s: {path: x}}", ["2:9 sinks.s.type is missing; add type: one of " + ", ".join([*SINKS, "code"])]),
    (Q + "sinks: {s: {tpye: sqlite}}", ["2:9 sinks.s.type is missing; tpye is there; did you mean type?"]),
    (
        Q + "sinks: {s: {type: sqlit, path: x}}",
        ["2:13 sinks.s.type='sqlit' is not a kind of sink; did you mean sqlite?"],
    ),
    (Q + "sinks: {s: sqlite}", ["2:9 sinks.s is not a mapping; write {type: sqlite, ...}"]),
    (Q + "sinks: {s: {type: sqlite}}", ["2:9 sinks.s.path is missing; add path: ..."]),
    (
        Q + "sinks: {s: {type: sqlite, pth: x}}",
        ["2:27 sinks.s.pth is not a field of a sqlite sink; did you mean path?"],
    ),
    (
        Q + "sinks: {s: {type: postgres, dsn: 'postgresql://app:s3cret@db/app'}}",
        ["2:29 sinks.s.dsn holds a credential; write env:NAME or file:/path, and put the whole text there"],
    ),
    (
        Q + "sinks: {s: {type: postgres, dsn: 'postgresql://${DB_HOST}/app'}}",
        ["2:29 sinks.s.dsn holds ${DB_HOST}, and nothing is filled in; write env:DB_HOST for the whole value"],
    ),
    (
        Q + "sinks: {s: {type: http, url: 'http://x', headers: {Authorization: Bearer 1, n: 1, 2: b}, retryable: [x]}}",
        [
            "2:42 sinks.s.headers.Authorization holds a credential; write env:NAME or file:/path, and put the whole text there",
            "2:42 sinks.s.headers.2 is a name that is not a text; put it in quotes",
            "2:90 sinks.s.retryable=['x'] is not a list of whole numbers; write retryable: [409, 423]",
        ],
    ),
    (
        Q + "sinks: {s: {type: kafka, bootstrap: [], topic: 7}}",
        [
            "2:26 sinks.s.bootstrap=[] is not a list of texts; write bootstrap: [one, two]",
            "2:41 sinks.s.topic=7 is not a text; write topic: '...', in quotes where it looks like something else",
        ],
    ),
    (
        Q + "sinks: {s: {type: delta, uri: '', storage_options: x}}",
        [
            "2:26 sinks.s.uri='' is empty; give uri a value, or leave it out",
            "2:35 sinks.s.storage_options='x' is not a mapping; write storage_options: {name: value}",
        ],
    ),
    (
        Q + "sinks: {s: {type: code, use: f, options: [1]}}",
        ["2:33 sinks.s.options=[1] is not a mapping with texts as names; write options: {name: value}"],
    ),
    (
        "exporters: {e: {sink: s}, f: {sink: s}}\nsinks: {s: {type: memory}}",
        ["1:31 exporters.f.sink='s' is the sink of 'e' too; give each a sink of its own"],
    ),
    (
        "exporters: {e: {sink: s, path: d}, f: {sink: t, path: ./d}}\nsinks: {s: {type: memory}, t: {type: memory}}",
        ["1:49 exporters.f.path='./d' is the directory of 'e' too; give each one of its own"],
    ),
    (
        "exporters: {e: {sink: s, dead_letters: f}, f: {sink: t, dead_letters: e}}\nsinks: {s: {type: memory}, t: {type: memory}}",
        [
            "1:26 exporters.e.dead_letters leads back to 'e': e -> f -> e; end in another exporter",
            "1:57 exporters.f.dead_letters leads back to 'f': f -> e -> f; end in another exporter",
        ],
    ),
    (
        "exporters: {e: {sink: nowhere}}",
        ["1:17 exporters.e.sink='nowhere' is not a sink of this file; there is none; add it"],
    ),
    (
        "exporters: {e: {sink: s, max_bytes: 2 gigs, batch: {max_recrods: 1}, retry: {initial: 9s, max_delay: 1s}}}\nsinks: {s: {type: memory}}",
        [
            "1:26 exporters.e.max_bytes='2 gigs' is not a whole number of bytes; give an int of 1 or more, or a text such as '16MiB', or None",
            "1:53 exporters.e.batch.max_recrods is not a field of a batch policy; did you mean max_records?",
            "1:91 exporters.e.retry.max_delay=1.0 is below initial=9.0; raise max_delay",
        ],
    ),
    (
        "exporters: {e: {sink: s, failover: {}, path: d}}\nsinks: {s: {type: memory}}",
        [
            "1:26 exporters.e.failover=FailoverPolicy(max_entries=1000, max_bytes=268435456, interval=5.0, drain=10) is "
            "given with a path: the disk is the better place; leave one of them out",
            "1:26 exporters.e.failover=FailoverPolicy(max_entries=1000, max_bytes=268435456, interval=5.0, drain=10) would "
            "never be used: retry has no end; set retry.max_attempts or retry.max_age",
        ],
    ),
    (
        "sources: {i: {" + SOURCE + "}}",
        [
            "1:11 sources.i.dead_letters is missing; add dead_letters: ...",
            "1:11 sources.i.to is missing; add to: QUEUE, to: EXPORTER or handler: NAME",
        ],
    ),
    (
        "sources: {i: {" + SOURCE + ", dead_letters: drop, to: q, handler: h}}\n" + Q,
        ["1:100 sources.i.handler is given together with to; give only one of the two"],
    ),
    (
        "sources: {i: {" + SOURCE + ", dead_letters: drop, to: p}}\n" + Q,
        ["1:93 sources.i.to='p' is not a queue or exporter of this file; there are q"],
    ),
    (
        "sources: {i: {" + SOURCE + ", dead_letters: drop, to: q, adaptive: {min_workers: 9, max_workers: 2}}}\n" + Q,
        ["1:111 sources.i.adaptive.min_workers=9 is above max_workers=2; lower it, or raise max_workers"],
    ),
    (
        "queues: {q: {handler: h}}\nexporters: {q: {sink: s}}\nsinks: {s: {type: memory}}",
        ["2:13 exporters.q has the name of a queue, and a source names both alike; rename one of the two"],
    ),
    ("a: [\nb", None),
    ("q: !!python/object:os.system {}", None),
]


@pytest.mark.parametrize(("text", "expected"), TABLE, ids=range(len(TABLE)))
def test_a_fault_is_said_in_these_words(tmp_path, text, expected):
    found = faults(tmp_path, text)
    if expected is None:  # PyYAML's own words
        assert found
        assert "valid YAML" in found[0] or "tag" in found[0]
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("queues", "--set queues  is not NAME=VALUE; write --set exporters.warehouse.max_bytes=2GiB"),
        ("queues..x=1", "--set queues..x  is not NAME=VALUE; write --set exporters.warehouse.max_bytes=2GiB"),
        (
            "queues.q.max_batch=many",
            "--set queues.q.max_batch queues.q.max_batch='many' is not a whole number; give an int of 1 or more",
        ),
        ("logs.level=[", None),
    ],
)
def test_what_is_set_is_judged_too(tmp_path, setting, expected):
    found = faults(tmp_path, Q, setting)
    assert found[-1] == expected.replace("  ", " ") if expected else "valid YAML" in found[-1]


@pytest.mark.parametrize(
    ("variable", "rule"),
    [
        (
            "BATCHQUEUE_QUEUES__Q__MAX_BACTH",
            "sets 'MAX_BACTH', which is not a field of QUEUES__Q; did you mean MAX_BATCH?",
        ),
        ("BATCHQUEUE_QUEUS__Q__MAX_BATCH", "sets 'QUEUS', which is not a field; did you mean QUEUES?"),
        ("BATCHQUEUE_XYZZY", "sets 'XYZZY', which is not a field; unset it, or see the reference of the file"),
        ("BATCHQUEUE_QUEUES__Q__MAX_BATCH__X", "names a field of what has none; end it with QUEUES__Q__MAX_BATCH"),
    ],
)
def test_a_variable_that_means_nothing_is_refused(tmp_path, variable, rule):
    assert faults(tmp_path, Q, environ={variable: "1"}) == [
        f"environment variable {variable}  {rule}".replace("  ", " ")
    ]


def test_a_variable_can_name_what_is_not_in_the_file(tmp_path):
    environ = {"BATCHQUEUE_SINKS__S__TYPE": "sqlite", "BATCHQUEUE_SINKS__S__PATH": "x.db"}
    assert read(tmp_path, Q, environ=environ).sinks["s"].values == {"type": "sqlite", "path": "x.db"}


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing.yaml: can't be read \(No such file or directory\)"):
        read_service(tmp_path / "nothing.yaml", environ={})


def test_what_is_probably_not_meant_is_a_warning(tmp_path):
    spec = read(tmp_path, "exporters: {e: {sink: s}}\nsinks: {s: {type: memory}, t: {type: memory}}")
    assert [(each.path, each.rule) for each in warnings_of(spec)] == [
        ("sinks.t", "is used by no exporter"),
        ("exporters.e", "is fed by nothing in the file"),
        ("exporters.e", "keeps records in memory, and drops the oldest when it is full"),
    ]


# --- the tables say what the classes say


@pytest.mark.parametrize(
    ("section", "name"), [*(("sinks", each) for each in SINKS), *(("sources", each) for each in SOURCES)]
)
def test_a_kind_has_the_parameters_of_its_class(section, name):
    kind = (SINKS if section == "sinks" else SOURCES)[name]
    parameters = {
        each.name: each
        for each in list(inspect.signature(kind.load().__init__).parameters.values())[1:]
        if each.kind is not each.VAR_KEYWORD
    }
    if section == "sources":
        for each in ("handler", "name"):
            del parameters[each]
    assert set(parameters) - set(kind.code) <= set(kind.fields)
    if section == "sinks":
        assert set(kind.fields) <= set(parameters)
    for each in set(parameters) & set(kind.fields):
        assert kind.fields[each].needed is (parameters[each].default is inspect.Parameter.empty), each
    placed = [each for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert kind.positional == tuple(each.name for each in placed if each.default is each.empty)


# --- the schema and the templates


@pytest.fixture(scope="module")
def valid():
    return fastjsonschema.compile({key: each for key, each in json_schema().items() if key != "$schema"})


def test_the_schema_takes_a_whole_file(valid):
    valid(yaml.safe_load(WHOLE))


MISNAMED = [text for text, expected in TABLE if expected and "is not a field" in expected[0]]


@pytest.mark.parametrize("text", MISNAMED, ids=range(len(MISNAMED)))
def test_the_schema_refuses_names_that_are_not_there(valid, text):
    with pytest.raises(fastjsonschema.JsonSchemaException):
        valid(yaml.safe_load(text))


def test_every_rule_and_shape_has_a_schema():
    def rules(shape):
        if isinstance(shape, Struct):
            for each in shape.fields.values():
                yield from rules(each.of)
        elif isinstance(shape, Things):
            yield from rules(shape.of)
        elif isinstance(shape, Shape):
            for each in shape.kinds.values():
                yield from rules(each)
        else:
            yield shape

    from batchqueue_async.service.file.schema import FILE

    code_only = {"SelectorRule"}
    assert {type(each).__name__ for each in rules(FILE) if not of_rule(each)} - code_only <= {
        "_Names",
        "_SizeOf",
        "_Balancer",
    }
    with pytest.raises(TypeError, match="Shape has no JSON Schema"):
        of_shape(Shape())


@pytest.mark.parametrize("source", FROM)
@pytest.mark.parametrize("sink", TO)
def test_a_file_to_begin_with_is_right(tmp_path, valid, source, sink):
    text = template(source, sink, "shop")
    spec = read(tmp_path, text, secrets=False)
    assert warnings_of(spec) == []
    valid(yaml.safe_load(text))
    assert max(map(len, text.splitlines())) <= 120


def test_a_file_to_begin_with_for_what_is_not_there():
    with pytest.raises(ConfigError, match="'kafak' is not a kind of source; did you mean kafka"):
        template("kafak", "sqlite")
    with pytest.raises(ConfigError, match="'sqlit' is not a kind of sink; did you mean sqlite"):
        template("kafka", "sqlit")
    compile(program("shop"), "shop.py", "exec")


def test_a_schema_is_json():
    assert json.loads(json.dumps(json_schema()))["title"] == "A service of batchqueue_async"
