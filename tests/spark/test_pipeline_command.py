"""`batchqueue run` as a process of its own: Kafka and JDBC, signals, exit status."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import aiokafka
import pytest
from kafka_tools import create, read
from pipeline_parts import rows
from servers import base as servers
from servers import spark_jars

pytestmark = pytest.mark.timeout(1000)

LOCAL = 'spark: {master: "local[2]", conf: {spark.sql.shuffle.partitions: 2}}\n'


@pytest.fixture(scope="session")
def jars():
    try:
        return spark_jars.jars()
    except servers.UnavailableError as error:
        servers.MISSING["Spark with Kafka"] = str(error)
        pytest.skip(str(error))


def start(*arguments, cwd):
    command = [sys.executable, "-m", "batchqueue_async.cli.main", "run", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(*arguments, cwd, code=0):
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, out + err
    return out, err


async def send(kafka, topic, values):
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
        for each in values:
            await producer.send_and_wait(topic, value=each if isinstance(each, bytes) else json.dumps(each).encode())


def test_kafka_with_a_table_by_jdbc_into_sqlite_and_kafka(kafka, jars, tmp_path):
    """Messages are joined with a table, and go into SQLite and, changed, to another topic, each time all there are."""
    for topic in ("pipeline-in", "pipeline-out"):
        asyncio.run(create(kafka, topic, 2))
    with sqlite3.connect(tmp_path / "names.db") as database:
        database.execute("CREATE TABLE names (id INTEGER, name TEXT)")
        database.executemany("INSERT INTO names VALUES (?, ?)", [(0, "even"), (1, "odd")])
    (tmp_path / "pipeline.yaml").write_text(
        f"""\
spark: {{master: "local[2]", conf: {{spark.sql.shuffle.partitions: 2}}, jars: {[str(jar) for jar in jars]}}}
sources:
  messages: {{type: kafka, brokers: {kafka.address}, topics: pipeline-in, schema: "id LONG, amount DOUBLE"}}
  names: {{type: jdbc, url: "jdbc:sqlite:names.db", table: names}}
views:
  parsed: {{sql: "SELECT value.id, value.amount FROM messages WHERE value.id IS NOT NULL", store: true}}
  named: {{sql: "SELECT parsed.id, name, amount FROM parsed JOIN names ON parsed.id % 2 = names.id"}}
  marked: {{sql: "SELECT id AS k, amount * 2 AS twice FROM parsed"}}
outputs:
  rows: {{view: named, to: {{type: sqlite, path: out.db, table: named}}}}
  out: {{view: marked, to: {{type: kafka, brokers: {kafka.address}, topic: pipeline-out, key: k}}}}
"""
    )
    for part in (range(6), range(6, 10)):
        asyncio.run(send(kafka, "pipeline-in", [{"id": each, "amount": each / 4} for each in part] + [b"not json"]))
        out, _ = run("pipeline.yaml", "--once", "--picture", "picture.svg", cwd=tmp_path)
        assert "rows: done" in out
        wanted = [(each, "odd" if each % 2 else "even", each / 4) for each in range(part.stop)]
        assert rows(tmp_path / "out.db", "named", "id") == wanted
        found = asyncio.run(read(kafka, "pipeline-out"))
        assert sorted((each.key.decode(), json.loads(each.value)) for each in found) == [
            (str(each), {"k": each, "twice": each / 2}) for each in range(part.stop)
        ]
        assert "behind 0" in out
    assert (tmp_path / "picture.svg").read_text().startswith("<svg ")


NUMBERS = (
    LOCAL
    + """\
sources:
  numbers: {type: rate-micro-batch, rows_per_batch: 10, start: "2026-01-01"}
outputs:
  all: {view: numbers, to: {type: sqlite, path: out.db, table: numbers}}
"""
)


def numbers_in(directory):
    return [value for _, value in rows(directory / "out.db", "numbers", "value")]


def wait_for_more(process, directory, before):
    """Wait until a process has written twenty numbers more."""
    deadline = time.monotonic() + 300
    while len(numbers_in(directory)) < before + 20:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_stops_it_in_order_and_the_end_says_how_it_was(tmp_path):
    (tmp_path / "pipeline.yaml").write_text(NUMBERS)
    for number in (signal.SIGTERM, signal.SIGHUP):
        before = len(numbers_in(tmp_path))
        process = start("pipeline.yaml", cwd=tmp_path)
        wait_for_more(process, tmp_path, before)
        process.send_signal(number)
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, out + err
        assert f"{number.name}: stopping in order" in err
        assert "all: stopped" in out
        found = numbers_in(tmp_path)
        assert found == list(range(len(found)))


def test_a_service_runs_it_and_stops_it_in_order(tmp_path):
    (tmp_path / "pipeline.yaml").write_text(NUMBERS)
    (tmp_path / "service.yaml").write_text(
        """\
service: {drain_timeout: 150s}
observe: {enabled: false}
pipelines: {numbers: {file: pipeline.yaml}}
"""
    )
    process = start("service.yaml", cwd=tmp_path)
    wait_for_more(process, tmp_path, 0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert "nothing is left undelivered" in err
    found = numbers_in(tmp_path)
    assert found == list(range(len(found)))


def test_a_spark_that_dies_ends_it_with_3_and_the_next_run_goes_on(tmp_path):
    (tmp_path / "pipeline.yaml").write_text(
        LOCAL
        + """\
sources:
  numbers: {type: rate-micro-batch, rows_per_batch: 10, start: "2026-01-01"}
outputs:
  all: {view: numbers, to: {type: sqlite, path: out.db, table: numbers}}
timeouts: {stop: 5s}
"""
    )
    process = start("pipeline.yaml", cwd=tmp_path)
    deadline = time.monotonic() + 300
    while len(rows(tmp_path / "out.db", "numbers")) < 20:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (jvm,) = [int(each) for each in children if "java" in Path(f"/proc/{each}/cmdline").read_text()]
    os.kill(jvm, signal.SIGKILL)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 3, out + err
    assert "did not end in order: Spark, which is gone" in out


def test_what_can_not_begin_ends_with_2_and_what_is_undone_with_3(tmp_path):
    """A view that Spark can't analyse; and a table that can't be made, so that its query is given up."""
    source = LOCAL + 'sources: {numbers: {type: rate-micro-batch, rows_per_batch: 10, start: "2026-01-01"}}\n'
    (tmp_path / "wrong.yaml").write_text(
        source + 'views: {v: {sql: "SELECT nothing FROM numbers"}}\noutputs: {o: {view: v, to: {type: console}}}\n'
    )
    _, err = run("wrong.yaml", cwd=tmp_path, code=2)
    assert "batchqueue: pipeline 'wrong': AnalysisException: [UNRESOLVED_COLUMN" in err
    (tmp_path / "dies.yaml").write_text(
        source
        + "outputs: {o: {view: numbers, to: {type: sqlite, path: /proc/none/out.db}}}\n"
        + "restart: {attempts: 1, initial: 10ms}\n"
    )
    out, _ = run("dies.yaml", "--quiet", cwd=tmp_path, code=3)
    assert "o: given up: " in out
