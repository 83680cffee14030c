"""Log lines for what is lost or repaired.

For records that a limit has dropped, at once for the first, then one a minute for the others; and for each repair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async._support import log

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from pathlib import Path

    from batchqueue_async.durable.disk.recovery import RecoveryReport

_EVERY = 60.0


class LossLog:
    """Compares the counts of dropped records with those that were logged last. On the loop, after each round."""

    def __init__(self, dropped: Counter[str], path: Path, clock: Callable[[], float]) -> None:
        self._dropped = dropped
        self._path = path
        self._clock = clock
        self._logged: dict[str, int] = {}
        self._quiet_until = float("-inf")

    def look(self, *, last: bool = False) -> None:
        """Log what was dropped since the last line; `last`: without waiting for the minute to be over."""
        if self._dropped == self._logged or (not last and self._clock() < self._quiet_until):
            return
        new = {reason: count - self._logged.get(reason, 0) for reason, count in self._dropped.items()}
        new = {reason: count for reason, count in new.items() if count}
        self._logged = dict(self._dropped)
        self._quiet_until = self._clock() + _EVERY
        if new:
            log.warning("durable_records_dropped", path=str(self._path), **new)


def log_report(directory: Path, report: RecoveryReport) -> None:
    """A log line for everything that opening has repaired, set aside or left alone."""
    path = str(directory)
    for words in report.repairs:
        if not words.startswith("write queue.id") or report.segments:
            log.info("durable_repaired", path=path, repair=words)
    for words in report.failed_repairs:
        log.error("durable_repair_failed", path=path, repair=words)
    for name in report.quarantined:
        log.error("durable_quarantined", path=path, name=name)
    for name in report.strays:
        log.warning("durable_stray_file", path=path, name=name)
    for name in report.unreadable:
        log.error("durable_segment_unreadable", path=path, name=name)
    if report.damaged_records or report.torn_records:
        log.error("durable_records_damaged", path=path, records=report.damaged_records, torn=report.torn_records)
