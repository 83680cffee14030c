"""The sentences about a process: how things are, in one, and why they are so, in one per problem. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from batchqueue_async.observe.words import count, duration, number

if TYPE_CHECKING:
    from batchqueue_async.observe.snapshot import ProcessSnapshot
    from batchqueue_async.observe.status import ComponentStatus, Status


def summary(status: Status, snapshot: ProcessSnapshot) -> str:
    """How things are, in one sentence.

    Example:
        >>> from batchqueue_async.observe.snapshot import ProcessSnapshot
        >>> from batchqueue_async.observe.status import ComponentStatus, Status
        >>> broken = ComponentStatus(
        ...     component="exporter/lake", state="down", since=0.0, problem="can't deliver", detail="3 records wait")
        >>> status = Status(at=240.0, state="down", live=True, ready=True, components=(broken,))
        >>> summary(status, ProcessSnapshot(at=240.0))
        "Exporter lake can't deliver, for 4 min now: 3 records wait."
    """
    if status.phase == "draining":
        return f"Draining: {_waiting(snapshot)} still to be handled."
    if status.phase == "starting":
        return "Starting: some parts are not there yet."
    problems = [each for each in status.components if each.state != "ok"]
    if not problems:
        return _all_is_well(snapshot)
    first = problems[0]
    more = "" if len(problems) == 1 else f" {count(len(problems) - 1, 'more problem')}."
    return f"{_name(first)} {first.problem}, {_for(first, status.at)} now{_detail(first)}.{more}"


def _all_is_well(snapshot: ProcessSnapshot) -> str:
    if not (snapshot.queues or snapshot.exporters or snapshot.queries or snapshot.consumers):
        return "Nothing runs yet."
    ages = [queue.stats.oldest_age for queue in snapshot.queues]
    ages += [exporter.stats.oldest_age for exporter in snapshot.exporters]
    oldest = max(ages, default=0.0)
    waiting = _waiting(snapshot)
    rates = [exporter.rates.settled for exporter in snapshot.exporters if exporter.rates is not None]
    delivered = f"{number(sum(rates))} records/s are delivered, " if rates else ""
    if oldest <= 0:
        return f"All is well: {delivered}nothing waits."
    return f"All is well: {delivered}{waiting} waiting, the oldest for {duration(oldest)}."


def _waiting(snapshot: ProcessSnapshot) -> str:
    items = sum(queue.stats.used + queue.stats.in_flight for queue in snapshot.queues)
    records = sum(exporter.stats.records for exporter in snapshot.exporters)
    return count(items + records, "record")


def why(status: Status, *, clock: bool = True) -> list[str]:
    """What is wrong, since when, and what to do: a text per problem, the worst first; one line if nothing is.

    Args:
        status: the process.
        clock: whether the local time of the beginning is named besides.

    Example:
        >>> from batchqueue_async.observe.status import ComponentStatus, Status
        >>> loop = ComponentStatus(
        ...     component="loop/main", state="degraded", since=95.0, problem="is blocked", advice="find the handler")
        >>> why(Status(at=100.0, state="degraded", live=True, ready=True, components=(loop,)), clock=False)
        ['Loop main is blocked, for 5 s now. What to do: find the handler.']
    """
    texts = [_problem(each, status.at, clock=clock) for each in status.components if each.state != "ok"]
    texts += [f"Not ready: {reason}." for reason in status.reasons]
    return texts or ["All is well."]


def _problem(each: ComponentStatus, now: float, *, clock: bool) -> str:
    since = f"{_for(each, now)} now"
    if clock:
        since += f", since {time.strftime('%H:%M:%S', time.localtime(each.since))}"
    text = f"{_name(each)} {each.problem}, {since}{_detail(each)}."
    if each.last_success is not None and each.state == "down":
        text += f" It last succeeded {duration(max(0.0, now - each.last_success))} ago."
    if each.last_error:
        text += f" The last error: {each.last_error}."
    return f"{text} What to do: {each.advice}." if each.advice else text


def _for(each: ComponentStatus, now: float) -> str:
    return f"for {duration(max(0.0, now - each.since))}"


def _detail(each: ComponentStatus) -> str:
    return f": {each.detail}" if each.detail else ""


def _name(each: ComponentStatus) -> str:
    kind, _, name = each.component.partition("/")
    return f"{kind.capitalize()} {name}"
