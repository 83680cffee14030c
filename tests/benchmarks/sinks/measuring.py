"""Rows of the table: subjects that take turns, and how the sink compares with its bare client in the same turn."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Subject = Callable[[int], Awaitable[float]]


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: what is measured.
        rate: records per second, the median of all turns.
        against: what it is compared with.
        ratio: how many times as fast it is, the median over the turns.
        target: what the ratio is to be at least; None is for information.
    """

    name: str
    rate: float
    against: str
    ratio: float
    target: float | None

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.target is None or self.ratio >= self.target


class Comparison(NamedTuple):
    """A subject is to be so many times as fast as another one."""

    name: str
    against: str
    target: float | None


async def compare(
    subjects: dict[str, Subject], comparisons: list[Comparison], *, turns: int, batches: int
) -> list[Row]:
    """Let the subjects take turns, so that what else the machine does falls on all of them alike."""
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(turns + 1):
        for name, subject in subjects.items():
            rate = await subject(batches if turn else max(1, batches // 10))
            if turn:  # the first turn warms up
                rates[name].append(rate)
    return [
        Row(
            name,
            statistics.median(rates[name]),
            against,
            statistics.median(mine / theirs for mine, theirs in zip(rates[name], rates[against], strict=True)),
            target,
        )
        for name, against, target in comparisons
    ]


async def timed(send: Callable[[int], Awaitable[object]], batches: int, records: int) -> float:
    """Records per second of so many sends, one after the other."""
    await asyncio.sleep(0)
    start = time.perf_counter()
    for number in range(batches):
        await send(number)
    return batches * records / (time.perf_counter() - start)
