"""The jars that a Spark of the tests loads for Kafka and for SQLite by JDBC, resolved with Maven."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from . import base

if TYPE_CHECKING:
    from pathlib import Path

KAFKA = "4.2.0"
# The tokens of Kerberos are of no use here, and not every version of theirs is published everywhere.
TOKENS = "4.0.0"
SQLITE = "3.50.3.0"

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>batchqueue.tests</groupId><artifactId>spark-jars</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.spark</groupId><artifactId>spark-sql-kafka-0-10_2.13</artifactId><version>{KAFKA}</version>
      <exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>
    </dependency>
    <dependency>
      <groupId>org.apache.spark</groupId><artifactId>spark-token-provider-kafka-0-10_2.13</artifactId>
      <version>{TOKENS}</version>
      <exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>
    </dependency>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-clients</artifactId><version>3.9.1</version>
      <exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>
    </dependency>
    <dependency>
      <groupId>org.apache.commons</groupId><artifactId>commons-pool2</artifactId><version>2.12.1</version>
    </dependency>
    <dependency><groupId>org.xerial</groupId><artifactId>sqlite-jdbc</artifactId><version>{SQLITE}</version>
      <exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>
    </dependency>
  </dependencies>
</project>
"""


def jars() -> list[Path]:
    """The jars, from the cache or through Maven."""
    directory = base.CACHE / f"spark-jars-{KAFKA}-{SQLITE}"
    with base.lock("spark-jars"):
        if not directory.is_dir():
            _resolve(directory)
    return sorted(directory.glob("*.jar"))


def _resolve(directory: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        base.apt_install("maven")
        maven = "mvn"
    work = base.CACHE / "spark-jars-download"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "pom.xml").write_text(POM)
    copy = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={work / 'jars'}")
    done = subprocess.run([maven, "-q", "-B", *copy], cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise base.UnavailableError(f"Maven cannot resolve org.apache.spark:spark-sql-kafka-0-10_2.13:{KAFKA}")
    (work / "jars").rename(directory)
    shutil.rmtree(work)
