# ruff: noqa: E501 - messages stand as they are printed
"""`run`, `check`, `schema`, `new` of a service: processes under signals, exit status, words."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import threading
import time
from pathlib import Path

import pytest
import redis
from service_process import Running, write

from batchqueue_async.cli.main import main
from batchqueue_async.errors import BatchQueueError
from batchqueue_async.observe.client import OpsClient
from batchqueue_async.service.connecting import addresses_of
from batchqueue_async.service.signals import StopSignals

HERE = Path(__file__).parent
TABLE = "sinks: {db: {type: sqlite, path: out.db, table: t}}\n"
AWAY = "sinks: {away: {type: code, use: away}}\n"
APP = ("--app", "service_program:app")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))


# --- run, in a process of its own


def test_a_service_from_redis_to_sqlite_and_http_status(redis_server):
    """All is delivered; SIGHUP changes what it may and refuses the rest; SIGTERM ends with 0; no secret is shown."""
    client = redis.Redis.from_url(f"redis://{redis_server.address}/0", socket_timeout=60)
    client.delete("served")
    with client.pipeline() as pipe:
        for each in range(200):
            pipe.xadd("served", {"data": json.dumps({"n": each})})
        pipe.execute()
    text = TABLE + (
        "service: {name: shop, drain_timeout: 20s}\n"
        "observe: {listen: 'unix:ops.sock'}\n"
        "logs: {format: json}\n"
        "sources: {in: {type: redis, url: env:REDIS, stream: served, group: g, decode: json, dead_letters: drop, to: table}}\n"
        "exporters: {table: {sink: db, path: queue, overflow: block, batch: {linger: 5ms}}}\n"
    )
    with Running(text, REDIS=f"redis://{redis_server.address}/0") as service:
        service.until("shop: running 1 source, 1 exporter, 1 sink")
        ops = OpsClient(Path("ops.sock").resolve())
        deadline = time.monotonic() + 60
        while (count := ops.json("/stats")["exporters"][0]["stats"]["delivered"]) < 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert count == 200
        write(text.replace("linger: 5ms", "linger: 6ms"))
        service.signal(signal.SIGHUP)
        assert "exporters.table.batch.linger changed" in service.until('"reloaded"')
        write(text.replace("path: queue", "path: other"))
        service.signal(signal.SIGHUP)
        assert "exporters.table.path changed; restart" in service.until("reload_refused")
        service.signal(signal.SIGTERM)
        code, said = service.end()
    assert code == 0, said
    assert "SIGTERM: draining within 20 s; once more ends at once" in said
    assert "nothing is left undelivered" in said
    events = [json.loads(line)["event"] for line in said.splitlines() if line.startswith("{")]
    assert {"exporter_resolved", "intake_started", "service_started", "service_stopping", "service_ended"} <= set(
        events
    )
    with sqlite3.connect("out.db") as database:
        assert database.execute("SELECT count(*), sum(n) FROM t").fetchone() == (200, sum(range(200)))


FED = "observe: {enabled: false}\nsinks: {fed: {type: code, use: feeder}}\n"


def test_a_handler_that_blocks_the_loop_cannot_keep_the_process():
    """The third signal ends it where nothing else can."""
    with Running(FED + "queues: {q: {handler: blocks}}\nexporters: {e: {sink: fed, overflow: block}}\n") as service:
        assert service.process.stdout.readline() == "blocked\n"
        for words in ("SIGTERM: draining within 30 s", "SIGTERM: ending at once", "SIGTERM: ended"):
            service.signal(signal.SIGTERM)
            service.until(words)
        code, _ = service.end()
    assert code == 3


def test_two_sigints_end_a_drain_at_once_and_say_what_is_lost():
    text = FED + (
        "service: {name: s, drain_timeout: 1h}\nqueues: {q: {exporter: e}}\n"
        "exporters: {e: {sink: fed, overflow: block, breaker: {threshold: 1}, retry: {initial: 1s, max_delay: 1s}}}\n"
    )
    with Running(text) as service:
        service.until("running")
        service.until("breaker_opened")
        service.signal(signal.SIGINT)
        service.until("SIGINT: draining within 3600 s")
        service.until("queue_closed")
        service.signal(signal.SIGINT)
        code, said = service.end()
    assert code == 3, said
    assert "exporter e: 1 records were not delivered and are lost" in said


# --- run, in this process


class Stopper(threading.Thread):
    """Sends signals to this process when the service's socket answers."""

    def __init__(self, *numbers, fed=False):
        super().__init__(daemon=True)
        self.numbers = numbers
        self.fed = fed

    def run(self):
        ops = OpsClient(Path("ops.sock").resolve())
        while self.phase(ops) != "running":
            time.sleep(0.02)
        while self.fed and not ops.json("/stats")["queues"][0]["stats"]["accepted"]:
            time.sleep(0.02)
        for number in self.numbers:
            os.kill(os.getpid(), number)
            while number == signal.SIGTERM and self.numbers[-1] != number and self.phase(ops) != "draining":
                time.sleep(0.02)

    @staticmethod
    def phase(ops):
        try:
            return ops.status()["status"]["phase"]
        except BatchQueueError:
            return None


@pytest.fixture
def quiet_logs(monkeypatch):
    monkeypatch.setattr("batchqueue_async.service.logs.configure", lambda *_: None)
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


SERVED = "service: {name: served}\nobserve: {listen: 'unix:ops.sock'}\n"


def test_run_ends_with_0_where_nothing_is_left(capsys, quiet_logs):
    write(SERVED + TABLE + "queues: {rows: {exporter: table}}\nexporters: {table: {sink: db, overflow: block}}\n")
    Stopper(signal.SIGHUP, signal.SIGTERM).start()
    assert main(["run", "s.yaml"]) == 0
    said = capsys.readouterr().err
    assert "served: running 1 queue, 1 exporter, 1 sink" in said
    assert "nothing is left undelivered" in said
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_systemd_is_notified(quiet_logs, monkeypatch):
    """READY comes after the start, STOPPING when the drain begins, and the loop feeds the watchdog in between."""
    write(SERVED + TABLE + "queues: {rows: {exporter: table}}\nexporters: {table: {sink: db, overflow: block}}\n")
    said = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(100)
        systemd.bind("notify.sock")

        def listen():  # meanwhile: the socket holds a few messages, and those that find no room are lost
            while not said or not said[-1].startswith("STOPPING=1"):
                said.append(systemd.recv(1000).decode())

        monkeypatch.setenv("NOTIFY_SOCKET", str(Path("notify.sock").resolve()))
        monkeypatch.setenv("WATCHDOG_USEC", "60000")
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        Stopper(signal.SIGTERM).start()
        assert main(["run", "s.yaml"]) == 0
        listener.join(100)
    assert said.index("READY=1") < said.index("STATUS=running 1 queue, 1 exporter, 1 sink") < len(said) - 1
    assert "WATCHDOG=1" in said


def test_run_with_a_broker_that_is_away_waits_for_it(capsys, quiet_logs):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        write(
            SERVED
            + TABLE
            + "exporters: {table: {sink: db, overflow: block}}\nsources: {in: {type: redis, stream: s, group: g, "
            f"url: 'redis://127.0.0.1:{port}', dead_letters: drop, decode: json, to: table, reconnect: {{initial: 10ms}}}}}}\n"
        )
        Stopper(signal.SIGTERM).start()
        assert main(["run", "s.yaml"]) == 0
    assert "running 1 source" in capsys.readouterr().err


def test_run_hurried_by_a_second_signal(capfd, quiet_logs):
    write(
        SERVED
        + "queues: {q: {handler: stuck}}\nexporters: {e: {sink: fed, overflow: block}}\nsinks: {fed: {type: code, use: feeder}}\n"
    )
    Stopper(signal.SIGHUP, signal.SIGTERM, signal.SIGINT, fed=True).start()
    assert main(["run", "s.yaml", *APP, "--set", "service.drain_timeout=1h"]) == 3
    said = capfd.readouterr().err
    assert "SIGINT: ending at once" in said
    assert "queue q: 1 items were not handled and are lost" in said


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (
            "queues: {q: {handlr: h}}",
            (),
            "s.yaml:1:14: queues.q.handlr is not a field of a queue; did you mean handler?",
        ),
        ("queues: {q: {handler: h}}", ("--app", "nowhere"), "--app nowhere: is not MODULE:NAME"),
        ("queues: {q: {handler: h}}", APP, "queues.q can't be made: handler 'h': the program has not registered it"),
        ("sinks: {s: {type: http, url: 'http://x', token: env:NO_TOKEN}}", (), "which is not set; set it"),
        ("queues: {q: {handler: rows}}", ("--once",), "--once: is for pipelines of Spark, and s.yaml is a service"),
        ("queues: {q: {handler: rows}}", ("--from", "2026-01-01"), "--from: is for pipelines of Spark"),
        (
            "observe: {listen: '8.8.8.8:1', token: env:PATH}\nqueues: {q: {handler: rows}}",
            APP,
            "does not belong to this machine",
        ),
        (
            "observe: {listen: '0.0.0.0:0'}\nqueues: {q: {handler: rows}}",
            APP,
            "can be reached from other machines; give a token",
        ),
        (
            "exporters: {e: {sink: s}}\nsinks: {s: {type: code, use: of_two}}",
            APP,
            "sinks.s can't be made: @app.sink('of_two'): sink=OfTwo has a send that takes (records, keys); make it async def send",
        ),
        ("views: {}\noutputs: {}", APP, "--app: s.yaml is a pipeline of Spark"),
    ],
)
def test_run_that_can_not_begin_ends_with_2(capsys, quiet_logs, text, arguments, words):
    assert main(["run", write(text), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_stop_while_it_starts(capfd, quiet_logs):
    import service_program

    class Slow(service_program.Away):
        async def open(self):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(1e6)

    service_program.app.sink("slow_to_open")(Slow)
    write(
        "observe: {enabled: false}\nexporters: {e: {sink: s, overflow: block, send_timeout: 1h}}\nsinks: {s: {type: code, use: slow_to_open}}"
    )
    assert main(["run", "s.yaml", *APP]) == 0
    assert "SIGTERM: draining" in capfd.readouterr().err


async def test_signals_that_the_loop_does_not_hear(capfd):
    """The thread that ends a process whose loop is blocked, with the end replaced by a note."""
    ended, asked = [], threading.Event()

    def end(code):
        ended.append(code)
        asked.set()

    import batchqueue_async.service.signals as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GRACE", 0.01)
        patch.setattr(module, "HURRY", 0.01)
        with StopSignals(lambda: 0.0, end=end) as signals:
            signals._stop(signal.SIGTERM, None)
            assert asked.wait(30)
            asked.clear()
            signals._stop(signal.SIGINT, None)
            assert asked.wait(30)
            signals._stop(signal.SIGINT, None)
            await asyncio.sleep(0)
            assert signals.asked.is_set()
            assert signals.hurry.is_set()
            signals.stop("later")
            assert signals.name == "SIGTERM"
    assert ended == [3, 3, 3]
    said = capfd.readouterr().err
    assert "a handler blocks the event loop; what it holds is lost" in said


def test_a_signal_after_the_loop_has_ended():
    async def make():
        return StopSignals(lambda: 0.0)

    signals = asyncio.run(make())
    signals._reload(signal.SIGHUP, None)
    assert not signals.reloads.is_set()


# --- check

GOOD = SERVED + TABLE + "queues: {rows: {exporter: table}}\nexporters: {table: {sink: db, overflow: block}}\n"


def test_check_of_a_good_file(capsys):
    write(GOOD)
    assert main(["check", "s.yaml", "--strict"]) == 0
    assert main(["run", "s.yaml", "--check"]) == 0
    assert capsys.readouterr().out == "s.yaml: 1 queue, 1 exporter, 1 sink; fine\n" * 2


def test_check_as_json(capsys):
    write(GOOD + "service2: 1")
    assert main(["check", "s.yaml", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    assert said["milliseconds"] < 60_000
    assert said["errors"] == [
        {
            "file": "s.yaml",
            "line": 6,
            "column": 1,
            "path": "service2",
            "value": None,
            "rule": "is not a field of a service file",
            "way_out": "did you mean service?",
        }
    ]


def test_check_with_warnings(capsys):
    write(GOOD.replace("overflow: block", "overflow: drop_oldest"))
    assert main(["check", "s.yaml"]) == 0
    assert main(["check", "s.yaml", "--strict"]) == 1
    assert "exporters.table keeps records in memory, and drops the oldest when it is full" in capsys.readouterr().out


def test_check_without_what_another_machine_has(capsys):
    write(
        "sources: {i: {type: redis, url: env:NO_URL, stream: s, group: g, dead_letters: drop, to: q}}\nqueues: {q: {handler: h}}"
    )
    assert main(["check", "s.yaml", "--no-env"]) == 0
    assert main(["check", "s.yaml"]) == 1
    assert main(["check", "s.yaml", "--app", "nowhere:app", "--set", "sources.i.url=redis://localhost"]) == 1
    said = capsys.readouterr().out
    assert "environment variable 'NO_URL', which is not set; set it" in said
    assert "--app nowhere:app: can't be imported" in said


def test_check_of_what_can_be_reached(capsys, redis_server):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = unused.getsockname()[1]
        source = "type: redis, stream: s, group: g, dead_letters: drop, to: table"
        text = GOOD + (
            f"sources:\n  here: {{{source}, url: 'redis://{redis_server.address}'}}\n  gone: {{{source}, url: 'redis://127.0.0.1:{gone}'}}\n"
        )
        write(text)
        assert main(["check", "s.yaml", "--connect"]) == 1
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 1
        assert said[0].startswith("s.yaml:8:3: sources.gone can't be reached: ")
        assert said[0].endswith("; start it, or correct the address")
    write(GOOD.replace("type: sqlite, path: out.db, table: t", "type: code, use: closed"))
    assert main(["check", "s.yaml", "--connect", *APP]) == 1
    assert "sinks.db can't be reached: connection to warehouse:5432 refused; start it" in capsys.readouterr().out


async def test_what_does_not_answer_in_time(redis_server):
    from batchqueue_async.service.connecting import _within

    assert await _within(asyncio.sleep(1e6), 0.01) == "it does not answer within 0.01 s"


def test_where_sources_are(monkeypatch):
    monkeypatch.setenv("NATS", "nats://host")
    assert addresses_of({"url": ["env:NATS", "tls://other:7"]}) == [("host", 4222), ("other", 7)]
    assert addresses_of({"url": "unix:///run/redis.sock"}) == []


def test_print_shows_where_values_are_set(capsys, monkeypatch):
    write(GOOD)
    monkeypatch.setenv("BATCHQUEUE_QUEUES__ROWS__MAX_BATCH", "5")
    assert main(["run", "s.yaml", "--print", "--set", "exporters.table.path=null"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert 'service.name: "served"  # s.yaml, line 1, column 11' in said
    assert "queues.rows.max_batch: 5  # environment variable BATCHQUEUE_QUEUES__ROWS__MAX_BATCH" in said
    assert "exporters.table.path: null  # --set exporters.table.path" in said


# --- schema and new


def test_schema_is_printed(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "object"


def test_new_writes_what_check_takes(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert main(["new", "code", "sqlite", "--name", "shop_new"]) == 0
    assert Path("shop_new.py").exists()
    assert main(["check", "shop_new.yaml", "--app", "shop_new:app", "--strict"]) == 0
    assert main(["new", "redis", "sqlite", "--name", "shop_new"]) == 2
    assert "shop_new.yaml: is there already; give another --name, or --force" in capsys.readouterr().err
    assert main(["new", "redis", "sqlite", "--name", "shop_new", "--force"]) == 0
    assert main(["check", "shop_new.yaml"]) == 0
    assert main(["new", "redis", "sqlite", "--name", "a-b"]) == 2
    assert main(["new", "redis", "kafak"]) == 2
    assert main(["new", "nats", "kafka", "--print"]) == 0
    assert not Path("service.yaml").exists()
