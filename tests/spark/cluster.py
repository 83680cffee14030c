"""A standalone Spark cluster on this machine: a master and two workers, as processes of the tests.

The workers have addresses of their own, since Spark starts no speculative copy of a task on the host of the task.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyspark
from servers.base import free_port

SPARK_HOME = Path(pyspark.__file__).parent
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"


def children(pid: int) -> list[int]:
    """The processes below a process, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name_and_rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        if int(name_and_rest[2].split()[1]) == pid:
            child = int(stat.parent.name)
            found += [child, *children(child)]
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those below it, unless it has ended."""
    if process.poll() is not None:
        return
    for pid in [process.pid, *children(process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(30)


class Cluster:
    def __init__(self, home: Path, workers: int = 2) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"spark://127.0.0.1:{self.port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        web = str(free_port())
        self._start("master", MASTER, "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", web)
        self._wait_for("master", r"I have been elected leader|New state: ALIVE", 1)
        for number in range(workers):
            host = f"127.0.0.{number + 1}"
            options = ["--host", host, "--webui-port", str(free_port()), "--cores", "1", "--memory", "1g"]
            self._start(
                f"worker{number}", WORKER, *options, "--work-dir", str(home / f"work{number}"), self.url, host=host
            )
        self._wait_for("master", r"Registering worker", workers)

    def _start(self, name: str, *command: str, host: str = "127.0.0.1") -> None:
        environment = {
            **os.environ,
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": host,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_LOG_DIR": str(self.home),
        }
        with (self.home / f"{name}.log").open("wb") as log:
            spark_class = str(SPARK_HOME / "bin" / "spark-class")
            process = subprocess.Popen(
                [spark_class, *command], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)

    def _wait_for(self, name: str, pattern: str, times: int) -> None:
        deadline = time.monotonic() + 300
        path = self.home / f"{name}.log"
        while len(re.findall(pattern, path.read_text(errors="replace"))) < times:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not start:\n{path.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)

    def executors(self) -> list[int]:
        """The processes of executor JVMs."""
        below = {pid for process in self.processes for pid in children(process.pid)}
        return sorted(pid for pid in below if "CoarseGrainedExecutorBackend" in command_line(pid))

    def stop(self) -> None:
        for process in reversed(self.processes):
            kill(process)
        for work in self.home.glob("work*"):
            shutil.rmtree(work, ignore_errors=True)
