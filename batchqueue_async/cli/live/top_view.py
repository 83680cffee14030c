"""What `batchqueue top` draws: one process with its components, or a table of several. Needs rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Group
from rich.table import Table
from rich.text import Text

from batchqueue_async.cli.commands import plain
from batchqueue_async.observe.words import duration, number, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType

COLOURS = {"ok": "green", "degraded": "yellow", "down": "red"}
_NOTHING = "-"


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
    table = _table("process", "state", "up", "in/s", "out/s", "waiting", "oldest", "dead", "lost", "loop lag", "")
    for each in processes:
        frame = each.frame
        if frame is None:
            silent = "does not answer yet" if not each.error else each.error
            table.add_row(plain(each.name), Text("?", "red"), *[_NOTHING] * 8, Text(plain(silent)))
            continue
        cards = frame["cards"]
        table.add_row(
            str(frame["pid"]),
            _state(frame),
            duration(frame["uptime"]),
            *(_rate(cards[name]) for name in ("in", "out")),
            number(cards["waiting"]),
            _seconds(cards["oldest"]),
            *(_bad(cards[name]) for name in ("dead", "lost")),
            _seconds(frame["lag"]),
            Text(plain(frame["sentence"])),
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


def _queues(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("queue", "state", "in/s", "out/s", "waiting", "full", "in flight", "oldest", "p99", "busy", "lost")
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
            _bad(each["lost"]),
        )
    return table


def _exporters(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("exporter", "state", "in/s", "out/s", "records", "bytes", "full", "oldest", "p99", "busy", "breaker")
    table.add_column("dead", justify="right")
    table.add_column("lost", justify="right")
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
            _bad(each["dead"]),
            _bad(each["lost"]),
        )
    return table


def _disks(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("disk", "state", "used", "limit", "free", "segments", "sync p99")
    for each in rows:
        sizes = (_NOTHING if each[name] is None else size(each[name]) for name in ("used", "limit", "free"))
        table.add_row(plain(each["name"]), _state(each), *sizes, number(each["segments"]), _seconds(each["sync_p99"]))
    return table


def _consumers(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("consumer", "state", "now", "received", "lag")
    for each in rows:
        table.add_row(
            plain(each["name"]),
            _state(each),
            plain(each["word"]),
            *(_count(each[name]) for name in ("received", "lag")),
        )
    return table


def _queries(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("query", "state", "now", "rows/s", "rows", "batch", "lag")
    for each in rows:
        times = (_seconds(each[name]) for name in ("batch", "lag"))
        table.add_row(
            plain(each["name"]), _state(each), plain(each["word"]), _rate(each["rate"]), _count(each["rows"]), *times
        )
    return table


_SMALL: dict[str, Callable[[Sequence[Mapping[str, Any]]], Table]] = {
    "disks": _disks,
    "consumers": _consumers,
    "queries": _queries,
}


def _table(*names: str) -> Table:
    """A table without lines; names, states and sentences on the left, numbers on the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(names):
        left = at <= 1 or name in {"", "now", "breaker"}
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "")
    return table


def _more(count: int, thing: str) -> list[Text]:
    return [Text(f"and {count} more {thing}{'' if count == 1 else 's'}", "dim")] if count else []


def _state(row: Mapping[str, Any]) -> Text:
    return Text(row["state"], COLOURS[row["state"]])


def _bad(count: float | None) -> Text:
    return Text(_count(count), "red" if count else "")


def _count(count: float | None) -> str:
    return _NOTHING if count is None else number(count)


def _rate(rate: float | None) -> str:
    return _NOTHING if rate is None else number(rate)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    return f"{seconds * 1_000:.0f} ms" if seconds < 1 else duration(seconds)
