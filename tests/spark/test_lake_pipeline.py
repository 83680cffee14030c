"""Delta and Iceberg as the targets of a pipeline, by Spark's own writers and with their jars."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from servers import base as servers
from servers import lake


@pytest.mark.timeout(900)  # the jars are a few hundred megabytes, the first time
def test_a_pipeline_writes_delta_and_iceberg_exactly(tmp_path):
    servers.provide("Delta and Iceberg in Spark", lake.Lake)
    home = tmp_path / "spark"  # the Spark that their jars are for, started by PySpark's scripts
    shutil.copytree(Path(pyspark.__file__).parent / "bin", home / "bin")
    (home / "jars").symlink_to(lake.jars())
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_TOOL_OPTIONS"}
    environment |= {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": servers.HOST,
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
    }
    program = Path(__file__).with_name("lake_pipeline.py")
    command = [sys.executable, str(program), str(tmp_path / "pipeline")]
    (tmp_path / "pipeline").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {name: [*range(60)] for name in ("delta", "both", "iceberg")}
