"""What `batchqueue top` draws: one process with its components, or a table of several. Needs rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from batchqueue_async.cli.commands import plain
from batchqueue_async.observe.words import duration, number, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

COLOURS = {"ok": "green", "degraded": "yellow", "down": "red"}
_NOTHING = "-"
_STYLES = {"": None, **{name: Style.parse(name) for name in ("bold", *COLOURS.values())}}
_SHORTEST_NAME = 8


class Shown(Protocol):
    """A process, as far as it is drawn."""

    name: str
    frame: dict[str, Any] | None
    error: str


def screen(processes: Sequence[Shown]) -> RenderableType:
    """Everything; a process that is alone is shown with its components."""
    if not processes:
        return Text("No process of this user can be asked; waiting for one.")
    if len(processes) == 1 and processes[0].frame is not None:
        return _whole(processes[0].frame)
    table = Columns("process", "state", "up", "in/s", "out/s", "waiting", "oldest", "dead", "lost", "loop lag", "")
    for each in processes:
        frame = each.frame
        if frame is None:
            silent = "does not answer yet" if not each.error else each.error
            table.add_row(plain(each.name), ("?", "red"), *[_NOTHING] * 8, plain(silent))
            continue
        cards = frame["cards"]
        table.add_row(
            str(frame["pid"]),
            _state(frame),
            duration(frame["uptime"]),
            *(_rate(cards[name]) for name in ("in", "out")),
            number(cards["waiting"]),
            _seconds(cards["oldest"]),
            *(_alarming(cards[name]) for name in ("dead", "lost")),
            _seconds(frame["lag"]),
            plain(frame["sentence"]),
        )
    return table


def _whole(frame: Mapping[str, Any]) -> RenderableType:
    """One process: its sentence and numbers, and a table per kind of component."""
    cards = frame["cards"]
    head = Text.assemble(
        (f"process {frame['pid']}", "bold"),
        f"  batchqueue_async {plain(frame['version'])}  up {duration(frame['uptime'])}",
        f"  loop lag {_seconds(frame['lag'])}",
    )
    counts = Text.assemble(
        f"in {_rate(cards['in'])}/s  out {_rate(cards['out'])}/s  waiting {number(cards['waiting'])}",
        f"  oldest {_seconds(cards['oldest'])}  dead ",
        _bad(cards["dead"]),
        "  lost ",
        _bad(cards["lost"]),
    )
    parts: list[RenderableType] = [head, Text(plain(frame["sentence"]), COLOURS[frame["state"]]), counts]
    if frame["queues"]:
        parts += [_queues(frame["queues"]), *_more(frame["more_queues"], "queue")]
    if frame["exporters"]:
        parts += [_exporters(frame["exporters"]), *_more(frame["more_exporters"], "exporter")]
    for name, draw in _SMALL.items():
        if frame[name]:
            parts.append(draw(frame[name]))
    for each in frame["problems"]:
        text = f"{plain(each['component'])} {plain(each['text'])}"
        text += f": {plain(each['detail'])}" if each["detail"] else ""
        text += f". {plain(each['error'])}" if each["error"] else ""
        advice = f". What to do: {plain(each['advice'])}." if each["advice"] else "."
        parts.append(Text.assemble((text, COLOURS[each["state"]]), advice))
    return Group(*parts)


class Columns:
    """A table without lines; its first two columns and words on the left, numbers on the right.

    rich's own table measures, wraps and pads each cell as a document of its own, which was most of what `top` cost.
    Here a line is a few pieces of text. Where a terminal is too narrow, names are cut first, and a sentence at the end
    has what is left; nothing is cut in a file or a pipe.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._left = [at <= 1 or name in {"", "now", "breaker"} for at, name in enumerate(names)]
        self._rows: list[tuple[str | tuple[str, str], ...]] = []

    def add_row(self, *cells: str | tuple[str, str]) -> None:
        """Add a row; a cell is its text, or its text with its style."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines."""
        widths = [max(map(_width, column)) for column in zip(self._names, *self._rows, strict=True)]
        spare = options.max_width - sum(widths) - 2 * (len(widths) - 1) if options.is_terminal else 0
        if spare < 0 and not self._names[-1]:
            widths[-1], spare = max(_SHORTEST_NAME, widths[-1] + spare), 0
        if spare < 0:
            widths[0] = max(min(widths[0], _SHORTEST_NAME), widths[0] + spare)
        yield from self._line(widths, [(name, "bold") for name in self._names])
        for row in self._rows:
            yield from self._line(widths, row)

    def _line(self, widths: Sequence[int], cells: Sequence[str | tuple[str, str]]) -> RenderResult:
        """Neighbours of one style are one piece."""
        text, style = "", ""
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            word, own = cell if isinstance(cell, tuple) else (cell, "")
            if own != style:
                yield Segment(text, _STYLES[style])
                text, style = "", own
            text += _fitted(word, width, left=self._left[at]) + "  "
        yield Segment(text, _STYLES[style])
        yield Segment.line()


def _width(cell: str | tuple[str, str]) -> int:
    return cell_len(cell[0] if isinstance(cell, tuple) else cell)


def _fitted(word: str, width: int, *, left: bool) -> str:
    """A word in as many cells of the terminal as its column has."""
    length = cell_len(word)
    if length > width:
        return set_cell_size(word, width - 1) + "…"
    return word + " " * (width - length) if left else " " * (width - length) + word


def _queues(rows: Sequence[Mapping[str, Any]]) -> Columns:
    table = Columns("queue", "state", "in/s", "out/s", "waiting", "full", "in flight", "oldest", "p99", "busy", "lost")
    for each in rows:
        table.add_row(
            plain(each["name"]),
            _state(each),
            _rate(each["in"]),
            _rate(each["out"]),
            number(each["waiting"]),
            f"{each['fill']:.0%}",
            number(each["in_flight"]),
            _seconds(each["oldest"]),
            _seconds(each["wait_p99"]),
            f"{each['busy']}/{each['workers']}",
            _alarming(each["lost"]),
        )
    return table


def _exporters(rows: Sequence[Mapping[str, Any]]) -> Columns:
    table = Columns(
        "exporter",
        "state",
        "in/s",
        "out/s",
        "records",
        "bytes",
        "full",
        "oldest",
        "p99",
        "busy",
        "breaker",
        "dead",
        "lost",
    )
    for each in rows:
        table.add_row(
            plain(each["name"]),
            _state(each),
            _rate(each["in"]),
            _rate(each["out"]),
            number(each["records"]),
            size(each["bytes"]),
            f"{each['fill']:.0%}",
            _seconds(each["oldest"]),
            _seconds(each["send_p99"]),
            f"{each['busy']}/{each['workers']}",
            "paused" if each["paused"] else plain(each["breaker"]).replace("_", " "),
            _alarming(each["dead"]),
            _alarming(each["lost"]),
        )
    return table


def _disks(rows: Sequence[Mapping[str, Any]]) -> Columns:
    table = Columns("disk", "state", "used", "limit", "free", "segments", "sync p99")
    for each in rows:
        sizes = (_NOTHING if each[name] is None else size(each[name]) for name in ("used", "limit", "free"))
        table.add_row(
            plain(each["name"]),
            _state(each),
            *sizes,
            number(each["segments"]),
            _seconds(each["sync_p99"]),
        )
    return table


def _consumers(rows: Sequence[Mapping[str, Any]]) -> Columns:
    table = Columns("consumer", "state", "now", "received", "lag")
    for each in rows:
        table.add_row(
            plain(each["name"]),
            _state(each),
            plain(each["word"]),
            *(_count(each[name]) for name in ("received", "lag")),
        )
    return table


def _queries(rows: Sequence[Mapping[str, Any]]) -> Columns:
    table = Columns("query", "state", "now", "rows/s", "rows", "batch", "lag")
    for each in rows:
        times = (_seconds(each[name]) for name in ("batch", "lag"))
        table.add_row(
            plain(each["name"]),
            _state(each),
            plain(each["word"]),
            _rate(each["rate"]),
            _count(each["rows"]),
            *times,
        )
    return table


_SMALL: dict[str, Callable[[Sequence[Mapping[str, Any]]], Columns]] = {
    "disks": _disks,
    "consumers": _consumers,
    "queries": _queries,
}


def _more(count: int, thing: str) -> list[Text]:
    return [Text(f"and {count} more {thing}{'' if count == 1 else 's'}", "dim")] if count else []


def _state(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["state"], COLOURS[row["state"]]


def _bad(count: float | None) -> Text:
    return Text(*_alarming(count))


def _alarming(count: float | None) -> tuple[str, str]:
    return _count(count), "red" if count else ""


def _count(count: float | None) -> str:
    return _NOTHING if count is None else number(count)


def _rate(rate: float | None) -> str:
    return _NOTHING if rate is None else number(rate)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    return f"{seconds * 1_000:.0f} ms" if seconds < 1 else duration(seconds)
