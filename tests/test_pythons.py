"""The script that tests the core with every Python that is found: `make test-all-pythons`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "pythons.py"
# An interpreter of shell: it says its version, makes an environment with itself in it, and tests as it is told to.
INTERPRETER = """#!/bin/sh
echo "$*" >> {log}
case "$1 $2" in
    -c*) echo {version} ;;
    "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m pytest") exit {tests} ;;
    *queue_programs*) exit {chaos} ;;
esac
"""


class Machine:
    """A folder that looks like the project, with a PATH and a pyenv of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log"
        self.path, self.pyenv = root / "path", root / "pyenv"
        (root / ".ci").mkdir()
        self.path.mkdir()
        shutil.copy(SCRIPT, root / ".ci")
        (root / "pyproject.toml").touch()

    def interpreter(self, path: Path, version: str, tests: int = 0, chaos: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(INTERPRETER.format(log=self.log, version=version, tests=tests, chaos=chaos))
        path.chmod(0o755)

    def run(self, *versions: str) -> tuple[int, str, list[str]]:
        """The exit code, what was printed, and what the interpreters were told."""
        environ = {"PATH": f"{self.path}:/usr/bin:/bin", "PYENV_ROOT": str(self.pyenv), "PYTHONPATH": "/elsewhere"}
        command = [sys.executable, str(self.root / ".ci" / "pythons.py"), "--seeds", "7", *versions]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        told = self.log.read_text().splitlines() if self.log.exists() else []
        return done.returncode, done.stdout + done.stderr, [line for line in told if not line.startswith("-c")]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_each_version_has_its_tests_and_its_random_programs(machine):
    machine.interpreter(machine.path / "python3.98", "3.98")
    machine.interpreter(machine.pyenv / "versions" / "3.99.1" / "bin" / "python", "3.99")
    code, out, told = machine.run("3.98", "3.99")
    assert (code, out.splitlines()[-2:]) == (0, ["python 3.98: passed", "python 3.99: passed"])
    assert told[0] == f"-m venv --clear {machine.root}/.venvs/3.98"
    assert told[3:5] == [
        "-m pytest -q tests/queue tests/bridge tests/runtime tests/faults",
        "tests/support/queue_programs.py --seeds 7",
    ]
    assert len(told) == 10


def test_an_environment_is_used_again_until_the_dependencies_change(machine):
    machine.interpreter(machine.path / "python3.98", "3.98")
    machine.run("3.98")
    assert len(machine.run("3.98")[2]) == 7
    stamp = machine.root / ".venvs" / "3.98" / ".installed"
    assert stamp.exists()
    (machine.root / "pyproject.toml").touch()
    os.utime(stamp, (0, 0))
    assert len(machine.run("3.98")[2]) == 12


@pytest.mark.parametrize("failing", ["tests", "chaos"])
def test_one_that_fails_fails_all_and_the_others_run_nevertheless(machine, failing):
    machine.interpreter(machine.path / "python3.98", "3.98", **{failing: 1})
    machine.interpreter(machine.path / "python3.99", "3.99")
    code, out, _ = machine.run("3.98", "3.99")
    assert (code, out.splitlines()[-2:]) == (1, ["python 3.98: FAILED", "python 3.99: passed"])


def test_what_is_missing_is_said_and_is_no_failure(machine):
    machine.interpreter(machine.path / "python3.98", "3.98")
    code, out, _ = machine.run("3.98", "3.99")
    assert code == 0
    assert "python 3.99: not found: no python3.99 on the PATH or among pyenv's versions" in out


def test_none_at_all_is_a_failure(machine):
    assert machine.run("3.99")[0] == 1


def test_a_shim_that_does_not_start_is_passed_over_for_the_newest_version_of_pyenv(machine):
    (machine.path / "python3.99").write_text("#!/bin/sh\nexit 127\n")
    (machine.path / "python3.99").chmod(0o755)
    for patch, tests in ((9, 1), (10, 0)):
        machine.interpreter(machine.pyenv / "versions" / f"3.99.{patch}" / "bin" / "python", "3.99", tests)
    assert machine.run("3.99")[0] == 0


def test_an_interpreter_of_another_version_is_not_taken(machine):
    machine.interpreter(machine.path / "python3.99", "3.98")
    assert "python 3.99: not found" in machine.run("3.99")[1]
