"""One local Spark for all tests that need one: starting it takes longer than most of them.

Where there is no Java, the tests are skipped and the run's last lines say so; with `CI` in the environment they fail.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from servers import base as servers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
# The workers import the sinks of these tests from here.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
sys.path.insert(0, str(HERE))

HAS_JAVA = subprocess.run([sys.executable, str(ROOT / ".ci" / "java.py"), "--check"], check=False).returncode == 0


def pytest_collection_modifyitems(items):
    ours = [item for item in items if item.path.parent == HERE]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))  # the first one starts the Spark of all
    if HAS_JAVA or os.environ.get("CI"):
        return
    for item in ours:
        item.add_marker(pytest.mark.skip(reason="no Java"))
    if ours:
        reason = "it needs Java 17 or newer; as root `make java` installs it, else it says how"
        servers.MISSING["Spark"] = f"{reason} ({len(ours)} tests)"


# --- JVMs


def jvm(flags):
    """Let the JVMs that are started from now on run with these flags: little is compiled well in lives so short."""
    os.environ["JAVA_TOOL_OPTIONS"] = f"-XX:TieredStopAtLevel=1 -Xlog:disable {flags}"


def make_archive(archive, home):
    """Run an example whose JVM writes the archive at its end; a machine that is too busy for that goes without one."""
    fresh = archive.with_suffix(".fresh")
    jvm(f"-XX:ArchiveClassesAtExit={fresh}")
    example = [sys.executable, str(ROOT / "examples" / "spark_rate_to_sqlite.py"), str(home), "60"]
    # A session of its own, because the JVM writes after its Python has ended, and holds the pipes open until then.
    process = subprocess.Popen(example, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    else:
        if process.returncode == 0 and fresh.exists():
            fresh.replace(archive)
    fresh.unlink(missing_ok=True)


@pytest.fixture(scope="session", autouse=True)
def _loaded_classes(request, tmp_path_factory):
    """Start JVMs with an archive of the classes that a Spark loads: it takes a third off each of their many starts."""
    before = os.environ.get("JAVA_TOOL_OPTIONS")
    archive = request.config.cache.mkdir("spark") / f"{pyspark.__version__}.jsa"  # one that does not fit is not used
    if not archive.exists():
        make_archive(archive, tmp_path_factory.mktemp("archive"))
    jvm(f"-XX:SharedArchiveFile={archive}" if archive.exists() else "")
    yield
    if before is None:
        del os.environ["JAVA_TOOL_OPTIONS"]
    else:
        os.environ["JAVA_TOOL_OPTIONS"] = before


# --- sessions


@pytest.fixture(scope="session")
def local_spark():
    from sessions import Local

    local = Local()
    yield local
    local.stop()


@pytest.fixture(scope="module")
def spark(local_spark):
    return local_spark.start()


@pytest.fixture(scope="module")
def spark_free(local_spark):
    """No Spark runs in this process."""
    local_spark.stop()
