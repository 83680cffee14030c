"""What the live page shows at one moment, from two snapshots and a status. Pure; the page draws it.

Lists are bounded: with hundreds of queues the busiest are shown, those with a problem first, and the rest are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async.observe.letter_requests import put_back_command
from batchqueue_async.observe.sentences import summary
from batchqueue_async.observe.status import WORST
from batchqueue_async.queue.stats import CloseUp, Distribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from batchqueue_async.observe.snapshot import ExporterView, ProcessSnapshot, QueueView
    from batchqueue_async.observe.status import State, Status

MOST_ROWS = 24
"""Queues and exporters that are shown one by one."""
MOST_NODES = 12
"""Queues in the graph."""
MOST_DEAD = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One moment of the page; the fields are those that its script reads."""

    t: float
    uptime: float
    version: str
    pid: int
    state: str
    sentence: str
    lag: float
    cards: Mapping[str, float | None]
    nodes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    edges: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    queues: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    more_queues: int = 0
    exporters: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    more_exporters: int = 0
    disks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    consumers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    queries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    dead: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    put_back: list[str] = field(default_factory=list[str])
    dead_kinds: dict[str, int] = field(default_factory=dict[str, int])
    failures: dict[str, int] = field(default_factory=dict[str, int])
    problems: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def point(self) -> list[float | None]:
        """What the charts keep: time, in, out, records, bytes, limit, p50, p95, p99 of waits and of sends, breaker."""
        cards = self.cards
        worst = max((_band(each) for each in self.exporters), default=0)
        return [
            self.t,
            cards["in"],
            cards["out"],
            cards["send_queue"],
            cards["send_queue_bytes"],
            cards["send_queue_limit"],
            *(_worst(self.queues, f"wait_{name}") for name in ("p50", "p95", "p99")),
            *(_worst(self.exporters, f"send_{name}") for name in ("p50", "p95", "p99")),
            float(worst),
        ]


def _band(exporter: Mapping[str, Any]) -> int:
    """The colour of the breaker's band: 0 closed, 1 half open or trying again, 2 open, 3 paused."""
    if exporter["paused"]:
        return 3
    return {"open": 2, "half_open": 1}.get(exporter["breaker"], 1 if exporter["state"] == "degraded" else 0)


def _worst(rows: Iterable[Mapping[str, Any]], what: str) -> float | None:
    return max((row[what] for row in rows if row[what] is not None), default=None)


def frame_of(snapshot: ProcessSnapshot, status: Status, before: ProcessSnapshot | None) -> Frame:
    """The page at a snapshot; `before` is the one of the frame before it, and gives the rates."""
    seconds = 0.0 if before is None else snapshot.at - before.at
    queues_before = {} if before is None else {queue.name: queue for queue in before.queues}
    exporters_before = {} if before is None else {exporter.name: exporter for exporter in before.exporters}
    states: dict[str, State] = {each.component: each.state for each in status.components}
    lines = [_line(each, queues_before.get(each.name), seconds, states) for each in snapshot.queues]
    exporters = [_exporter(each, exporters_before.get(each.name), seconds, states) for each in snapshot.exporters]
    cards = _cards(snapshot, lines, exporters)
    lines.sort(key=_line_importance)
    exporters.sort(key=_importance)
    shown_queues = [_queue(each) for each in lines[:MOST_ROWS]]
    shown_exporters = exporters[:MOST_ROWS]
    graph = _Graph(shown_queues[:MOST_NODES], lines[MOST_NODES:], exporters[:MOST_NODES])
    graph.draw(snapshot)
    return Frame(
        t=snapshot.at,
        uptime=snapshot.at - snapshot.started,
        version=snapshot.version,
        pid=snapshot.pid,
        state=status.state,
        sentence=summary(status, snapshot),
        lag=max((loop.lag for loop in snapshot.loops), default=0.0),
        cards=cards,
        nodes=list(graph.nodes.values()),
        edges=graph.edges,
        queues=shown_queues,
        more_queues=len(lines) - len(shown_queues),
        exporters=shown_exporters,
        more_exporters=len(exporters) - len(shown_exporters),
        disks=[_disk(each.name, each.stats, states) for each in snapshot.disks[:MOST_ROWS]],
        consumers=[
            {
                "name": each.name,
                "kind": each.kind,
                "state": states.get(f"consumer/{each.name}", "ok"),
                "word": str(getattr(each.stats, "state", "")),
                "received": getattr(each.stats, "received", None),
                "lag": getattr(each.stats, "lag", None),
            }
            for each in snapshot.consumers[:MOST_ROWS]
        ],
        queries=[
            {
                "name": f"{each.pipeline}/{each.name}",
                "state": states.get(f"spark/{each.pipeline}/{each.name}", "ok"),
                "word": each.progress.state,
                "rate": each.progress.rate,
                "rows": each.progress.rows,
                "batch": each.progress.batch_seconds,
                "lag": each.progress.lag,
                "behind": each.progress.behind,
            }
            for each in snapshot.queries[:MOST_ROWS]
        ],
        dead=_dead(snapshot),
        put_back=_put_back(snapshot),
        dead_kinds=_summed(exporter.stats.dead_kinds for exporter in snapshot.exporters),
        failures=_summed(exporter.stats.failures for exporter in snapshot.exporters),
        problems=[
            {
                "component": each.component,
                "state": each.state,
                "since": each.since,
                "text": each.problem,
                "detail": each.detail,
                "error": each.last_error,
                "advice": each.advice,
            }
            for each in status.components
            if each.state != "ok"
        ][:MOST_ROWS],
        events=[
            {"at": each.at, "component": each.component, "state": each.after, "text": each.text}
            for each in status.events
        ],
    )


def _dead(snapshot: ProcessSnapshot) -> list[dict[str, Any]]:
    """The newest dead letters of all exporters, without the records."""
    letters = [(letter, exporter.name) for exporter in snapshot.exporters for letter in exporter.stats.newest_dead]
    letters.sort(key=lambda each: -each[0].at)
    return [
        {"at": letter.at, "exporter": name, "records": letter.records, "reason": letter.reason}
        for letter, name in letters[:MOST_DEAD]
    ]


def _put_back(snapshot: ProcessSnapshot) -> list[str]:
    """The lines for a shell that put dead letters back; none where the process takes no commands."""
    if not snapshot.commands:
        return []
    named = dict.fromkeys(letter["exporter"] for letter in _dead(snapshot))
    return [put_back_command(snapshot.pid, name) for name in named]


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for name, value in each.items():
            found[name] = found.get(name, 0) + value
    return found


def _importance(row: Mapping[str, Any]) -> tuple[int, float, str]:
    state: Any = row["state"]
    return -WORST[state], -(row["in"] or 0.0), row["name"]


def _rate(now: int, before: int | None, seconds: float) -> float | None:
    return None if before is None or seconds <= 0 else max(0.0, (now - before) / seconds)


def _percentiles(name: str, lately: Distribution) -> dict[str, float | None]:
    """None where there were no values."""
    if not lately.count:
        return {f"{name}_p50": None, f"{name}_p95": None, f"{name}_p99": None}
    return {f"{name}_p50": lately.p50, f"{name}_p95": lately.p95, f"{name}_p99": lately.p99}


_NOTHING = CloseUp(waits=Distribution(), busy=0, workers=0, handlers=(), partitions=(), more_partitions=0)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class _Line(NamedTuple):
    """What is needed of every queue, shown or not."""

    view: QueueView
    before: QueueView | None
    state: State
    came_in: float | None
    went_out: float | None


def _line(view: QueueView, before: QueueView | None, seconds: float, states: Mapping[str, State]) -> _Line:
    stats, state = view.stats, states.get(f"queue/{view.name}", "ok")
    if before is None or seconds <= 0:
        return _Line(view, before, state, None, None)
    old = before.stats
    out = stats.handled + stats.failed + stats.unhandled - old.handled - old.failed - old.unhandled
    return _Line(view, before, state, max(0.0, (stats.accepted - old.accepted) / seconds), max(0.0, out / seconds))


def _line_importance(line: _Line) -> tuple[int, float, str]:
    return -WORST[line.state], -(line.came_in or 0.0), line.view.name


def _queue(line: _Line) -> dict[str, Any]:
    view, before = line.view, line.before
    stats, shown = view.stats, view.close_up or _NOTHING
    # A queue that has just come among those that are shown has nothing to be compared with: for one frame there are
    # no percentiles, rather than those of its whole life.
    waits = shown.waits
    if before is not None:
        waits = _NOTHING.waits if before.close_up is None else waits.since(before.close_up.waits)
    return {
        "name": view.name,
        "state": line.state,
        "in": line.came_in,
        "out": line.went_out,
        "waiting": stats.used,
        "capacity": stats.capacity,
        "fill": stats.used_ratio,
        "in_flight": stats.in_flight,
        "oldest": stats.oldest_age,
        "lost": stats.refused + stats.dropped,
        "failed": stats.failed,
        **_percentiles("wait", waits),
        "busy": shown.busy,
        "workers": shown.workers,
        "parts": [[round(fill, 3), owner] for fill, owner in shown.partitions],
        "more_parts": shown.more_partitions,
        "exporter": view.consumer,
        "handlers": shown.handlers[:4],
    }


def _exporter(
    view: ExporterView, before: ExporterView | None, seconds: float, states: Mapping[str, Any]
) -> dict[str, Any]:
    stats = view.stats
    old = None if before is None else before.stats
    rates = view.rates
    return {
        "name": view.name,
        "sink": view.sink,
        "state": states.get(f"exporter/{view.name}", "ok"),
        "on_disk": view.on_disk,
        "in": _rate(stats.accepted, None if old is None else old.accepted, seconds),
        "out": _rate(stats.delivered, None if old is None else old.delivered, seconds),
        "records": stats.records,
        "bytes": stats.bytes,
        "limit": stats.max_bytes,
        "fill": stats.utilization,
        "oldest": stats.oldest_age,
        "empty_in": None if rates is None else _finite(rates.empty_in(stats.records)),
        "full_in": None if rates is None else _finite(rates.full_in((stats.max_bytes or 0) - stats.bytes)),
        **_percentiles("send", stats.send_seconds if old is None else stats.send_seconds.since(old.send_seconds)),
        "breaker": stats.breaker,
        "paused": stats.paused,
        "next": stats.next_send_in,
        "retries": stats.retries,
        "busy": stats.workers_active,
        "workers": stats.workers_total,
        "dead": stats.dead_lettered,
        "lost": sum(stats.dropped.values()) + stats.refused + stats.failover_evicted,
        "dropped": dict(stats.dropped),
        "failures": dict(stats.failures),
        "error": stats.last_error,
    }


def _disk(name: str, stats: Any, states: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "state": states.get(f"disk/{name}", "ok"),
        "used": stats.disk_bytes,
        "limit": stats.max_bytes,
        "free": stats.free_bytes,
        "segments": stats.segments,
        "sync_p50": stats.sync_seconds.p50,
        "sync_p99": stats.sync_seconds.p99,
    }


def _cards(snapshot: ProcessSnapshot, lines: list[_Line], exporters: list[dict[str, Any]]) -> dict[str, float | None]:
    """The numbers at the top; what comes in by a queue and goes on to an exporter is counted once."""
    fed = {queue.consumer for queue in snapshot.queues}
    inner = {name for queue in snapshot.queues for name in queue.feeds}
    came_in = [line.came_in for line in lines if line.view.name not in inner]
    came_in += [exporter["in"] for exporter in exporters if exporter["name"] not in fed]
    went_out = [line.went_out for line in lines if not (line.view.feeds or line.view.consumer)]
    went_out += [exporter["out"] for exporter in exporters]
    numbers = [queue.stats for queue in snapshot.queues]
    ages = [*[each.oldest_age for each in numbers], *[exporter["oldest"] for exporter in exporters]]
    return {
        "in": _sum(came_in),
        "out": _sum(went_out),
        "waiting": sum([each.used + each.in_flight for each in numbers])
        + sum(exporter["records"] for exporter in exporters),
        "oldest": max(ages, default=0.0),
        "dead": sum(exporter["dead"] for exporter in exporters) + sum([each.failed for each in numbers]),
        "lost": sum([each.refused + each.dropped_before + each.dropped_after for each in numbers])
        + sum(exporter["lost"] for exporter in exporters),
        "send_queue": float(sum(exporter["records"] for exporter in exporters)),
        "send_queue_bytes": float(sum(exporter["bytes"] for exporter in exporters)),
        "send_queue_limit": float(sum(exporter["limit"] or 0 for exporter in exporters)),
        "queues": float(len(lines)),
        "exporters": float(len(exporters)),
    }


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


class _Graph:
    """The pipeline: columns of sources, queues, exporters or handlers, and destinations; edges with their rates."""

    def __init__(self, queues: list[dict[str, Any]], others: list[_Line], exporters: list[dict[str, Any]]) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.edges: list[dict[str, Any]] = []
        self._queues, self._others = queues, others
        self._exporters = exporters

    def draw(self, snapshot: ProcessSnapshot) -> None:
        """Make nodes and edges."""
        feeds = {queue.name: queue.feeds for queue in snapshot.queues}
        inner = {name for names in feeds.values() for name in names}
        for queue in self._queues:
            key = self._node(f"queue/{queue['name']}", 1, queue["name"], _of(queue), queue["state"])
            if queue["name"] not in inner:
                self._edge(self._producers(), key, queue["in"])
        if self._others:
            waiting = f"{sum([line.view.stats.used for line in self._others]):,} waiting"
            key = self._node("queues", 1, f"{len(self._others)} more queues", waiting, "ok")
            self._edge(self._producers(), key, _sum([line.came_in for line in self._others]))
        for exporter in self._exporters:
            self._exporter(exporter)
        rates = {queue["name"]: queue["in"] for queue in self._queues}
        for start in rates:
            for end in feeds.get(start, ()):
                if end in rates:
                    self._edge(f"queue/{start}", f"queue/{end}", rates[end])
        for queue in self._queues:
            if not queue["exporter"] and queue["handlers"]:
                self._handlers(queue)

    def _exporter(self, exporter: dict[str, Any]) -> None:
        where = "on disk" if exporter["on_disk"] else "in memory"
        detail = f"{exporter['records']:,} {where}"
        key = self._node(f"exporter/{exporter['name']}", 2, exporter["name"], detail, exporter["state"])
        word = "paused" if exporter["paused"] else {"closed": "reachable"}.get(exporter["breaker"], "unreachable")
        sink = self._node(f"sink/{exporter['name']}", 3, exporter["sink"], word, exporter["state"])
        self._edge(key, sink, exporter["out"])
        before = [queue for queue in self._queues if queue["exporter"] == exporter["name"]]
        for queue in before:
            self._edge(f"queue/{queue['name']}", key, queue["out"])
        if any(line.view.consumer == exporter["name"] for line in self._others):
            self._edge("queues", key, exporter["in"])
        elif not before:
            self._edge(self._producers(), key, exporter["in"])

    def _handlers(self, queue: dict[str, Any]) -> None:
        names = queue["handlers"]
        label = names[0] if len(names) == 1 else f"{len(names)} handlers"
        state = "down" if queue["state"] == "down" else "ok"
        key = self._node(f"handler/{queue['name']}", 2, label, f"{queue['busy']} of {queue['workers']} busy", state)
        self._edge(f"queue/{queue['name']}", key, queue["out"])

    def _producers(self) -> str:
        return self._node("producers", 0, "producers", "", "ok")

    def _node(self, key: str, column: int, label: str, detail: str, state: str) -> str:
        self.nodes.setdefault(key, {"id": key, "column": column, "label": label, "detail": detail, "state": state})
        return key

    def _edge(self, start: str, end: str, rate: float | None) -> None:
        self.edges.append({"from": start, "to": end, "rate": rate})


def _of(queue: Mapping[str, Any]) -> str:
    return f"{queue['waiting']:,} of {queue['capacity']:,}"
