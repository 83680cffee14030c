"""Rates from counts: how fast an exporter takes in and delivers, and so when it will be empty or full. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchqueue_async.export.stats import ExporterStats

SPAN = 15.0
"""Seconds over which a rate is smoothed."""
LEAST = 0.2
"""Two looks that are closer than this give no rate of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterRates:
    """What comes in and goes out of an exporter, per second.

    Example:
        >>> rates = ExporterRates(accepted=10.0, settled=30.0, bytes=-2_000.0)
        >>> rates.empty_in(100), rates.full_in(50_000)
        (5.0, inf)

    Attributes:
        accepted: records taken in.
        settled: records delivered, given up or dropped.
        bytes: by how much the bytes of the send queue rise; negative when they fall.
    """

    accepted: float
    settled: float
    bytes: float

    def empty_in(self, records: int) -> float:
        """Seconds until this number of records is settled at these rates; infinite when they rise."""
        if not records:
            return 0.0
        speed = self.settled - self.accepted
        return records / speed if speed > 0 else math.inf

    def full_in(self, room: int) -> float:
        """Seconds until this number of bytes more has come in; infinite when they don't rise."""
        return max(0, room) / self.bytes if self.bytes > 0 else math.inf


class _Exponential:
    """A rate, smoothed: a change counts by 63 % after `SPAN` seconds."""

    __slots__ = ("count", "rate")

    def __init__(self, count: float) -> None:
        self.count = count
        self.rate: float | None = None

    def see(self, count: float, seconds: float) -> None:
        now = (count - self.count) / seconds
        self.count = count
        self.rate = now if self.rate is None else self.rate + (now - self.rate) * (1 - math.exp(-seconds / SPAN))


class RateTracker:
    """Remembers what each exporter had counted when it was last looked at."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, tuple[_Exponential, _Exponential, _Exponential]]] = {}

    def of(self, name: str, stats: ExporterStats, now: float) -> ExporterRates | None:
        """The rates of an exporter; None at the first look."""
        counts = (stats.accepted, stats.accepted + stats.recovered - stats.records, stats.bytes)
        known = self._known.get(name)
        if known is None or stats.accepted < known[1][0].count:
            self._known[name] = (now, (_Exponential(counts[0]), _Exponential(counts[1]), _Exponential(counts[2])))
            return None
        before, rates = known
        if now - before >= LEAST:
            for rate, count in zip(rates, counts, strict=True):
                rate.see(count, now - before)
            self._known[name] = (now, rates)
        accepted, settled, size = (rate.rate for rate in rates)
        if accepted is None or settled is None or size is None:
            return None
        return ExporterRates(accepted=max(0.0, accepted), settled=max(0.0, settled), bytes=size)
