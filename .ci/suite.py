"""Run the whole test suite in parts, three at a time, and check the coverage of all of them together: `make unit`.

.venv/bin/python .ci/suite.py [--jobs 3] [--only PART] [--no-gate]

The parts share nothing but the machine: each has its own servers, ports and directories. A part's output is shown when
it has ended; the exit code is 1 if any failed, or if the coverage is below the gate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
CORE = ("queue", "bridge", "runtime", "_native")
# The longest first, and many, so that no processor waits long for the others at the end. What no part names belongs
# to `rest`, so that a new folder is tested without being named here.
FOLDERS = {
    "faults": ("faults",),
    "spark": ("spark",),
    "sinks": ("sinks", "intake"),
    "rest": (),
    "core": (*CORE, "_support"),
    "durable": ("durable", "benchmarks"),
}
PARTS = (*FOLDERS, "pure")
NO_TESTS = ("typing", "golden", "support", "soak", "__pycache__")
# Debian's packages of the servers: the tests install what is missing too, but each within the time of one test.
PACKAGES = {
    "initdb": "postgresql",
    "rabbitmq-server": "rabbitmq-server",
    "redis-server": "redis-server",
    "nats-server": "nats-server",
    "prometheus": "prometheus",
    "clickhouse-server": "clickhouse-server",
    "chromium": "chromium",
    "mvn": "maven",
}
PLACES = ("/usr/sbin", "/usr/lib/postgresql/15/bin")


def paths(part: str) -> list[str]:
    """What pytest is given for a part."""
    if part == "pure":
        return [f"tests/{name}" for name in CORE]
    if part != "rest":
        return [f"tests/{name}" for name in FOLDERS[part]]
    named = {name for names in FOLDERS.values() for name in names}
    folders = [each.name for each in TESTS.iterdir() if each.is_dir() and each.name not in {*named, *NO_TESTS}]
    return [f"tests/{name}" for name in sorted([*folders, *(each.name for each in TESTS.glob("test_*.py"))])]


def run(part: str) -> int:
    """Run a part; show its output when it has ended."""
    began = time.monotonic()
    print(f"{part}: begins", flush=True)
    env = os.environ | {"COVERAGE_FILE": str(ROOT / f".coverage.{part}")}
    if part == "pure":
        env["BATCHQUEUE_PURE"] = "1"
    command = [sys.executable, "-m", "pytest", "--cov", "--cov-report=", "--cov-fail-under=0", "--durations=25"]
    # One cache for each, since two write it at once.
    command += ["-o", f"cache_dir=.pytest_cache/{part}", *paths(part)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    minutes = (time.monotonic() - began) / 60
    print(f"{done.stdout}\n{part}: exit code {done.returncode} after {minutes:.1f} minutes", flush=True)
    return done.returncode


def install_servers() -> None:
    """Install the servers that are missing, where that is possible, in one go."""
    search = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    missing = [package for program, package in PACKAGES.items() if shutil.which(program, path=search) is None]
    apt = shutil.which("apt-get")
    if not missing or apt is None or os.geteuid() != 0:
        return
    print(f"installing {', '.join(missing)}", flush=True)
    policy = Path("/usr/sbin/policy-rc.d")
    mine = not policy.exists()
    if mine:  # Debian asks it before it starts a service; the tests start servers of their own
        policy.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")
        policy.chmod(0o755)
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        # What an earlier installation that was cut off has left would stop this one.
        for command in (
            ["dpkg", "--configure", "-a"],
            [apt, "update", "-q"],
            [apt, "install", "-y", "-q", "--no-install-recommends", *missing],
        ):
            subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    finally:
        if mine:
            policy.unlink(missing_ok=True)


def gate(*, enforce: bool) -> int:
    """Put the parts' coverage together, and compare it with the gate in pyproject.toml."""
    coverage = [sys.executable, "-m", "coverage"]
    files = [str(ROOT / f".coverage.{part}") for part in PARTS if (ROOT / f".coverage.{part}").exists()]
    subprocess.run([*coverage, "combine", "-q", *files], cwd=ROOT, check=True)
    report = [*coverage, "report"] if enforce else [*coverage, "report", "--fail-under=0"]
    return subprocess.run(report, cwd=ROOT, check=False).returncode


def main() -> None:
    """Run the parts, then the gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, help="parts at once (%(default)s): they wait for servers a lot")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone, without the gate")
    parser.add_argument("--no-gate", action="store_true", help="report the coverage without comparing it")
    options = parser.parse_args()
    install_servers()
    parts = options.only or PARTS
    for part in parts:
        (ROOT / f".coverage.{part}").unlink(missing_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        codes = dict(zip(parts, pool.map(run, parts), strict=True))
    failed = [part for part, code in codes.items() if code]
    if options.only is None and gate(enforce=not options.no_gate):
        failed.append("coverage")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
