"""Run each quick start as a newcomer does, in an environment and a directory of its own, and print what it took.

python3 .ci/quick_starts.py [PAGE ...]     such as `threads otlp`; all that need no server where none is named

The page's own `pip install` is run, with this checkout in place of the published package, then the page's blocks as one
program. Spark's has Java seen to first, which is not timed. Kafka to PostgreSQL needs both servers, and runs until it
is ended: it is left to the tests.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import java
import pythons

ROOT = Path(__file__).parents[1]
PAGES = {
    "README": ROOT / "README.md",
    **{name: ROOT / "docs" / "quick-starts" / f"{name}.md" for name in ("threads", "with-fastapi", "otlp", "spark")},
}
INSTALL = re.compile(r"^pip install (?P<what>[^#\n]+)", re.MULTILINE)
BLOCK = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
NEED_JAVA = frozenset({"spark"})
LIMIT = 1_800


def wanted(page: str) -> list[str]:
    """What the page's first `pip install` names, with this checkout for the package."""
    found = INSTALL.search(page)
    if found is None:
        raise SystemExit("the page has no line `pip install ...`")
    return [re.sub(r"^batchqueue-async", str(ROOT), each) for each in shlex.split(found["what"])]


def program(page: str) -> str:
    """The page's blocks that run by themselves, as one program."""
    return "\n".join(block["code"] for block in BLOCK.finditer(page) if "notest" not in block["info"])


def run(name: str) -> bool:
    """Install and run one page; whether it went well."""
    page = PAGES[name].read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="quick-start-") as made:
        folder = Path(made)
        python = folder / "venv" / "bin" / "python"
        (folder / "program.py").write_text(program(page), encoding="utf-8")
        seconds: list[float] = []
        for command in (
            [sys.executable, "-m", "venv", folder / "venv"],
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted(page)],
            [python, "program.py"],
        ):
            began = time.monotonic()
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT)
            seconds.append(time.monotonic() - began)
            if done.returncode:
                pythons.say(f"{name:14} failed: {shlex.join(map(str, command))}\n{done.stderr[-2_000:]}")
                return False
    pythons.say(
        f"{name:14} {sum(seconds):6.1f} s: environment {seconds[0]:.1f}, install {seconds[1]:.1f}, run {seconds[2]:.1f}"
    )
    return True


def main() -> int:
    """Run the pages that are named."""
    names = sys.argv[1:] or list(PAGES)
    unknown = [name for name in names if name not in PAGES]
    if unknown:
        sys.exit(f"{unknown[0]!r} is not one of {', '.join(PAGES)}\n{__doc__}")
    if NEED_JAVA.intersection(names):
        java.need_java()
    failed = sum(not run(name) for name in names)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
