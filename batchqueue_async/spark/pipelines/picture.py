"""A picture of what a pipeline did: rows a second, lag and batch seconds over time, as SVG."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.spark.pipelines.progress import Sample

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#000000")
_WIDTH, _PANEL = 900, 180
_LEFT, _RIGHT, _TOP, _GAP = 80, 20, 50, 45
_TICKS = 4
_DOTS = 60

Point = tuple[float, float]


def draw(title: str, samples: Sequence[Sample]) -> str:
    """The picture of some micro-batches; those without rows count for the time alone.

    Example:
        >>> from batchqueue_async.spark.pipelines.progress import Sample
        >>> draw("demo", [Sample(at=1.0, query="minute", rows=100, seconds=0.5, lag=0.6)])[:38]
        '<svg xmlns="http://www.w3.org/2000/svg'
    """
    names = list(dict.fromkeys(each.query for each in samples))
    panels: list[tuple[str, Callable[[Sample], float]]] = [
        ("rows a second", lambda each: each.rows / max(each.seconds, 0.001)),
        ("lag in seconds", lambda each: each.lag),
        ("batch seconds", lambda each: each.seconds),
    ]
    end = max((each.at for each in samples), default=1.0)
    height = _TOP + len(panels) * (_PANEL + _GAP) + 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">'
    )
    parts = [
        head,
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-size="16">{escape(title)}</text>',
        *_legend(names),
    ]
    for place, (label, value) in enumerate(panels):
        lines = {
            name: [(each.at, value(each)) for each in samples if each.query == name and each.rows] for name in names
        }
        parts += _panel(label, lines, end, _TOP + place * (_PANEL + _GAP))
    parts += [f'<text x="{_WIDTH // 2}" y="{height - 8}" text-anchor="middle">seconds since the start</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _legend(names: Sequence[str]) -> list[str]:
    parts: list[str] = []
    x = _LEFT
    for at, name in enumerate(names):
        colour = _COLOURS[at % len(_COLOURS)]
        parts.append(f'<rect x="{x}" y="32" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="38">{escape(name)}</text>')
        x += 40 + 8 * len(name)
    return parts


def _panel(label: str, lines: dict[str, list[Point]], end: float, top: int) -> list[str]:
    """One chart: its frame, its ticks, a line per query."""
    highest = nice(max((value for points in lines.values() for _, value in points), default=1.0))
    last = nice(end)
    width = _WIDTH - _LEFT - _RIGHT

    def place(point: Point) -> str:
        x = _LEFT + width * point[0] / last
        y = top + _PANEL * (1 - point[1] / highest)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<text x="{_LEFT}" y="{top - 4}" fill="#444444">{label}</text>']
    for tick in range(_TICKS + 1):
        y = top + _PANEL * (1 - tick / _TICKS)
        x = _LEFT + width * tick / _TICKS
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(highest * tick / _TICKS)}</text>'
        )
        anchor = "end" if tick == _TICKS else "middle"
        parts.append(
            f'<text x="{x:.1f}" y="{top + _PANEL + 16}" text-anchor="{anchor}">{_number(last * tick / _TICKS)}</text>'
        )
    for at, points in enumerate(lines.values()):
        colour = _COLOURS[at % len(_COLOURS)]
        path = " ".join(map(place, points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(points) <= _DOTS:
            dots = (place(point).split(",") for point in points)
            parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in dots]
    return parts


def nice(value: float) -> float:
    """The next number that is 1, 2, 4, 5, 8 or 10 times a power of ten, for the end of an axis.

    Example:
        >>> nice(37.0), nice(0.9), nice(0.0)
        (40.0, 1.0, 1.0)
    """
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * 0.999999)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"  # noqa: PLR2004 - digits to show
