"""The compiled hot path under sanitizers, and the wheels that have it.

python3 .ci/native.py sanitize .venv/bin/python 60    build with ASan and UBSan; run the tests, then a minute of fuzz
python3 .ci/native.py wheels 3.11 3.12                a wheel for each Python that is found, into dist/
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pythons

ROOT = Path(__file__).parents[1]
PARTS = ("batchqueue_async", ".ci", "tests", "README.md", "LICENSE", "pyproject.toml")
TESTS = ("tests/_native", "tests/bridge/test_bridge_producing.py", "tests/queue/test_producing.py")


def sanitize(python: str, seconds: str) -> int:
    """Build a copy of the project with the sanitizers, and try it: the environment's own build stays as it is."""
    python = str(Path(python).absolute())  # not resolved: the link is what makes it the environment's
    libraries = [runtime_of(name) for name in ("libasan.so", "libubsan.so")]
    with tempfile.TemporaryDirectory() as scraps:
        copy = Path(scraps, "project")
        copy.mkdir()
        for part in PARTS:
            source = ROOT / part
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(source, copy / part, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
        build = {**os.environ, "BATCHQUEUE_SANITIZE": "1", "BATCHQUEUE_NO_EXTENSIONS": "0"}
        wheels = Path(scraps, "wheels")
        command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, copy]
        subprocess.run(command, env=build, check=True)
        target = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", Path(scraps, "site")]
        subprocess.run([*target, *wheels.iterdir()], check=True)
        shutil.rmtree(copy / "batchqueue_async")
        run = {
            **os.environ,
            "LD_PRELOAD": " ".join(libraries),
            # CPython keeps much until its end: what the hot path leaks is for the tests that count blocks of memory.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": os.pathsep.join([str(Path(scraps, "site")), str(copy / "tests" / "support")]),
        }
        fuzz = [python, "tests/_native/hostile.py", "--seconds", seconds]
        tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=600", *TESTS]
        codes = [subprocess.run(each, cwd=copy, env=run, check=False).returncode for each in (fuzz, tests)]
    return int(any(codes))


def runtime_of(name: str) -> str:
    """Where gcc has a sanitizer's library, which must be there before the interpreter begins."""
    told = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)  # noqa: S607 - the compiler that PATH finds
    return told.stdout.strip()


def wheels(versions: list[str]) -> int:
    """A wheel for each version that is found; one without the extension is an error."""
    built = 0
    for version in versions:
        interpreter = pythons.find(version)
        if interpreter is None:
            pythons.say(f"python {version}: not found")
            continue
        python = pythons.environment(version, interpreter)
        build = {**os.environ, "BATCHQUEUE_NO_EXTENSIONS": "0"}
        command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
        subprocess.run(command, cwd=ROOT, env=build, check=True)
        built += 1
    pythons.say(f"{built} wheels in dist/")
    return 0 if built else 1


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    sys.exit(sanitize(*rest) if what == "sanitize" else wheels(rest))
