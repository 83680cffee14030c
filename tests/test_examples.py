"""Every example runs as its reader would run it, with warnings as errors, and prints what it promises."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import closing, suppress

import pytest
from example_runs import EXAMPLES, run
from kafka_tools import create, read


@pytest.mark.parametrize(
    "name",
    [
        "metrics_l1_l2.py",
        "topn.py",
        "shared_io_pool.py",
        "kafka_exporter.py",
        "postgres_writer.py",
        "opensearch_exporter.py",
        "local_demo.py",
        "clickhouse_exporter.py",
        "kafka_to_postgres.py",
        "rabbitmq_by_type.py",
        "nats_by_customer.py",
        "redis_to_sqlite.py",
    ],
)
def test_help(name, tmp_path):
    lines = run(name, "--help", cwd=tmp_path)
    assert lines[0].startswith(f"usage: {name}")
    assert any("--" in line for line in lines)


def test_metrics_l1_l2(tmp_path):
    lines = run("metrics_l1_l2.py", cwd=tmp_path)
    # 4 x 1.0 + 80 x 0.05 = 8 partitions; unweighted there would be 84
    assert lines[0] == "L1: 84 metrics in 8 partitions"
    # 84 metrics x 3 services x 3 minutes x 20 measurements, merged into one row a metric, service and minute
    assert lines[2:4] == [
        "L1 handled 15120 measurements, refused 0; L2 handled 756 rows",
        "every metric was sent when L1 had nothing to do: True",
    ]
    assert len(lines) == 10
    assert lines[4] == "ServiceCpm cart minute 0: count=20 mean=9.5"


def test_metrics_l1_l2_takes_options(tmp_path):
    lines = run("metrics_l1_l2.py", "--meters", "0", "--minutes", "1", "--each", "2", "--workers", "2", cwd=tmp_path)
    assert lines[0] == "L1: 4 metrics in 4 partitions"
    assert lines[2] == "L1 handled 24 measurements, refused 0; L2 handled 12 rows"


def test_topn(tmp_path):
    lines = run("topn.py", "--count", "500", "--producers", "3", "--size", "2", cwd=tmp_path)
    assert lines[:2] == ["1 worker, 3 partitions", "accepted 4500, handled 4500, left over 0"]
    expected = []
    for kind in ("SlowSql", "SlowCommand", "SlowRequest"):
        items = []
        for seed in range(3):
            randomly = random.Random(f"{kind} {seed}")
            items += [(randomly.randrange(1_000_000), f"{kind} {seed}.{number}") for number in range(500)]
        slowest = sorted(items, reverse=True)[:2]
        expected += [f"{kind}:", *(f"  {place}. {ms} ms  {text}" for place, (ms, text) in enumerate(slowest, 1))]
    assert lines[2:] == expected


def test_shared_io_pool(tmp_path):
    lines = run("shared_io_pool.py", "--count", "300", cwd=tmp_path)
    assert lines[0] == "4 queues on one thread, 2 calls at once"
    names = ("peer-1", "peer-2", "database", "broker")
    assert lines[1:5] == [f"{name}: accepted 300, handled 300, in order: True" for name in names]
    assert lines[5:] == ["calls that ran at once: at most 2", "the thread has ended: True"]


def test_local_demo(tmp_path):
    lines = run("local_demo.py", "--count", "3000", "--seconds", "4", cwd=tmp_path)
    assert any("destination DOWN" in line for line in lines)
    assert lines[-2].startswith("3,000 events accepted, at most ")
    assert lines[-1].startswith("lost: 0; delivered more than once: ")
    assert int(lines[-2].split()[5].replace(",", "")) > 0


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("postgres_writer.py", ("--dsn", "postgresql://127.0.0.1:9/none", "--count", "8"), "Connection refused"),
        ("kafka_exporter.py", ("--bootstrap", "127.0.0.1:9", "--count", "8"), "nobody listens at 127.0.0.1:9"),
    ],
)
def test_a_destination_that_is_away_is_reported_and_the_status_says_so(name, options, said, tmp_path):
    command = [sys.executable, str(EXAMPLES / name), *options, "--wait", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3, done.stderr
    assert said in done.stderr


def test_kafka_exporter(kafka, tmp_path):
    asyncio.run(create(kafka, "example"))
    options = ("--topic", "example", "--count", "500")
    lines = run("kafka_exporter.py", "--bootstrap", kafka.address, *options, "--wait", "60", cwd=tmp_path)
    assert lines[0] == "0 events left by an earlier run, 500 new ones confirmed on disk"
    assert lines[1].startswith("delivered 500 in ")
    by_user = defaultdict(list)
    for message in asyncio.run(read(kafka, "example")):
        by_user[message.key].append(json.loads(message.value)["n"])
    assert len(by_user) == 50
    assert all(numbers == list(range(numbers[0], 500, 50)) for numbers in by_user.values())


def test_rabbitmq_by_type(rabbit_server, tmp_path):
    lines = run("rabbitmq_by_type.py", f"amqp://{rabbit_server.address}/", "--publish", "300", cwd=tmp_path)
    # of 0 to 299, every third is an order, and 99, 199 and 299 can't be decoded
    assert lines[0].startswith("99 orders in ")
    assert ", 198 visits in " in lines[0]
    assert lines[1:] == ["3 to events.dead"]


def test_nats_by_customer(nats_server, tmp_path):
    lines = run("nats_by_customer.py", f"nats://{nats_server.address}", "--publish", "300", cwd=tmp_path)
    # of 1 to 300: 100, 200 and 300 are refused; 1, 51, 101, 151, 201 and 251 fail once
    assert lines == ["297 paid, 3 to dead.orders, 9 calls failed", "each customer's in order: True"]


def test_redis_to_sqlite(redis_server, tmp_path):
    program = [sys.executable, str(EXAMPLES / "redis_to_sqlite.py"), f"redis://{redis_server.address}"]
    database = tmp_path / "readings.db"

    def rows():
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(database)) as found:  # no table yet
            return [body.decode() for (body,) in found.execute("SELECT body FROM readings")]
        return []

    with subprocess.Popen([*program, "--publish", "20000"], cwd=tmp_path) as process:
        while process.poll() is None and not rows():
            time.sleep(0.01)
        process.kill()
    assert rows()
    lines = run("redis_to_sqlite.py", program[2], "--publish", "100", cwd=tmp_path)
    assert lines[0].endswith("0 to readings.dead; 20100 in readings.db")
    assert sorted(rows()) == sorted([*(f"reading {n}" for n in range(20_000)), *(f"reading {n}" for n in range(100))])


def test_opensearch_exporter(opensearch, tmp_path):
    options = ("--url", opensearch.url, "--index", "example", "--count", "300")
    assert run("opensearch_exporter.py", *options, cwd=tmp_path) == ["accepted 300, delivered 300, dead 0"]
    found = opensearch.documents("example").values()
    assert sorted(document["line"] for document in found) == sorted(f"line {number}" for number in range(300))


def test_clickhouse_exporter(clickhouse, tmp_path):
    lines = run("clickhouse_exporter.py", "--url", clickhouse.url, "--count", "300", cwd=tmp_path)
    assert lines[0].startswith(
        "refused 1: PermanentError: table `events`: column 'size' of type UInt32 would change a whole number out of"
    )
    assert lines[1:] == ["accepted 300, delivered 299, dead 1"]
    assert [row["id"] for row in clickhouse.rows("events", "id")] == list(range(299))


def test_postgres_writer(postgres, tmp_path):
    postgres.sql("DROP TABLE IF EXISTS cpm, slow_sql")
    lines = run("postgres_writer.py", "--dsn", postgres.dsn, "--count", "200", cwd=tmp_path)
    refused = [line for line in lines if line.startswith("refused") and "(22021)" in line]
    assert sum(int(line.split()[1].rstrip(":")) for line in refused) == 3
    assert lines[-2:] == ["cpm: accepted 600, delivered 600", "slow_sql: accepted 150, delivered 147"]
    assert postgres.sql("SELECT count(*), min(calls), max(calls) FROM cpm") == ["30|190|199"]
    assert postgres.sql("SELECT count(*) FROM slow_sql") == ["147"]
