"""The table that is printed, and the JSON that is kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import batchqueue_async

from .model import Row, Samples, Verdict, judge, percentile, spread
from .peers import missing_peers

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("batchqueue-async", "uvloop", "anyio", "culsans", "aiologic", "flushq")
HEADINGS = ("row", "what", "loop", "figure", "baseline", "ratio", "target", "met")


@dataclass
class Outcome:
    """All runs of one row on one loop."""

    row: Row
    loop: str
    runs: list[Samples] = field(default_factory=list)
    error: str | None = None

    @property
    def verdicts(self) -> list[Verdict]:
        """The row's checks; none where a run failed."""
        return [] if self.error is not None or not self.runs else judge(self.row, self.loop, self.runs)

    @property
    def noise(self) -> tuple[float, float] | None:
        """The spread of the reference case: between runs, within a run."""
        if self.row.reference is None or self.error is not None or not self.runs:
            return None
        return spread(self.runs, self.row.reference)


def format_value(value: float | None, unit: str) -> str:
    """A figure as a person reads it."""
    if value is None:
        return "-"
    if unit == "s/item":
        return f"{value * 1e9:,.1f} ns"
    if unit == "s":
        return f"{value * 1e6:,.1f} us"
    if unit == "core":
        return f"{value * 100:.3f} %"
    if unit == "bytes":
        return f"{value:,.0f} B"
    return f"{value:,.3f}" if value < 10 else f"{value:,.0f}"


def verdict_table(outcomes: list[Outcome]) -> str:
    """One line for each check."""
    lines = [HEADINGS]
    for outcome in outcomes:
        if outcome.error is not None:
            lines.append((outcome.row.name, f"FAILED: {outcome.error}", outcome.loop, "-", "-", "-", "-", "no"))
        lines += [_verdict_line(verdict) for verdict in outcome.verdicts]
    return _aligned(lines)


def _verdict_line(verdict: Verdict) -> tuple[str, ...]:
    relative = verdict.ratio is not None
    target = f"{verdict.target:g} x" if relative else format_value(verdict.target, verdict.unit)
    return (
        verdict.row,
        verdict.what,
        verdict.loop,
        format_value(verdict.figure, verdict.unit),
        format_value(verdict.reference, verdict.unit),
        f"{verdict.ratio:.2f} x" if verdict.ratio is not None else "-",
        f"{verdict.bound} {target}",
        "yes" if verdict.met else "NO",
    )


def case_table(outcome: Outcome) -> str:
    """Every case of a row: the median, its range over the runs, and how it stands to the reference."""
    lines: list[tuple[str, ...]] = [("case", "median", "p99", "runs' medians", "x reference")]
    reference = outcome.row.reference
    for case in outcome.runs[0]:
        medians = [statistics.median(run[case]) for run in outcome.runs]
        pooled = [sample for run in outcome.runs for sample in run[case]]
        unit = outcome.row.unit if "load" not in case.partition(": ")[2] else "ratio"
        lines.append(
            (
                case,
                format_value(statistics.median(medians), unit),
                format_value(percentile(pooled, 99), unit),
                f"{format_value(min(medians), unit)} to {format_value(max(medians), unit)}",
                _against(outcome, case, reference),
            )
        )
    return _aligned(lines)


def _against(outcome: Outcome, case: str, reference: str | None) -> str:
    if reference is None:
        return "-"
    pairs = [(statistics.median(run[case]), statistics.median(run[reference])) for run in outcome.runs]
    if not all(denominator for _, denominator in pairs):
        return "-"
    return f"{statistics.median(numerator / denominator for numerator, denominator in pairs):.2f} x"


def noise_lines(outcomes: list[Outcome]) -> list[str]:
    """How far the machine itself moved: no difference smaller than this means anything."""
    lines: list[str] = []
    for outcome in outcomes:
        if (noise := outcome.noise) is not None:
            between, within = noise
            lines.append(
                f"  {outcome.row.name} on {outcome.loop}: {outcome.row.reference!r} differs by {between:.0%} "
                f"between runs, by {within:.0%} within a run (p10 to p90)"
            )
    return lines


def as_json(outcomes: list[Outcome], **settings: object) -> dict[str, Any]:
    """Everything measured, with what is needed to judge it later."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version,
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "accelerated": batchqueue_async.accelerated,
        "gc": "enabled, collected before each case's turn",
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "missing_peers": missing_peers(),
        "settings": settings,
        "rows": [_outcome_json(outcome) for outcome in outcomes],
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    noise = outcome.noise
    return {
        "name": outcome.row.name,
        "title": outcome.row.title,
        "loop": outcome.loop,
        "unit": outcome.row.unit,
        "reference": outcome.row.reference,
        "error": outcome.error,
        "noise": None if noise is None else {"between_runs": noise[0], "within_run": noise[1]},
        "checks": [verdict.as_json() for verdict in outcome.verdicts],
        "runs": outcome.runs,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the results, readable by a person too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _aligned(lines: list[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
