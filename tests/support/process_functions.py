"""Functions that a worker process can import by name."""

from __future__ import annotations

import os
from pathlib import Path


def own_pid() -> int:
    return os.getpid()


def write_pid(batch: list[str]) -> None:
    for name in batch:
        Path(name).write_text(str(os.getpid()))


def spin(batch: list[object]) -> None:
    while batch:
        pass
