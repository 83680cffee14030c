"""The plot: what an item costs in each queue, and how far each target is."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from .report import Outcome

THROUGHPUT_UNIT = "s/item"


def write_plot(path: Path, outcomes: list[Outcome]) -> str | None:
    """Write the plot, or tell why there is none."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no plot: matplotlib is not installed; `make bench` installs the group `bench`"
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    measured = [outcome for outcome in outcomes if outcome.runs and outcome.error is None]
    costly = [outcome for outcome in measured if outcome.row.unit == THROUGHPUT_UNIT]
    checks = [(outcome, verdict) for outcome in measured for verdict in outcome.verdicts]
    if not checks:
        return "no plot: no row was measured"
    bars = sum(len(outcome.runs[0]) for outcome in costly)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(22, 3 + 0.22 * max(bars, len(checks))), layout="constrained", width_ratios=(1.2, 1)
    )
    _costs(left, costly)
    _targets(right, checks)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return None


def _costs(axes: Any, outcomes: list[Outcome]) -> None:
    labels: list[str] = []
    values: list[float] = []
    colours: list[str] = []
    for outcome in outcomes:
        for case in outcome.runs[0]:
            labels.append(f"{outcome.row.name} / {outcome.loop}: {case}")
            values.append(statistics.median(statistics.median(run[case]) for run in outcome.runs) * 1e9)
            ours = case.startswith("batchqueue")
            colours.append("tab:blue" if ours else "tab:gray" if case.startswith("deque") else "tab:orange")
    axes.barh(labels, values, color=colours)
    axes.bar_label(axes.containers[0], fmt="%.0f", padding=3, fontsize=7) if values else None
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xscale("log" if values else "linear")  # no logarithm of nothing: only rows of other units were measured
    axes.set_xlabel("nanoseconds per item, median (logarithmic)")
    axes.set_title("Cost of an item, end to end")
    axes.tick_params(axis="y", labelsize=7)


def _targets(axes: Any, checks: list[tuple[Outcome, Any]]) -> None:
    labels: list[str] = []
    values: list[float] = []
    for _, verdict in checks:
        seen = verdict.ratio if verdict.ratio is not None else verdict.figure
        # the share of the allowed cost that is used: below 1 the target is met, whichever way it is bound
        values.append(verdict.target / seen if verdict.bound == ">=" else seen / verdict.target)
        labels.append(f"{verdict.row} / {verdict.loop}: {verdict.what}")
    axes.barh(labels, values, color=["tab:green" if verdict.met else "tab:red" for _, verdict in checks])
    axes.bar_label(axes.containers[0], fmt="%.2f", padding=3, fontsize=7)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("share of the target used: below 1 is met")
    axes.set_title("Targets")
    axes.tick_params(axis="y", labelsize=7)
