"""What a row of the benchmark is, and the arithmetic of its verdicts: no clock, no loop, no queue."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# One run of one row: the samples of every case, each sample in the row's unit.
Samples = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything one run measures."""

    burst: int = 10_000  # the default buffer_size, so that a burst just fits into one partition
    stream: int = 30_000  # three times the buffer, so that the producer has to wait
    large_burst: int = 100_000  # for the rows of many types, where 10,000 items are 5 a type
    bursts: int = 12
    large_bursts: int = 3
    fewest_bursts: int = 2
    turn_seconds: float = 0.4  # after so long a slow case's turn ends with its fewest bursts
    warmup: int = 2
    blocks: int = 4  # turns that each case gets in one run, each turn on a fresh loop
    chunk: int = 1_000
    few_types: int = 100
    many_types: int = 2_000
    sparse_items: int = 200
    sparse_interval: float = 0.020
    idle_queues: int = 1_000
    idle_settle: float = 2.0
    idle_window: float = 5.0
    memory_queues: int = 200
    rebalance_settle: float = 4.0
    rebalance_window: float = 6.0
    rebalance_interval: float = 1.0
    rebalance_seconds_per_item: float = 0.0005
    skywalking_items: int = 6_400_000


# Only to see that every row runs: the figures of such a run say nothing.
QUICK = Sizes(
    burst=1_000,
    stream=12_000,
    large_burst=2_000,
    bursts=2,
    large_bursts=1,
    warmup=1,
    blocks=1,
    chunk=100,
    few_types=10,
    many_types=50,
    sparse_items=5,
    sparse_interval=0.005,
    idle_queues=10,
    idle_settle=0.1,
    idle_window=0.1,
    memory_queues=5,
    rebalance_settle=0.4,
    rebalance_window=0.4,
    rebalance_interval=0.1,
    skywalking_items=32_000,
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One target: a case against another case of the same run, or against a number.

    `faster` turns the ratio round: 6.0 then means six times less time than the reference.
    """

    what: str
    subject: str
    bound: str  # "<=", "<" or ">="
    target: float
    reference: str | None = None
    faster: bool = False
    percentile: float = 50.0
    pooled: bool = False  # percentiles over the samples of all runs, instead of the median of the runs' own

    def value(self, runs: Sequence[Samples]) -> float:
        """The figure to hold against the target."""
        if self.reference is None:
            return self.figure(self.subject, runs)
        return statistics.median(self._ratio(run) for run in runs)

    def figure(self, case: str, runs: Sequence[Samples]) -> float:
        """A case's figure over all runs, in the row's unit."""
        if self.pooled:
            return percentile([sample for run in runs for sample in run[case]], self.percentile)
        return statistics.median(percentile(run[case], self.percentile) for run in runs)

    def met(self, value: float) -> bool:
        """Whether the value keeps the bound."""
        if self.bound == "<=":
            return value <= self.target
        if self.bound == "<":
            return value < self.target
        if self.bound == ">=":
            return value >= self.target
        raise ValueError(f"check {self.what!r}: bound {self.bound!r} is none of <=, <, >=")

    def _ratio(self, run: Samples) -> float:
        if self.reference is None:
            raise ValueError(f"check {self.what!r} has no reference, so it has no ratio")
        subject = percentile(run[self.subject], self.percentile)
        reference = percentile(run[self.reference], self.percentile)
        return reference / subject if self.faster else subject / reference


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the issue's table, or a few that are measured together."""

    name: str
    title: str
    unit: str
    reference: str | None  # the case whose spread over the runs is the machine's noise
    measure: Callable[[Sizes, str, int, bool], Samples]  # sizes, loop, run's number, subjects only
    checks: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One printed line: a check with what was seen."""

    row: str
    what: str
    loop: str
    unit: str
    figure: float
    reference: float | None
    ratio: float | None
    bound: str
    target: float
    met: bool
    per_run: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """The verdict as plain values."""
        return asdict(self)


def judge(row: Row, loop: str, runs: Sequence[Samples]) -> list[Verdict]:
    """All checks of one row on one loop."""
    return [_verdict(row, check, loop, runs) for check in row.checks]


def _verdict(row: Row, check: Check, loop: str, runs: Sequence[Samples]) -> Verdict:
    value = check.value(runs)
    relative = check.reference is not None
    return Verdict(
        row=row.name,
        what=check.what,
        loop=loop,
        unit=row.unit,
        figure=check.figure(check.subject, runs),
        reference=check.figure(check.reference, runs) if check.reference is not None else None,
        ratio=value if relative else None,
        bound=check.bound,
        target=check.target,
        met=check.met(value),
        per_run=[check.value([run]) for run in runs],
    )


def percentile(samples: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation between the closest ranks."""
    if not samples:
        raise ValueError("no samples to take a percentile of")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(runs: Sequence[Samples], case: str) -> tuple[float, float]:
    """The machine's noise, seen on one case: between the runs' medians, and within a run (p90 over p10), less 1."""
    medians = [statistics.median(run[case]) for run in runs]
    between = max(medians) / min(medians) - 1 if min(medians) > 0 else 0.0
    within = [percentile(run[case], 90) / percentile(run[case], 10) - 1 for run in runs if percentile(run[case], 10)]
    return between, statistics.median(within) if within else 0.0
