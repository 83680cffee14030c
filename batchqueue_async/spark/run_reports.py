"""What the commits on the executors' side did, for the driver's listeners: totals of each run of a query, in a file.

Spark runs a commit in a process of its own, which has no way to the driver's Python but the machine that they share.
Each run has one such process at a time. A file is small, is replaced as a whole, and is of interest while its query
runs; one that nobody has changed for a week goes.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from batchqueue_async._support import log

if TYPE_CHECKING:
    from collections.abc import Iterable

_OLD = 7 * 24 * 3600.0
_OWNER = 0o700


class RunReport(msgspec.Struct, frozen=True):
    """What was committed in one run of a query.

    Example:
        >>> RunReport(rows=2, batches=1) + RunReport(dead_rows=1)
        RunReport(batches=1, rows=2, skipped=0, skipped_rows=0, dead_rows=1)

    Attributes:
        batches: batches that were published.
        rows: rows in them.
        skipped: batches that had been in before.
        skipped_rows: rows in them.
        dead_rows: rows that were given to the dead letters.
    """

    batches: int = 0
    rows: int = 0
    skipped: int = 0
    skipped_rows: int = 0
    dead_rows: int = 0

    def __add__(self, other: RunReport) -> RunReport:
        return RunReport(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


def directory() -> Path:
    """Where this user's reports are."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"batchqueue-spark-{user}"


def add_report(run: str, report: RunReport) -> None:
    """Add what one commit did. It is information: a report that can't be written fails no batch."""
    try:
        home = _own(directory())
        path = _path(home, run)
        if not path.exists():
            _prune(home)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(report_of(run) + report))
        fresh.replace(path)
    except (OSError, ValueError) as error:
        log.warning("spark_report_failed", run=run, **log.describe(error))


def report_of(run: str) -> RunReport:
    """What was committed in a run so far."""
    with suppress(OSError, ValueError, msgspec.DecodeError):
        return msgspec.json.decode(_path(_own(directory(), make=False), run).read_bytes(), type=RunReport)
    return RunReport()


def total_of(runs: Iterable[str]) -> RunReport:
    """What was committed in several runs."""
    return sum(map(report_of, runs), RunReport())


def _path(home: Path, run: str) -> Path:
    if not run.replace("-", "").isalnum():
        raise ValueError("the run's id is not one of Spark's")
    return home / f"{run}.json"


def _own(home: Path, *, make: bool = True) -> Path:
    """The directory, if it is this user's alone: its name is known to everyone."""
    if make:
        home.mkdir(mode=_OWNER, exist_ok=True)
    found = home.lstat()
    mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    if not stat.S_ISDIR(found.st_mode) or not mine or found.st_mode & 0o077:
        raise ValueError(f"{home} must be a directory of this user with mode 0700; remove it")
    return home


def _prune(home: Path) -> None:
    for path in home.iterdir():
        with suppress(FileNotFoundError):  # another process removed it
            if time.time() - path.stat().st_mtime > _OLD:
                path.unlink()
