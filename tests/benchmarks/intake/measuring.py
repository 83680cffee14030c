"""Turns of several subjects over the same messages, medians, and a table of ratios."""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Measured(NamedTuple):
    rate: float
    cpu: float  # microseconds of this process per message


class Row(NamedTuple):
    name: str
    rate: float
    cpu: float
    ratio: float
    against: str
    target: float | None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.ratio >= self.target


class Meter:
    """Counts distinct messages; the clock starts with the first."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, 0
        self.done = asyncio.Event()
        self.began = self.ended = self.cpu = 0.0

    def begin(self) -> None:
        self.began, self.cpu = time.perf_counter(), cpu()

    def add(self, number: int = 1) -> None:
        self.seen += number
        if self.seen >= self.count and not self.done.is_set():
            self.ended = time.perf_counter()
            self.cpu = cpu() - self.cpu
            self.done.set()

    def measured(self) -> Measured:
        return Measured(self.count / (self.ended - self.began), 1e6 * self.cpu / self.count)


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def compare(
    subjects: dict[str, Callable[[], Awaitable[Measured]]],
    turns: int,
    against: dict[str, tuple[str, float | None]],
) -> list[Row]:
    """Let the subjects take turns; what each is compared with, and the target of the ratio."""
    found: dict[str, list[Measured]] = {name: [] for name in subjects}
    for _ in range(turns):
        for name, run in subjects.items():
            found[name].append(await run())
    medians = {
        name: Measured(statistics.median(each.rate for each in runs), statistics.median(each.cpu for each in runs))
        for name, runs in found.items()
    }
    rows: list[Row] = []
    for name, measured in medians.items():
        other, target = against.get(name, (name, None))
        rows.append(Row(name, measured.rate, measured.cpu, measured.rate / medians[other].rate, other, target))
    return rows
