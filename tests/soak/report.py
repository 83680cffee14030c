"""The report of a soak: a page of its own with plots, and the slope of a line through points."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WIDTH, HEIGHT = 860, 180
COLOURS = ("#2f6db0", "#b9770e", "#1e8449", "#b03a2e")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line of least squares; 0 for fewer than two points."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def plot(title: str, samples: Sequence[dict[str, float]], names: Sequence[str], faults: Sequence[Any]) -> str:
    """One plot as SVG; faults are vertical lines."""
    last = max((each["t"] for each in samples), default=1.0) or 1.0
    most = max((each[name] for each in samples for name in names), default=1.0) or 1.0
    lines = [
        f'<line x1="{at / last * WIDTH:.1f}" x2="{at / last * WIDTH:.1f}" y1="0" y2="{HEIGHT}" stroke="#ddd"/>'
        for at, *_ in faults
    ]
    for colour, name in zip(COLOURS, names, strict=False):
        points = " ".join(
            f"{each['t'] / last * WIDTH:.1f},{HEIGHT - each[name] / most * HEIGHT:.1f}" for each in samples
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    legend = ", ".join(
        f'<span style="color:{colour}">{html.escape(name)}</span>' for colour, name in zip(COLOURS, names, strict=False)
    )
    return (
        f"<h2>{html.escape(title)}</h2><p>{legend}; the top is {most:,.1f}, the right end {last:,.0f} s</p>"
        f'<svg viewBox="0 -2 {WIDTH} {HEIGHT + 4}" width="{WIDTH}">{"".join(lines)}</svg>'
    )


def write_report(path: Path, verdict: Any) -> None:
    """Write the page."""
    samples, faults = verdict.samples, verdict.faults
    names = sorted({name for each in samples for name in each})
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{verdict.lost[name]:,}</td><td>{verdict.repeated[name]:,}</td></tr>"
        for name in verdict.lost
    )
    struck = "".join(f"<li>{at:.1f} s: {html.escape(name)}: {html.escape(what)}</li>" for at, name, what in faults)
    path.write_text(
        "<!doctype html><meta charset=utf-8><title>Soak</title><style>body{font:15px system-ui;margin:2em}"
        "td,th{padding:0 1em;text-align:right}</style>"
        f"<h1>{'Passed' if verdict.passed else 'FAILED'}: {verdict.accepted:,} events "
        f"in {verdict.minutes:g} minutes</h1>"
        f"<p>Seed {verdict.seed}, {len(faults)} faults, memory {verdict.memory_slope:+.2f} MB per minute, on "
        f"{html.escape(verdict.machine)}.</p>"
        f"<table><tr><th></th><th>lost</th><th>more than once</th></tr>{rows}</table>"
        + plot("Memory, MB", samples, ["rss"], faults)
        + plot("Records that wait", samples, [name for name in names if name.endswith(" waiting")], faults)
        + plot("Records delivered", samples, [name for name in names if name.endswith(" delivered")], faults)
        + f"<h2>Faults</h2><ol>{struck}</ol>",
        encoding="utf-8",
    )
