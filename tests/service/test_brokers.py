"""`batchqueue run` between real servers: each broker into a table, and through a full disk to an HTTP destination."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import time
from pathlib import Path

import pytest
import redis
from intake_rigs import RIGS
from mounts import mounted
from service_process import Running

from batchqueue_async.cli.main import main
from batchqueue_async.observe.client import OpsClient

pytestmark = pytest.mark.timeout(400)
LIMIT = 120.0
SERVED = "service: {name: shop, drain_timeout: 60s}\nobserve: {listen: 'unix:ops.sock'}\n"
SOURCES = {
    "kafka": lambda rig: {
        "type": "kafka",
        "bootstrap": rig.server.address,
        "topics": rig.topic,
        "group": rig.group,
        "session_timeout": "6s",
        "dead_letters": rig.dead,
    },
    "rabbitmq": lambda rig: {
        "type": "amqp",
        "url": f"amqp://{rig.server.address}/",
        "queue": rig.queue,
        "dead_letters": f"{rig.queue}.dead",
    },
    "nats": lambda rig: {
        "type": "nats",
        "url": f"nats://{rig.server.address}",
        "subject": f"{rig.stream}.>",
        "stream": rig.stream,
        "durable": rig.durable,
        "dead_letters": f"{rig.dead}.x",
    },
    "redis": lambda rig: {
        "type": "redis",
        "url": f"redis://{rig.server.address}/0",
        "stream": rig.stream,
        "group": rig.group,
        "dead_letters": f"{rig.stream}.dead",
    },
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def eventually(done):
    """Wait for what happens; what `done` gave last."""
    deadline = time.monotonic() + LIMIT
    while not (found := done()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found
    return found


def stats(name, kind="exporters"):
    """What a component of the service counts."""
    shown = OpsClient(Path("ops.sock").resolve()).json("/stats")[kind]
    return next(each["stats"] for each in shown if each["name"] == name)


def rows(*numbers):
    return [json.dumps({"n": each}).encode() for each in numbers]


@pytest.mark.parametrize("name", RIGS)
def test_each_broker_leads_into_a_table_from_a_file(request, name):
    """All messages of two runs are in the table once; what can't be decoded is a dead letter; nothing is left."""
    server, make = RIGS[name]
    rig = make(request.getfixturevalue(server))
    asyncio.run(rig.prepare())
    source = {**SOURCES[name](rig), "decode": "json", "to": "table"}
    text = SERVED + (
        f"sources: {{in: {json.dumps(source)}}}\n"
        "exporters: {table: {sink: db, path: queue, overflow: block, batch: {linger: 5ms}}}\n"
        "sinks: {db: {type: sqlite, path: out.db, table: t}}\n"
    )
    asyncio.run(rig.publish([b"not json", *rows(*range(100))]))
    for run, first in enumerate((0, 100)):
        with Running(text) as service:
            service.until("shop: running 1 source, 1 exporter, 1 sink")
            if run:
                asyncio.run(rig.publish(rows(*range(first, first + 100))))
            eventually(lambda: stats("table")["delivered"] >= 100)
            eventually(lambda run=run: run or stats("in", "consumers")["dead_lettered"])
            service.signal(signal.SIGTERM)
            code, said = service.end()
        assert code == 0, said
        assert "nothing is left undelivered" in said
    with sqlite3.connect("out.db") as database:
        assert sorted(database.execute("SELECT n FROM t")) == [(each,) for each in range(200)]
    assert asyncio.run(rig.unsettled()) == 0
    assert [body for body, _ in asyncio.run(rig.letters())] == [b"not json"]


def test_dead_letters_of_a_running_service_go_back_to_where_they_were_refused(http_server, capsys):
    """While it runs they are listed, put back and delivered."""
    http_server.rules(max_body=0)
    text = SERVED.replace("'unix:ops.sock'", "['unix:ops.sock', 'unix:']") + (
        "queues: {q: {handler: rows}, rows: {exporter: out}}\n"
        "exporters: {out: {sink: web, path: queue, overflow: block}, e: {sink: fed, overflow: block}}\n"
        f"sinks: {{web: {{type: http, url: '{http_server.url}/rows'}}, fed: {{type: code, use: feeds_one}}}}\n"
    )
    with Running(text) as service:
        service.until("shop: running")
        eventually(lambda: stats("out")["dead_lettered"] == 1)
        assert main(["dead-letters", "list", "s.yaml", "--exporter", "out"]) == 0
        assert capsys.readouterr().out.startswith("seq=")
        http_server.rules()
        assert main(["dead-letters", "requeue", "s.yaml", "--exporter", "out"]) == 0
        said = f"1 dead letters put into the queue again, by process {service.process.pid}\n"
        assert capsys.readouterr().out == said
        eventually(lambda: stats("out")["delivered"] == 1)
        service.signal(signal.SIGTERM)
        assert service.end()[0] == 0
    assert [json.loads(each.body) for each in http_server.received()] == [[{"n": 1}]]


def test_an_outage_fills_the_disk_and_nothing_is_lost(redis_server, http_server, tmp_path):
    """HTTP is away, the disk gets full, the service stops with status 3; started again it delivers everything."""
    http_server.stop()
    client = redis.Redis.from_url(f"redis://{redis_server.address}/0", socket_timeout=60)
    client.delete("outage")
    with client.pipeline() as pipe:
        for each in range(4000):
            pipe.xadd("outage", {"data": json.dumps({"n": each, "text": "x" * 1000})})
        pipe.execute()

    def unsettled():
        (group,) = client.xinfo_groups("outage")
        return group["lag"] + group["pending"]

    source = f"{{type: redis, url: 'redis://{redis_server.address}/0', stream: outage, group: g, decode: json, "
    with mounted(tmp_path / "small", "size=2m"):
        Path("token").write_text("t0ken")
        text = SERVED.replace("60s", "3s") + (
            f"sources: {{in: {source}claim_after: 1s, dead_letters: drop, to: out}}}}\n"
            "exporters: {out: {sink: web, path: small/queue, overflow: block, block_timeout: null,\n"
            "    batch: {max_records: 200}, retry: {initial: 50ms, max_delay: 200ms}}}\n"
            f"sinks: {{web: {{type: http, url: '{http_server.url}/rows', token: 'file:token'}}}}\n"
        )
        with Running(text) as service:
            service.until("shop: running 1 source, 1 exporter, 1 sink")
            ops = OpsClient(Path("ops.sock").resolve())
            why = eventually(lambda: [each for each in ops.status()["why"] if "met a full disk" in each])
            assert "free room on the file system, or raise max_bytes" in why[0]
            service.signal(signal.SIGTERM)
            code, said = service.end()
        assert code == 3, said
        assert "records stay on disk, and are sent at the next start" in said
        http_server.start()
        http_server.rules(token="t0ken")
        with Running(text.replace("3s", "60s")) as service:
            service.until("shop: running")
            eventually(lambda: not (unsettled() or stats("out")["records"]))
            service.signal(signal.SIGTERM)
            code, said = service.end()
        assert code == 0, said
        assert "nothing is left undelivered" in said
    assert "t0ken" not in said
    arrived = [row["n"] for each in http_server.received() for row in json.loads(each.body)]
    assert set(arrived) == set(range(4000))
