"""A log line for records that a limit has dropped: at once for the first, then one a minute for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async._support import log

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from pathlib import Path

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
