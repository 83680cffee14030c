"""What a pipeline is doing, on a terminal: a table that stays in its place, or a line per query every few seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.spark.pipelines.progress import QueryProgress
    from batchqueue_async.spark.pipelines.supervisor import PipelineRun

_HEAD = ("query", "state", "batches", "rows", "rows/s", "batch", "lag", "behind", "late", "written", "skipped", "dead")
_LIVE = 0.5


class Display:
    """Shows a run: `watch` is what `SparkPipeline.run` calls."""

    def __init__(
        self,
        out: TextIO,
        *,
        live: bool | None = None,
        every: float = 5.0,
        footer: Callable[[Sequence[QueryProgress]], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Say where to show it.

        Args:
            out: the terminal or file.
            live: whether to show a table in its place; None: if `out` is a terminal.
            every: seconds between the lines where it is not.
            footer: one more line, such as a progress bar.
            clock: the time.
        """
        self._out = out
        self._live = out.isatty() if live is None else live
        self._every = _LIVE if self._live else every
        self._footer = footer
        self._clock = clock
        self._began = clock()
        self._shown: float | None = None
        self._height = 0

    def watch(self, run: PipelineRun) -> bool:
        """Show what there is if it is time; False, so that the run goes on."""
        now = self._clock()
        if run.is_over or self._shown is None or now - self._shown >= self._every:
            self._shown = now
            self.show(run.queries())
        return False

    def show(self, queries: Sequence[QueryProgress]) -> None:
        """Show some queries now."""
        seconds = self._clock() - self._began
        footer = self._footer(queries) if self._footer is not None else ""
        if not self._live:
            lines = [line(each, seconds) for each in queries]
            self._out.write("".join(f"{each}\n" for each in [*lines, *([footer] if footer else [])]))
        else:
            lines = [*table(queries), footer or f"{seconds:.0f} s; Ctrl-C stops in order"]
            up = f"\x1b[{self._height}F" if self._height else ""
            self._out.write(up + "".join(f"\x1b[2K{each}\n" for each in lines))
            self._height = len(lines)
        self._out.flush()


def _cells(each: QueryProgress) -> tuple[str, ...]:
    state = f"{each.state} ({each.restarts} restarts)" if each.restarts else each.state
    behind = "" if each.behind is None else f"{each.behind:,.0f}"
    return (
        each.name,
        state,
        f"{each.batches:,}",
        f"{each.rows:,}",
        f"{each.rate:,.0f}",
        f"{each.batch_seconds:.1f} s",
        f"{each.lag:.1f} s",
        behind,
        f"{each.late:,}",
        f"{each.written:,}",
        f"{each.skipped:,}",
        f"{each.dead:,}",
    )


def table(queries: Sequence[QueryProgress]) -> list[str]:
    r"""The queries as the lines of a table.

    Example:
        >>> from batchqueue_async.spark.pipelines.progress import QueryProgress
        >>> print(*table([QueryProgress(name="minute", state="running", batches=2, rows=80_000)]), sep="\n")
        query   state    batches    rows  rows/s  batch    lag  behind  late  written  skipped  dead
        minute  running        2  80,000       0  0.0 s  0.0 s             0        0        0     0
    """
    rows = [_HEAD, *(_cells(each) for each in queries)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    left = 2  # the columns of words, the others are numbers
    return [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def line(each: QueryProgress, seconds: float) -> str:
    """One query in a line, for files and for terminals of programs.

    Example:
        >>> from batchqueue_async.spark.pipelines.progress import QueryProgress
        >>> line(QueryProgress(name="minute", state="running", batches=2, rows=80_000, lag=1.5, dead=3), 12.0)
        '  12 s  minute: running, 2 batches, 80,000 rows (0/s), batch 0.0 s, lag 1.5 s, written 0, dead 3'
    """
    parts = [
        f"{each.batches:,} batches",
        f"{each.rows:,} rows ({each.rate:,.0f}/s)",
        f"batch {each.batch_seconds:.1f} s",
        f"lag {each.lag:.1f} s",
        f"written {each.written:,}",
    ]
    if each.behind is not None:
        parts.append(f"behind {each.behind:,.0f}")
    counts = {"late": each.late, "skipped": each.skipped, "dead": each.dead, "restarts": each.restarts}
    parts += [f"{name} {count:,}" for name, count in counts.items() if count]
    if each.error and each.state in {"waiting", "failed"}:
        parts.append(each.error)
    return f"{seconds:4.0f} s  {each.name}: {each.state}, {', '.join(parts)}"


def bar(share: float, width: int = 30) -> str:
    """A progress bar.

    Example:
        >>> bar(0.5, 10)
        '[#####-----]  50 %'
    """
    share = min(max(share, 0.0), 1.0)
    full = round(share * width)
    return f"[{'#' * full}{'-' * (width - full)}] {share * 100:3.0f} %"
