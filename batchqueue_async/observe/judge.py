"""What a snapshot says about each component: the rules behind the states and their sentences. Pure.

A finding's problem is the rest of a sentence that begins with the component's name. Rules are ordered by weight; the
first that applies is the finding.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from batchqueue_async.observe.letter_requests import put_back_command
from batchqueue_async.observe.words import count, duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchqueue_async.observe.snapshot import (
        ConsumerView,
        DiskView,
        ExporterView,
        LoopView,
        ProcessSnapshot,
        QueueView,
        SparkQueryView,
    )
    from batchqueue_async.observe.status import State

DEAD_AFTER = 30.0
"""Seconds without a sign of life after which a loop is dead, and the process not live."""
LATE = 1.0
"""Seconds of lag from which on a loop is blocked."""
RECENT = 300.0
"""For how many seconds a loss is shown."""
FAILING = 60.0
"""For how many seconds failures of a handler are shown."""
FULL = 0.9
STUCK = 60.0
_LEAST_FREE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is to be said about one component; see `ComponentStatus`."""

    component: str
    state: State = "ok"
    problem: str = ""
    detail: str = ""
    advice: str = ""
    last_success: float | None = None
    last_error: str | None = None
    last_error_at: float | None = None


class Recent:
    """How much counts have risen lately: a few looks are kept per count, over `RECENT` seconds."""

    _LOOKS = 12

    def __init__(self) -> None:
        self._at = 0.0
        self._kept_at = -math.inf
        self._now: dict[str, dict[str, int]] = {}
        self._kept: dict[str, deque[tuple[float, dict[str, int]]]] = {}

    def see(self, snapshot: ProcessSnapshot) -> None:
        """Remember the counts of a snapshot."""
        now = self._at = snapshot.at
        counts = self._now = dict(_counts(snapshot))
        kept = self._kept
        for name in kept.keys() - counts.keys():
            del kept[name]
        for name in counts.keys() - kept.keys():
            kept[name] = deque([(now, counts[name])])
        if self._kept_at <= now < self._kept_at + RECENT / self._LOOKS:
            return
        self._kept_at = now
        for name, looks in kept.items():
            looks.append((now, counts[name]))
            while len(looks) > 1 and looks[1][0] < now - RECENT:
                looks.popleft()  # one that is older than the span stays

    def rise(self, component: str, what: str, within: float = RECENT) -> int:
        """By how much a count of a component has risen within the last seconds, or since it was first seen."""
        looks = self._kept.get(component)
        if not looks:
            return 0
        now = self._now[component][what]
        if now == looks[0][1][what]:
            return 0  # counts only rise
        # The last look before the span, so that nothing within it is missed.
        start = looks[0]
        for look in looks:
            if look[0] <= self._at - within:
                start = look
        return max(0, now - start[1][what])


def _counts(snapshot: ProcessSnapshot) -> Iterator[tuple[str, dict[str, int]]]:
    for queue in snapshot.queues:
        stats = queue.stats
        yield (
            f"queue/{queue.name}",
            {
                "refused": stats.refused,
                "dropped": stats.dropped,
                "failed": stats.failed,
                "handled": stats.handled,
                "unhandled": stats.unhandled,
            },
        )
    for exporter in snapshot.exporters:
        numbers = exporter.stats
        dropped = sum(numbers.dropped.values()) + numbers.failover_evicted
        yield (
            f"exporter/{exporter.name}",
            {"dropped": dropped, "dead": numbers.dead_lettered, "refused": numbers.refused},
        )
    for disk in snapshot.disks:
        errors = disk.stats.write_errors + disk.stats.sync_errors
        yield f"disk/{disk.name}", {"errors": errors, "full": disk.stats.disk_full, "damaged": disk.stats.damaged}
    for query in snapshot.queries:
        yield f"spark/{query.pipeline}/{query.name}", {"restarts": query.progress.restarts}


def findings(snapshot: ProcessSnapshot, recent: Recent) -> list[Finding]:
    """What is to be said about every component."""
    return [
        *(_loop(loop) for loop in snapshot.loops),
        *(_queue(queue, recent) for queue in snapshot.queues),
        *(_exporter(exporter, recent, snapshot) for exporter in snapshot.exporters),
        *(_disk(disk, recent) for disk in snapshot.disks),
        *(_consumer(consumer) for consumer in snapshot.consumers),
        *(_query(query) for query in snapshot.queries),
    ]


def dead_loops(snapshot: ProcessSnapshot) -> list[str]:
    """Why the process is not live."""
    return [
        f"loop {loop.name} has not answered for {duration(loop.lag)}"
        for loop in snapshot.loops
        if loop.lag > DEAD_AFTER
    ]


def refusing(snapshot: ProcessSnapshot) -> list[str]:
    """Why the process does not accept records: a part is closed, or full and would not take any."""
    reasons = [f"queue {queue.name} is closed" for queue in snapshot.queues if queue.closed]
    for exporter in snapshot.exporters:
        if exporter.closed:
            reasons.append(f"exporter {exporter.name} is closed")
        elif exporter.overflow != "drop_oldest" and exporter.stats.utilization >= 1.0:
            reasons.append(f"exporter {exporter.name} is full")
    return reasons


def _loop(loop: LoopView) -> Finding:
    name = f"loop/{loop.name}"
    advice = "find the handler that blocks it: use await, bq.in_thread or bq.in_process for work that takes time"
    if loop.lag > DEAD_AFTER:
        return Finding(
            component=name, state="down", problem=f"has not answered for {duration(loop.lag)}", advice=advice
        )
    if loop.lag > LATE:
        return Finding(
            component=name, state="degraded", problem=f"is blocked: {duration(loop.lag)} late", advice=advice
        )
    return Finding(component=name)


@lru_cache(4096)
def _well(component: str) -> Finding:
    """There are hundreds of them in each look."""
    return Finding(component=component)


def _queue(queue: QueueView, recent: Recent) -> Finding:
    name, stats = f"queue/{queue.name}", queue.stats
    error = stats.last_error
    counted = stats.refused or stats.dropped_before or stats.dropped_after or stats.failed or stats.unhandled
    if error is None and not counted and stats.oldest_age <= STUCK and stats.used_ratio < FULL:
        return _well(name)
    said = None if error is None else f"{error.error}: {error.text}" if error.text else error.error
    at = None if error is None else error.at

    def found(state: State, problem: str, advice: str, detail: str = "") -> Finding:
        return Finding(
            component=name,
            state=state,
            problem=problem,
            detail=detail,
            advice=advice,
            last_error=said,
            last_error_at=at,
        )

    if lost := recent.rise(name, "dropped"):
        return found(
            "down",
            f"dropped {count(lost, 'item')} in the last {duration(RECENT)}, since it was full",
            "raise buffer_size, add workers, or let producers wait with overflow='block'",
        )
    failed, handled = recent.rise(name, "failed", FAILING), recent.rise(name, "handled", FAILING)
    if failed and not handled:
        where = "" if error is None else f" (at {error.where})"
        return found(
            "down",
            "handles nothing, since its handler fails",
            "correct the handler, or raise RetryableError for what may pass",
            f"{count(failed, 'item')} failed in the last {duration(FAILING)}{where}",
        )
    if failed:
        return found(
            "degraded",
            f"failed with {count(failed, 'item')} in the last {duration(FAILING)}",
            "correct the handler, or give on_error what can't be handled",
        )
    if missing := recent.rise(name, "unhandled"):
        return found(
            "degraded", f"has no handler for {count(missing, 'item')}", "add a handler for the type, or a fallback"
        )
    if refused := recent.rise(name, "refused", FAILING):
        return found(
            "degraded",
            f"refused {count(refused, 'item')} in the last {duration(FAILING)}",
            "raise buffer_size, add workers, or make the handler faster",
        )
    if stats.oldest_age > STUCK:
        return found(
            "degraded",
            f"is behind: its oldest item has waited for {duration(stats.oldest_age)}",
            "make the handler faster, add workers, or look for what it waits for",
        )
    if stats.used_ratio >= FULL:
        waits = "producers wait" if queue.waits else "the next items are lost or refused"
        return found(
            "degraded",
            f"is {stats.used_ratio:.0%} full",
            "make the handler faster, add workers, or raise buffer_size",
            waits,
        )
    return Finding(component=name, last_error=said, last_error_at=at)


def _exporter(exporter: ExporterView, recent: Recent, snapshot: ProcessSnapshot) -> Finding:
    now = snapshot.at
    name, stats = f"exporter/{exporter.name}", exporter.stats
    outcome = {
        "component": name,
        "last_success": stats.last_success_at,
        "last_error": stats.last_error,
        "last_error_at": stats.last_error_at,
    }

    def found(state: State, problem: str, advice: str, detail: str = "") -> Finding:
        return Finding(state=state, problem=problem, detail=detail, advice=advice, **outcome)  # type: ignore[arg-type]

    waiting = f"{count(stats.records, 'record')} wait" if stats.records != 1 else "1 record waits"
    waiting += _room(exporter)
    again = "" if not stats.next_send_in else f"; the next attempt is in {duration(stats.next_send_in)}"
    if stats.paused:
        return found(
            "down",
            "is paused, since the destination refuses its credentials or they can't be read",
            f"correct the credentials or the configuration; nothing is dropped meanwhile{again}",
            waiting,
        )
    if stats.stuck:
        return found(
            "down",
            f"fails again and again with {count(stats.stuck, 'record')}, with errors that don't say what to do",
            "let the sink raise a SinkError, or set RetryPolicy.max_attempts, which makes dead letters of them",
            waiting,
        )
    if lost := recent.rise(name, "dropped"):
        return found(
            "down",
            f"dropped {count(lost, 'record')} in the last {duration(RECENT)}, since its send queue was full",
            "raise max_bytes, or use overflow='block'; then see why the destination is slow",
        )
    if stats.breaker != "closed":
        return found(
            "down",
            "can't deliver",
            f"bring the destination back; sending resumes by itself{again}",
            waiting,
        )
    if dead := recent.rise(name, "dead"):
        return found(
            "degraded",
            f"gave {count(dead, 'record')} up in the last {duration(RECENT)}",
            f"read the reasons of the dead letters, correct the cause, and put them back: {_how(exporter, snapshot)}",
        )
    if stats.utilization >= FULL:
        return found(
            "degraded",
            f"is {stats.utilization:.0%} full",
            "see whether the destination is slow, add workers, or raise max_bytes",
            waiting,
        )
    failed_at, worked_at = stats.last_error_at, stats.last_success_at
    failing = failed_at is not None and now - failed_at < RECENT and (worked_at is None or worked_at < failed_at)
    if stats.records and failing:
        return found("degraded", "failed with its last send", "wait: it tries again by itself", waiting)
    if exporter.rates is not None and stats.oldest_age > STUCK and exporter.rates.full_in(_free(exporter)) < math.inf:
        return found(
            "degraded",
            f"falls behind: its oldest record is {duration(stats.oldest_age)} old",
            "add workers, raise the batch size, or ask the destination for more",
            waiting,
        )
    return Finding(**outcome)  # type: ignore[arg-type]


def _how(exporter: ExporterView, snapshot: ProcessSnapshot) -> str:
    if snapshot.commands:
        return f"`{put_back_command(snapshot.pid, exporter.name)}`"
    return "its code can call exporter.requeue_dead_letters(), or serve `unix:`, so that a command can"


def _free(exporter: ExporterView) -> int:
    return (exporter.stats.max_bytes or 0) - exporter.stats.bytes


def _room(exporter: ExporterView) -> str:
    if exporter.rates is None or exporter.stats.max_bytes is None:
        return ""
    left = exporter.rates.full_in(_free(exporter))
    if left < math.inf:
        return f", room for {duration(left)}"
    return f", room for {size(_free(exporter))}"


def _disk(disk: DiskView, recent: Recent) -> Finding:
    name, stats = f"disk/{disk.name}", disk.stats
    if errors := recent.rise(name, "errors"):
        return Finding(
            component=name,
            state="down",
            problem=f"had {count(errors, 'failed write')} in the last {duration(RECENT)}",
            advice="look at the system's log for errors of the device; only what is written is confirmed",
        )
    if recent.rise(name, "full"):
        return Finding(
            component=name,
            state="degraded",
            problem="met a full disk or its quota",
            advice="free room on the file system, or raise max_bytes",
        )
    if damaged := recent.rise(name, "damaged"):
        return Finding(
            component=name,
            state="degraded",
            problem=f"has {count(damaged, 'damaged record')}",
            advice="run `batchqueue disk verify` on the directory; what is damaged is kept aside",
        )
    free = stats.free_bytes
    if free is not None and stats.max_bytes and free < stats.max_bytes - stats.disk_bytes:
        short = stats.max_bytes - stats.disk_bytes - free
        if free < _LEAST_FREE * stats.max_bytes:
            return Finding(
                component=name,
                state="degraded",
                problem=f"has {size(free)} left on its file system, {size(short)} less than its quota needs",
                advice="free room on the file system, or lower max_bytes to what is there",
            )
    return Finding(component=name)


def _consumer(consumer: ConsumerView) -> Finding:
    name = f"consumer/{consumer.name}"
    state = str(getattr(consumer.stats, "state", "running"))
    error = getattr(consumer.stats, "last_error", None)
    said = None if error is None else str(getattr(error, "text", None) or error)
    if state in {"connecting", "reconnecting"}:
        problem = "has no connection to its broker" + (f" ({said})" if said else "")
        return Finding(
            component=name, state="down", problem=problem, advice="bring the broker back; it connects again by itself"
        )
    if state == "paused":
        return Finding(component=name, state="degraded", problem="is paused", advice="call resume() when it may go on")
    return Finding(component=name, last_error=said)


def _query(query: SparkQueryView) -> Finding:
    name, progress = f"spark/{query.pipeline}/{query.name}", query.progress
    if progress.state == "failed":
        return Finding(
            component=name,
            state="down",
            problem=f"has failed ({progress.error}) and is not started again",
            advice="read Spark's log, correct the cause, and start the pipeline again",
        )
    if progress.state == "waiting":
        return Finding(
            component=name,
            state="degraded",
            problem=f"died ({progress.error}) and waits for its next start",
            advice="read Spark's log if it dies again",
        )
    return Finding(component=name)
