"""Examples, run as their reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPORTED = re.compile(r"; it is tried again$|: takes records again$")
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, cwd: Path) -> list[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    # On a busy machine a server may answer late, which the example reports; it has to be back in the end.
    assert [line for line in done.stderr.splitlines() if not REPORTED.search(line)] == []
    return done.stdout.splitlines()
