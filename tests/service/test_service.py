# ruff: noqa: E501, ISC004, RUF043 - messages stand as they are printed
"""A service in this process: how it is made, drained, reloaded; what its code finds; what its start and end say."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import urllib.request
from pathlib import Path

import pytest
import redis
import structlog

import batchqueue_async as bq
from batchqueue_async._support.reloads import reloads
from batchqueue_async.errors import BatchQueueError, ConfigError, QueueClosedError
from batchqueue_async.service import App, Service, logs, read_service
from batchqueue_async.service.app import load_app
from batchqueue_async.service.pipelines import PipelineThread
from batchqueue_async.service.reload import changes
from batchqueue_async.service.running import ServiceReport
from batchqueue_async.service.secret_watch import SecretWatch

QUIET = "observe: {enabled: false}\n"
TABLE = "sinks: {db: {type: sqlite, path: out.db, table: t}}\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Files are relative to the directory where a service runs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def app():
    return load_app("service_program:app", Path(__file__))


def spec_of(text, *settings):
    Path("s.yaml").write_text(text)
    return read_service("s.yaml", settings=settings, environ={})


def written(path="out.db"):
    with sqlite3.connect(path) as database:
        return sorted(n for (n,) in database.execute("SELECT n FROM t"))


# --- what feeds what


async def test_items_go_from_queue_to_queue_to_a_table(app):
    text = (
        QUIET
        + TABLE
        + (
            "queues:\n"
            "  incoming: {handler: rows, feeds: [rows], key: itself, partitions: 2, workers: 2}\n"
            "  rows: {exporter: table, max_batch: 7}\n"
            "exporters: {table: {sink: db, path: queue, overflow: block, check: fail, check_timeout: 5s}}\n"
        )
    )
    async with Service(spec_of(text), app) as service:
        assert await app.queue("incoming").produce_many(range(50)) == 50
    assert written() == list(range(50))
    assert service.report.code == 0
    assert service.report.exporters["table"].delivered == 50
    assert service.report.lines()[-1].endswith("nothing is left undelivered")


async def test_handlers_take_items_by_type(app):
    text = (
        QUIET
        + TABLE
        + (
            "queues: {mixed: {handlers: {texts: {max_batch: 3}, numbers: }, fallback: typeless, on_error: kept}}\n"
            "exporters: {table: {sink: db, overflow: block}}\n"
        )
    )
    async with Service(spec_of(text), app) as service:
        await service.queues["mixed"].produce_many(["ab", 7, "abc", 2.5])
    assert written() == [-1, 2, 3, 7]


async def test_what_failed_goes_to_the_error_handler(app):
    async with Service(spec_of(QUIET + "queues: {q: {handler: fails, on_error: kept}}"), app) as service:
        await service.queues["q"].produce_many([1, 2])
    assert app.kept == [1, 2]
    assert service.report.queues["q"].failed == 2


async def test_dead_letters_go_to_another_exporter(app):
    text = QUIET + (
        "queues: {q: {exporter: first}}\n"
        "exporters:\n"
        "  first: {sink: away, retry: {initial: 1ms, max_delay: 1ms, max_attempts: 1}, dead_letters: last}\n"
        "  last: {sink: file, overflow: block}\n"
        "sinks: {away: {type: code, use: away}, file: {type: jsonl, path: dead.jsonl}}\n"
    )
    async with Service(spec_of(text), app) as service:
        await service.queues["q"].produce_many([{"n": 1}, {"n": 2}])
        await service.queues["q"].flush()
        await service.exporters["first"].flush()
    assert service.report.exporters["first"].dead_lettered == 2
    assert service.report.exporters["last"].delivered == 2


async def test_redis_leads_into_a_table_and_to_code(app, redis_server, monkeypatch):
    url = f"redis://{redis_server.address}/0"
    client = redis.Redis.from_url(url, socket_timeout=60)
    client.delete("numbers", "coded")
    with client.pipeline() as pipe:
        for each in range(30):
            pipe.xadd("numbers", {"data": str(each)})
            pipe.xadd("coded", {"data": str(100 + each)})
        pipe.execute()
    source = "type: redis, group: g, dead_letters: drop, claim_after: 0"
    monkeypatch.setenv("SERVICE_TEST_REDIS", url)
    text = (
        QUIET
        + TABLE
        + (
            "sources:\n"
            f"  one: {{{source}, url: env:SERVICE_TEST_REDIS, stream: numbers, decode: number, to: table}}\n"
            f"  two: {{{source}, url: '{url}', stream: coded, batch: 10, handler: messages}}\n"
            "exporters: {table: {sink: db, path: queue, overflow: block, batch: {linger: 10ms}}}\n"
        )
    )
    async with Service(spec_of(text), app) as service:
        assert set(service.consumers) == {"one", "two"}
        async with asyncio.timeout(60):
            while sum(each.stats().acked for each in service.consumers.values()) < 60:
                await asyncio.sleep(0.01)
    assert written() == [*range(30), *range(100, 130)]
    assert service.report.code == 0
    assert service.report.sources["one"].acked == 30
    with pytest.raises(QueueClosedError, match="the service does not run now"):
        app.queue("rows")


async def test_options_become_what_their_classes_take(app, monkeypatch):
    """Every kind of option; nothing is opened."""
    from batchqueue_async.service.building import Builder

    monkeypatch.setenv("TOKEN", "t0ken")
    monkeypatch.setenv("USER_NAME", "shop")
    text = """\
sinks:
  http:
    type: http
    url: https://localhost/x
    headers: {X-Plain: one, Authorization: env:TOKEN}
    oauth2: {url: https://localhost/token, client_id: me, client_secret: env:TOKEN}
    tls: {verify: false}
    retryable: [409]
  kafka: {type: kafka, bootstrap: localhost:9092, topic: t, user: env:USER_NAME, password: env:TOKEN, tls: true}
  otlp: {type: otlp, endpoint: 'http://localhost:4317', resource: {service.name: x, n: [1, env:USER_NAME]}}
  none: {type: redis, url: redis://localhost, stream: s, tls: null}
queues: {q: {handler: rows}}
sources:
  nats: {type: nats, url: nats://localhost, subject: s, stream: S, durable: d, dead_letters: drop, decode: text,
         ordered_by: itself, to: q}
  kafka: {type: kafka, bootstrap: localhost:9092, topics: t, group: g, dead_letters: dead, ordered_by: key, to: q}
"""
    spec = spec_of(text)
    builder = Builder(spec, app)
    sinks = builder.sinks()
    consumers = builder.consumers({"q": rows_handler})
    builder.finish()
    assert "t0ken" not in repr([vars(each) for each in sinks.values()])
    assert consumers["nats"].config.decode is not None
    assert consumers["kafka"].config.dead_letters == "dead"
    bad = Builder(spec_of(text.replace("localhost:9092, topic: t", "nowhere, topic: t")), app)
    assert "kafka" not in bad.sinks()
    assert [each.path for each in bad.faults] == ["sinks.kafka"]
    with pytest.raises(ConfigError, match="add the port"):
        bad.finish()


async def rows_handler(batch):
    """Stands for the queue."""


# --- the code


async def test_names_that_code_has_not_registered_are_all_said(app):
    text = (
        QUIET
        + TABLE
        + (
            "queues: {a: {handler: rwos}, b: {handlers: {typeless: }}, c: {handlers: {text: }}}\n"
            "exporters: {e: {sink: own, on_dead_letter: kpet}}\n"
        )
    )
    text = text.replace("sinks: {", "sinks: {own: {type: code, use: tabel}, ")
    with pytest.raises(ConfigError) as caught:
        async with Service(spec_of(text), app):
            pass
    assert [f"{each.path}: {each.rule}; {each.way_out}" for each in caught.value.faults] == [
        "sinks.own: can't be made: sink 'tabel': the program has not registered it; did you mean table?",
        "queues.a: can't be made: handler 'rwos': the program has not registered it; did you mean rows?",
        "queues.b: can't be made: handler 'typeless' was registered without a type; "
        "write @app.handler('typeless', type=...)",
        "queues.c: can't be made: handler 'text': the program has not registered it; did you mean texts?",
    ]


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("service_program", "is not MODULE:NAME; write --app shop.service:app"),
        ("no_such_module:app", "can't be imported (No module named 'no_such_module')"),
        ("service_program:ap", "the module service_program has no ap"),
        ("service_program:not_an_app", "is a object, not an App; make it with App()"),
    ],
)
def test_an_app_that_is_none(reference, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_app(reference, Path(__file__))
    assert words in str(caught.value)


def test_names_are_registered_once():
    app = App()
    app.key("k")(len)
    app.key("k")(len)
    with pytest.raises(ConfigError, match="key 'k': there is one of that name already"):
        app.key("k")(str)
    with pytest.raises(ConfigError, match="encoder 'e': int can't be called; give a function"):
        app.encoder("e")(3)
    with pytest.raises(ConfigError, match="handler 'h'"):
        app.handler("h")(lambda batch: None)
    with pytest.raises(ConfigError, match="register one with @app.sink"):
        app.find("sink", "x")


async def test_code_asks_for_what_is_not_in_the_file(app):
    async with Service(spec_of(QUIET + "queues: {q: {handler: rows}}"), app):
        with pytest.raises(QueueClosedError, match="queue 'p': is not in the file; there are q"):
            app.queue("p")


# --- the start and the end


async def test_what_can_not_open_ends_the_start_and_closes_the_rest(app):
    text = QUIET + (
        "exporters: {a: {sink: fine, overflow: block}, b: {sink: bad, check: fail, path: /proc/nothing/here}}\n"
        "sinks: {fine: {type: jsonl, path: fine.jsonl}, bad: {type: code, use: away}}\n"
    )
    service = Service(spec_of(text), app)
    with pytest.raises((BatchQueueError, OSError)):
        await service.__aenter__()
    assert service.exporters["a"].closed
    assert service.report.exporters["a"].delivered == 0


async def test_a_start_that_takes_too_long_is_given_up(app):
    class Slow(type(app.find("sink", "away")())):
        async def open(self):
            await asyncio.sleep(1e6)

    own = App()
    own.sink("slow")(Slow)
    text = (
        QUIET
        + "service: {start_timeout: 50ms}\nexporters: {e: {sink: s, send_timeout: 1h}}\nsinks: {s: {type: code, use: slow}}"
    )
    with pytest.raises(BatchQueueError, match="is not open after start_timeout=0.05 s"):
        await Service(spec_of(text), own).__aenter__()


async def test_what_is_left_is_said(app):
    text = (
        QUIET
        + "service: {drain_timeout: 300ms}\n"
        + (
            "queues: {q: {handler: stuck}}\n"
            "exporters: {lost: {sink: a, overflow: block}, kept: {sink: b, path: queue, overflow: block}}\n"
            "sinks: {a: {type: code, use: away}, b: {type: code, use: away}}\n"
        )
    )

    async with Service(spec_of(text), app) as service:
        await service.queues["q"].produce_many([1, 2])
        await service.exporters["lost"].consume([{"n": 1}])
        await service.exporters["kept"].consume([{"n": 1}, {"n": 2}])
    report = service.report
    assert (report.code, report.on_disk) == (3, 2)
    said = report.lines()
    assert "exporter lost: 1 records were not delivered and are lost" in said
    assert "exporter kept: 2 records stay on disk, and are sent at the next start" in said
    assert said[-1].startswith("ended in ")
    assert "nothing is left" not in said[-1]
    assert await service.stop() is report


async def test_a_hurry_ends_a_drain_at_once(app):
    text = (
        QUIET
        + "exporters: {e: {sink: a, overflow: block, retry: {initial: 1h, max_delay: 1h}}}\nsinks: {a: {type: code, use: away}}"
    )
    service = Service(spec_of(text, "service.drain_timeout=1h"), app)
    await service.__aenter__()
    await service.exporters["e"].consume([{"n": 1}])
    stopping = asyncio.create_task(service.stop())
    await asyncio.sleep(0)
    service.hurry()
    async with asyncio.timeout(60):
        report = await stopping
    assert (report.lost, report.code) == (1, 3)


async def test_a_disk_without_room_blocks_and_loses_nothing(app):
    text = (
        QUIET
        + "service: {drain_timeout: 300ms}\n"
        + TABLE
        + (
            "queues: {q: {exporter: e}}\n"
            "exporters: {e: {sink: db, path: queue, overflow: block, block_timeout: null, durable: {min_free_bytes: 1000TiB}}}\n"
        )
    )
    async with Service(spec_of(text), app) as service:
        await service.queues["q"].produce_many([{"n": 1}])
        while service.queues["q"].stats().used:
            await asyncio.sleep(0.01)
    assert service.report.code == 3
    assert "items were not handled and are lost" in service.report.lines()[0]


async def test_the_pages_say_in_which_phase_it_is(app):
    text = "observe: {listen: '127.0.0.1:0'}\n" + TABLE + "exporters: {e: {sink: db, overflow: block}}\n"
    async with Service(spec_of(text), app) as service:
        url = service.ops.urls[0]
        assert service.ops.phase == "running"

        def get(path):
            with urllib.request.urlopen(url + path) as answer:
                return answer.read().decode()

        assert "true" in await asyncio.to_thread(get, "/readyz")
        said = await asyncio.to_thread(get, "/metrics")
        assert "batchqueue_config_last_reload_success 1" in said
        assert "batchqueue_config_last_reload_success_timestamp_seconds" in said
    assert service.ops.phase == "draining"


async def test_a_port_that_is_taken_ends_the_start(app):
    text = "exporters: {e: {sink: db, overflow: block}}\n" + TABLE
    async with Service(spec_of(text + "observe: {listen: '127.0.0.1:0'}\n"), app) as first:
        port = first.ops.urls[0].rpartition(":")[2]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use by another program; choose another"):
            await Service(spec_of(text + f"observe: {{listen: '127.0.0.1:{port}'}}\n"), app).__aenter__()


def test_a_report_names_what_failed_and_what_went_back():
    class Source:
        released = 3

    report = ServiceReport(sources={"in": Source()}, failed={"pipelines.p": "gave up"}, seconds=0.5)
    assert report.lines() == [
        "source in: 3 messages were given back to the broker",
        "pipelines.p: gave up",
        "ended in 0.5 s",
    ]
    assert report.code == 3


# --- reload

RELOADED = (
    QUIET
    + TABLE
    + """\
queues: {q: {exporter: e, max_batch: 5, linger: 0}}
exporters: {e: {sink: db, overflow: block, batch: 10, retry: {initial: 1s}, breaker: {threshold: 5}, workers: 2}}
"""
)


def service_of(app):
    return Service(spec_of(RELOADED), app, read_again=lambda: read_service("s.yaml", environ={}))


async def test_a_reload_changes_what_can_change(app):
    async with service_of(app) as service:
        spec_of(
            RELOADED.replace(
                "max_batch: 5, linger: 0",
                "max_batch: 50, linger: 20ms, retry: {max_attempts: 2}, handler_timeout: 9s, drain_timeout: 7s",
            )
            .replace(
                "batch: 10",
                "batch: {max_records: 20, linger: 0}, rate: {requests: 900}, max_bytes: 1GiB, max_records: 5000000000",
            )
            .replace("initial: 1s", "initial: 2s, budget: null")
            .replace("threshold: 5", "enabled: false")
            .replace("workers: 2", "workers: 3, drain_timeout: 9s")
            .replace("max_records: 5000000000", "send_timeout: 8s"),
            "logs.level=info",
        )
        assert await service.reload()
        queue, exporter = service.queues["q"], service.exporters["e"]
        assert (queue.config.max_batch, queue.config.linger, queue.config.handler_timeout) == (50, 0.02, 9.0)
        assert exporter.config.batch == bq.BatchPolicy(max_records=20, linger=0.0)
        assert exporter.config.retry.initial == 2.0
        assert exporter.config.max_bytes == 1 << 30
        assert exporter.config.worker_count == 3
        await queue.produce_many([{"n": each} for each in range(100)])
        await queue.flush()
        assert max(exporter.stats().accepted_batches, 1) <= 3
    assert written() == list(range(100))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_batch: 5", "buffer_size: 9", "queues.q.buffer_size added; restart"),
        ("max_batch: 5", "max_batch: 6, buffer_size: 9", "queues.q.buffer_size added; restart"),
        ("path: out.db", "path: other.db", "sinks.db.path changed; restart"),
        ("sinks: {", "sinks: {x: {type: memory}, ", "sinks.x added; restart"),
        ("overflow: block", "overflow: drop_oldest, max_bytes: 1MiB", "exporters.e.overflow changed; restart"),
        (
            "workers: 2",
            "workers: 2, max_bytes: 1MiB",
            "exporter 'e': max_bytes can't be lowered while it runs; restart",
        ),
        ("workers: 2", "workers: 2, max_records: 5", "exporter 'e': max_records can't be lowered"),
        ("batch: 10", "batch: many", "is not a mapping"),
        ("observe: {enabled: false}", "service: {name: other}", "service.name added; restart"),
        ("max_batch: 5", "max_batch: [", "is not valid YAML"),
    ],
)
async def test_a_reload_is_refused_whole(app, caplog, old, new, words):
    async with service_of(app) as service:
        spec_of_text = RELOADED.replace("linger: 0}", "linger: 1s}", 1).replace(old, new)
        Path("s.yaml").write_text(spec_of_text)
        with caplog.at_level(logging.INFO, "batchqueue_async"):
            assert not await service.reload()
        refused = [each.getMessage() for each in caplog.records if "reload_refused" in each.getMessage()]
        assert any(words in each for each in refused), refused
        assert service.queues["q"].config.linger == 0.0
        assert not reloads.last.ok
        assert reloads.taken.ok


async def test_limits_on_disk_can_not_change(app, caplog):
    text = RELOADED.replace("overflow: block", "overflow: block, path: queue")
    service = Service(spec_of(text), app, read_again=lambda: read_service("s.yaml", environ={}))
    async with service:
        spec_of(text.replace("workers: 2", "workers: 2, max_bytes: 9GiB, send_timeout: 1h"))
        assert not await service.reload()
        said = " ".join(each.getMessage() for each in caplog.records)
        assert "max_bytes of a queue on disk can't change while it runs" in said
        assert "a batch may be held longer than its lease on disk" in said


async def test_a_service_without_a_file_is_not_reloaded(app):
    async with Service(spec_of(RELOADED), app) as service:
        assert not await service.reload()


async def test_what_one_queue_refuses_is_undone_in_the_others(app, caplog):
    text = (
        QUIET
        + TABLE
        + (
            "queues: {a: {exporter: table, max_batch: 5}, b: {handlers: {texts: {max_batch: 50}}, max_batch: 60}}\n"
            "exporters: {table: {sink: db, overflow: block}}\n"
        )
    )
    service = Service(spec_of(text), app, read_again=lambda: read_service("s.yaml", environ={}))
    async with service:
        spec_of(text.replace("max_batch: 5}", "max_batch: 6}").replace("max_batch: 60", "max_batch: 40"))
        assert not await service.reload()
        assert service.queues["a"].config.max_batch == 5
        assert "is below max_batch=50 of the handler of str" in caplog.text


def test_a_difference_in_a_thing_is_named_with_its_path():
    before = {"queues": {"q": {"handler": "h", "retry": {"max_attempts": 1}}}, "sinks": {"s": {"type": "memory"}}}
    after = {
        "queues": {"q": {"handler": "h", "retry": {"max_attempts": 2}}},
        "sinks": {"s": {"type": "jsonl", "path": "x"}},
    }
    assert [(str(each), each.live) for each in changes(before, after)] == [
        ("queues.q.retry.max_attempts changed", True),
        ("sinks.s.type changed", False),
        ("sinks.s.path added", False),
    ]
    assert changes({"version": 1}, {"defaults": {"x": 1}}) == []


async def test_a_queue_and_an_exporter_refuse_other_changes(app):
    import dataclasses

    async with Service(spec_of(RELOADED), app) as service:
        queue, exporter = service.queues["q"], service.exporters["e"]
        with pytest.raises(ConfigError, match="queue 'q': buffer_size can't change while it runs"):
            queue.reconfigure(dataclasses.replace(queue.config, buffer_size=3))
        with pytest.raises(ConfigError, match="exporter 'e': ordering can't change while it runs; restart"):
            exporter.reconfigure(dataclasses.replace(exporter.config, ordering="order"))


@pytest.mark.parametrize("handlers", ["single", "by_type"])
async def test_a_queue_lingers_as_it_was_told_last(handlers):
    import dataclasses

    taken = []

    async def take(batch):
        taken.append(list(batch))

    async with bq.BatchQueueManager() as manager:
        single = handlers == "single"
        queue = manager.create("q", bq.QueueConfig(consumer=take if single else None, max_batch=3))
        if not single:
            queue.add_handler(int, take)
        await queue.produce(1)
        await queue.flush()
        queue.reconfigure(dataclasses.replace(queue.config, linger=3600.0))
        await queue.produce(2)
        await asyncio.sleep(0.1)
        assert taken == [[1]]
        await queue.produce_many([3, 4])
        async with asyncio.timeout(60):
            while len(taken) < 2:
                await asyncio.sleep(0.001)
        await queue.produce(5)
        await asyncio.sleep(0.01)
        queue.reconfigure(dataclasses.replace(queue.config, linger=0.0))
        async with asyncio.timeout(60):
            while len(taken) < 3:
                await asyncio.sleep(0.001)
    assert taken == [[1], [2, 3, 4], [5]]


# --- secrets


async def test_a_secret_that_changes_lets_its_exporter_try_again(app, tmp_path, caplog):
    caplog.set_level(logging.INFO, "batchqueue_async")
    secret = tmp_path / "token"
    secret.write_text("old")
    text = (
        QUIET
        + "service: {secrets_every: 10ms}\n"
        + (
            "queues: {q: {exporter: e}}\n"
            "exporters: {e: {sink: s, overflow: block}, f: {sink: t, overflow: block}}\n"
            f"sinks:\n  s: {{type: http, url: 'http://127.0.0.1:9/', token: 'file:{secret}', headers: {{X-K: ['a']}}}}\n"
            f"  t: {{type: jsonl, path: 'file:{secret}'}}\n"
        ).replace(", headers: {X-K: ['a']}", "")
    )
    spec = spec_of(text)
    resumed = []

    class Waiting:
        closed = False

        def __init__(self, name):
            self.name = name

        def resume(self):
            resumed.append(self.name)

    watch = SecretWatch(spec, {"e": Waiting("e"), "f": Waiting("f")})
    assert watch.look() == []
    secret.write_text("renewed")
    assert watch.look() == [str(secret)]
    assert resumed == ["e", "f"]
    assert "secret_needs_restart" in caplog.text
    assert "sinks.t.path" in caplog.text
    secret.unlink()
    assert watch.look() == [str(secret)]
    assert "secret_gone" in caplog.text
    looking = asyncio.create_task(watch.run())
    secret.write_text("back")
    async with asyncio.timeout(30):
        while len(resumed) < 4:
            await asyncio.sleep(0.01)
    looking.cancel()


# --- pipelines of Spark


class Pipeline:
    """Has the face of a `SparkPipeline`: what it does is Spark's, and tested there."""

    def __init__(self, code=0, error=None, waits=False):
        self.code, self.error, self.waits = code, error, waits
        self.failed, self.stuck = ({"rows": "no such table"}, ("other",)) if code else ({}, ())

    def run(self, *, once, stop):
        if self.error is not None:
            raise self.error
        if self.waits:
            stop.wait()
        return self


@pytest.mark.parametrize(
    ("pipeline", "problem"),
    [
        (Pipeline(), None),
        (Pipeline(waits=True), None),
        (Pipeline(code=3), "rows: no such table; other: did not end in order"),
        (Pipeline(error=ConfigError("spark.yaml: has no output")), "ConfigError: spark.yaml: has no output"),
    ],
)
def test_a_pipeline_runs_in_a_thread(pipeline, problem):
    over = threading.Event()
    thread = PipelineThread("p", {"file": "spark.yaml"}, over.set, load=lambda file: pipeline)
    thread.start()
    assert thread.finish(60) == problem
    assert over.wait(60)


def test_a_pipeline_that_does_not_end_is_said():
    released = threading.Event()

    class Stuck(Pipeline):
        def run(self, *, once, stop):
            released.wait()
            return self

    thread = PipelineThread("p", {"file": "spark.yaml", "once": True}, lambda: None, load=lambda file: Stuck())
    thread.start()
    assert "has not ended in time" in thread.finish(0.01)
    released.set()
    assert thread.finish(60) is None


class Asked:
    """The signals of a service, without any."""

    def __init__(self):
        self.asked, self.reloads, self.name = asyncio.Event(), asyncio.Event(), ""

    def stop(self, reason):
        self.name = reason
        self.asked.set()


@pytest.mark.real_time(one_loop=True)
@pytest.mark.parametrize(
    ("more", "code", "reason"),
    [("", 0, "done"), ("", 3, "pipeline p failed"), ("queues: {q: {handler: rows}}\n", 3, "pipeline p failed")],
)
async def test_pipelines_end_a_service(app, monkeypatch, more, code, reason):
    monkeypatch.setattr("batchqueue_async.service.pipelines._load", lambda file: Pipeline(code))
    signals = Asked()
    async with Service(spec_of(QUIET + more + "pipelines: {p: {file: spark.yaml, once: true}}\n"), app) as service:
        async with asyncio.timeout(60):
            await service.run(signals)
    assert signals.name == reason
    assert service.report.code == code


@pytest.mark.real_time(one_loop=True)
async def test_a_pipeline_that_is_done_does_not_end_what_else_runs(app, monkeypatch):
    pipeline = Pipeline()
    ran = threading.Event()
    monkeypatch.setattr("batchqueue_async.service.pipelines._load", lambda file: (ran.set(), pipeline)[1])
    signals = Asked()
    text = QUIET + "queues: {q: {handler: rows}}\npipelines: {p: {file: spark.yaml, once: true}}\n"
    async with Service(spec_of(text), app) as service:
        running = asyncio.create_task(service.run(signals))
        assert await asyncio.to_thread(ran.wait, 60)
        async with asyncio.timeout(60):
            while not service._pipelines["p"].ended:
                await asyncio.sleep(0.01)
        for _ in range(50):  # what the end has set off has run by then
            await asyncio.sleep(0)
        assert not running.done()
        signals.stop("asked")
        await running
    assert (signals.name, service.report.code) == ("asked", 0)


# --- logs


@pytest.fixture
def logging_restored():
    root, own = logging.getLogger(), logging.getLogger("batchqueue_async")
    before = list(root.handlers), root.level, own.level
    yield
    root.handlers[:], _ = before[0], structlog.reset_defaults()
    root.setLevel(before[1])
    own.setLevel(before[2])


@pytest.mark.parametrize("style", ["text", "json"])
def test_log_lines(style, capsys, logging_restored):
    from batchqueue_async._support import log

    logs.configure("info", style)
    log.info("started", queue="q")
    log.debug("unsaid")
    logging.getLogger("other").warning("two\nlines of redis://app:s3cret@host")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "s3cret" not in said[1]
    if style == "json":
        import json

        assert json.loads(said[0])["event"] == "started"
        assert json.loads(said[1])["event"] == "two lines of redis://app:***@host"
    else:
        assert said[0].endswith("info started queue='q'")
        assert said[1].endswith("warning two lines of redis://app:***@host")
