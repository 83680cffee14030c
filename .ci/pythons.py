"""Test the core with every Python that is found: its tests, then random programs, in an environment for each version.

python3 .ci/pythons.py --seeds 20000 3.11 3.12 3.13 3.14

An interpreter is found as `python3.X` on the PATH or among pyenv's versions. Which are missing is said at the end; they
are no failure. The exit code is 1 if anything failed, or if no interpreter was found at all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
VENVS = ROOT / ".venvs"
TESTS = ("tests/queue", "tests/bridge", "tests/runtime", "tests/faults")


def runs(*command: str | Path) -> str | None:
    """What a command prints; None if it is not there or fails."""
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def numbers(path: Path) -> tuple[int, ...]:
    """The version in the name of one of pyenv's folders, so that 3.12.10 comes after 3.12.9."""
    return tuple(int(part) for part in path.name.split(".") if part.isdigit())


def candidates(version: str) -> Iterator[Path]:
    """Where an interpreter of this version may be."""
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    if root := os.environ.get("PYENV_ROOT") or runs("pyenv", "root"):
        for path in sorted(Path(root, "versions").glob(f"{version}.*"), key=numbers, reverse=True):
            yield path / "bin" / "python"


def find(version: str) -> Path | None:
    """An interpreter that starts and is of this version: pyenv's shims are on the PATH for versions that are not."""
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    return next((path for path in candidates(version) if runs(path, "-c", asked) == version), None)


def environment(version: str, interpreter: Path) -> Path:
    """The Python of the version's environment, which is made anew when the dependencies have changed."""
    folder = VENVS / version
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip>=25.1"], check=True)
        subprocess.run([*pip, "--editable", ".", "--group", "test"], cwd=ROOT, check=True)
        stamp.touch()
    return python


def passes(version: str, interpreter: Path, seeds: int) -> bool:
    """Whether the tests and the random programs pass with this interpreter; all of them run in any case."""
    try:
        python = environment(version, interpreter)
    except subprocess.CalledProcessError as error:
        say(f"python {version}: the environment can't be made: {error}")
        return False
    commands = (
        [python, "-m", "pytest", "-q", *TESTS],
        [python, "tests/support/queue_programs.py", "--seeds", str(seeds)],
    )
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    codes: list[int] = []
    for command in commands:
        say(f"python {version}: {' '.join(str(word) for word in command[1:])}")
        codes.append(subprocess.run(command, cwd=ROOT, env=clean, check=False).returncode)
    return not any(codes)


def say(line: str) -> None:
    """Print a line before what a child prints next."""
    print(line, flush=True)


def main() -> int:
    """Run everything with every version, and report on each at the end."""
    parser = argparse.ArgumentParser(description="test the core with every Python that is found")
    parser.add_argument("versions", nargs="+", metavar="3.X")
    parser.add_argument("--seeds", type=int, default=20_000)
    options = parser.parse_args()
    results: dict[str, str] = {}
    for version in options.versions:
        interpreter = find(version)
        if interpreter is None:
            results[version] = f"not found: no python{version} on the PATH or among pyenv's versions"
        else:
            results[version] = "passed" if passes(version, interpreter, options.seeds) else "FAILED"
    for version, result in results.items():
        say(f"python {version}: {result}")
    return 0 if "passed" in results.values() and "FAILED" not in results.values() else 1


if __name__ == "__main__":
    sys.exit(main())
