"""A Spark of its own that reads Delta and Iceberg: what these publish for Spark is a version or two behind PySpark."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from servers import base
from servers.maven import java

SPARK, DELTA, ICEBERG = "4.1.1", "4.4.0", "1.12.0"
PROGRAM = Path(__file__).with_name("Read.java")
# What Spark's own scripts give to Java 17.
OPENED = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util"),
    *("java.util.concurrent", "java.util.concurrent.atomic", "sun.nio.ch", "sun.nio.cs", "sun.security.action"),
    "sun.util.calendar",
)
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>batchqueue.tests</groupId><artifactId>lake-jars</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.spark</groupId><artifactId>spark-sql_2.13</artifactId><version>{SPARK}</version>
      <exclusions>
        <exclusion><groupId>org.rocksdb</groupId><artifactId>rocksdbjni</artifactId></exclusion>
      </exclusions>
    </dependency>
    <dependency>
      <groupId>io.delta</groupId><artifactId>delta-spark_4.1_2.13</artifactId><version>{DELTA}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.iceberg</groupId>
      <artifactId>iceberg-spark-runtime-4.1_2.13</artifactId><version>{ICEBERG}</version>
    </dependency>
  </dependencies>
</project>
"""


def jars() -> Path:
    """The directory of the jars, from the cache or through Maven."""
    directory = base.CACHE / f"lake-jars-{SPARK}-{DELTA}-{ICEBERG}"
    with base.lock("lake-jars"):
        if not directory.is_dir():
            _resolve(directory)
    return directory


def _resolve(directory: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        base.apt_install("maven")
        maven = "mvn"
    work = base.CACHE / "lake-jars-download"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "pom.xml").write_text(POM)
    copy = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={work / 'jars'}")
    done = subprocess.run([maven, "-q", "-B", *copy], cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise base.UnavailableError(f"Maven cannot resolve Delta {DELTA} and Iceberg {ICEBERG} for Spark {SPARK}")
    (work / "jars").rename(directory)
    shutil.rmtree(work)


class Lake:
    """Reads tables, each time in a process of its own."""

    def start(self) -> None:
        """Have what it takes."""
        self._java = java()
        self._jars = jars()

    def read(self, **tables: str) -> dict[str, list[dict[str, Any]]]:
        """The rows of tables: by the format, each with its place."""
        options = ["-Xmx768m", "-Xss16m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED]
        named = [word for pair in tables.items() for word in pair]
        command = [self._java, *options, *opened, "-cp", f"{self._jars}/*", str(PROGRAM), *named]
        # The options of the tests' other JVMs name an archive of classes that is not this one's.
        environment = {name: value for name, value in os.environ.items() if name != "JAVA_TOOL_OPTIONS"}
        environment |= {"SPARK_LOCAL_IP": base.HOST}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=environment)
        if done.returncode:
            raise RuntimeError(f"Spark {SPARK} ended with {done.returncode}: {done.stderr[-3000:]}")
        found: dict[str, list[dict[str, Any]]] = {}
        for line in done.stdout.splitlines():
            if line.startswith("# "):
                rows = found.setdefault(line[2:], [])
            elif line.startswith("{"):
                rows.append(json.loads(line))
        return found
