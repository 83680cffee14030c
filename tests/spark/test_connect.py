"""With a real Spark Connect server: what works there, and the error that says why something does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import SPARK_HOME, kill
from servers.base import free_port

HERE = Path(__file__).parent
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"

pytest.importorskip("grpc", reason="needs pyspark[connect]")
pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server."""
    home, port = tmp_path_factory.mktemp("connect"), free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--class", SERVER, "--master", "local[2]"]
    command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    environment = {**os.environ, "SPARK_HOME": str(SPARK_HOME)}
    log = home / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "spark-internal"],
            env=environment,
            stdout=output,
            stderr=output,
            cwd=home,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        while "Spark Connect server started" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}"
    finally:
        kill(process)


@pytest.fixture(scope="module")
def found(server, tmp_path_factory):
    command = [sys.executable, str(HERE / "connect_client.py"), server, str(tmp_path_factory.mktemp("client"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("what", ["driver batch", "source batch"])
def test_batch_jobs_write_every_row_once(found, what):
    assert found[what]["rows"] == list(range(1_000))


@pytest.mark.parametrize("what", ["source stream", "driver stream", "driver stream again"])
def test_streams_write_every_row_once(found, what):
    assert found[what]["error"] == ""
    rows = found[what]["rows"]
    assert rows == list(range(len(rows)))
    assert len(rows) >= 80


def test_a_stream_goes_on_from_its_checkpoint(found):
    assert len(found["driver stream again"]["rows"]) > len(found["driver stream"]["rows"])


def test_exactly_once_without_a_name_of_the_query_is_refused(found):
    assert found["driver stream without a name"]["rows"] == []
    assert "ConfigError" in found["driver stream without a name"]["error"]
    assert "give DriverSink(..., source='a name of the query')" in found["driver stream without a name"]["error"]
