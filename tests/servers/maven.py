"""What servers in Java share: a Java that is new enough, and jars from the cache or through Maven."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from . import base

if TYPE_CHECKING:
    from pathlib import Path

OLDEST_JAVA = 17

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>batchqueue.tests</groupId><artifactId>{name}</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>
  </dependencies>
</project>
"""


def java() -> str:
    """A Java that is new enough."""
    found = shutil.which("java")
    if found is None:
        raise base.UnavailableError(f"there is no java on the PATH; it needs Java {OLDEST_JAVA}")
    told = subprocess.run([found, "-XshowSettings:properties", "-version"], capture_output=True, text=True, check=True)
    (version,) = [line.split("=")[1] for line in told.stderr.splitlines() if "java.specification.version" in line]
    if float(version) < OLDEST_JAVA:
        raise base.UnavailableError(f"{found} is Java {version.strip()}; it needs Java {OLDEST_JAVA}")
    return found


def jars(group: str, artifact: str, version: str, name: str = "") -> Path:
    """An artifact's jars with all that they need, from the cache or through Maven."""
    name = name or artifact
    directory = base.CACHE / f"{name}-{version}"
    with base.lock(name):
        if directory.is_dir():
            return directory
        maven = shutil.which("mvn")
        if maven is None:
            base.apt_install("maven")
            maven = "mvn"
        work = base.CACHE / f"{name}-download"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        (work / "pom.xml").write_text(POM.format(name=name, group=group, artifact=artifact, version=version))
        copy = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={work / 'jars'}")
        done = subprocess.run([maven, "-q", "-B", *copy], cwd=work, capture_output=True, text=True, check=False)
        if done.returncode:
            raise base.UnavailableError(f"Maven cannot resolve {group}:{artifact}:{version}")
        (work / "jars").rename(directory)
        shutil.rmtree(work)
    return directory
