"""Functions that a worker process can import by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def own_pid() -> int:
    return os.getpid()


def own_pid_of(_: list[object]) -> int:
    return os.getpid()


def write_pid(batch: list[str]) -> None:
    for name in batch:
        Path(name).write_text(str(os.getpid()))


def spin(batch: list[object]) -> None:
    while batch:
        pass


def exit_on_zero(batch: list[int]) -> None:
    if batch == [0]:
        sys.exit(3)
