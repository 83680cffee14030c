"""How each component is: its state, since when, what is wrong and what to do, as a function of snapshots. Pure.

Health follows outcomes, not connections. A destination that is down makes its exporter `down`; whether the process is
ready is another question, for it accepts records as long as it has room for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from batchqueue_async.observe import judge

if TYPE_CHECKING:
    from batchqueue_async.observe.judge import Finding
    from batchqueue_async.observe.snapshot import ProcessSnapshot

State = Literal["ok", "degraded", "down"]
Phase = Literal["starting", "running", "draining"]

EVENTS = 50
"""How many changes of state are kept."""
WORST: dict[State, int] = {"down": 2, "degraded": 1, "ok": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentStatus:
    """One component.

    Example:
        >>> ComponentStatus(component="queue/rows", state="ok", since=0.0).well
        True

    Attributes:
        component: its kind and name, as "exporter/warehouse".
        state: "ok", "degraded" (it works, and something needs attention) or "down" (it does not do its work, or loses
            records).
        since: since when it is in this state, in seconds since the epoch.
        problem: what is wrong, as the rest of a sentence that begins with its name; empty when it is ok.
        detail: numbers and the last error, as a sentence of their own.
        advice: what to do about it.
        last_success, last_error, last_error_at: the last outcomes, where it has such.
    """

    component: str
    state: State
    since: float
    problem: str = ""
    detail: str = ""
    advice: str = ""
    last_success: float | None = None
    last_error: str | None = None
    last_error_at: float | None = None

    @property
    def well(self) -> bool:
        """Whether it does its work; one that is degraded does."""
        return self.state != "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A component that changed its state, at a time in seconds since the epoch."""

    at: float
    component: str
    before: State | None
    after: State
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The process.

    Attributes:
        at: when it was looked at, in seconds since the epoch.
        state: the worst state of its components.
        live: whether every event loop has given a sign of life within 30 s.
        ready: whether it accepts records.
        reasons: why it is not live or not ready.
        phase: "starting", "running" or "draining".
        components: each of them, the worst first.
        events: the last changes of state, the newest first.
    """

    at: float
    state: State
    live: bool
    ready: bool
    reasons: tuple[str, ...] = ()
    phase: Phase = "running"
    components: tuple[ComponentStatus, ...] = ()
    events: tuple[Event, ...] = field(default=())

    def of(self, component: str) -> ComponentStatus | None:
        """One component by its kind and name, or by its name alone where that is enough."""
        found = [each for each in self.components if component in {each.component, each.component.partition("/")[2]}]
        return found[0] if found else None


class StatusTracker:
    """Makes statuses of snapshots, and remembers since when each component is what it is.

    Example:
        >>> from batchqueue_async.observe.snapshot import LoopView, ProcessSnapshot
        >>> tracker = StatusTracker()
        >>> tracker.see(ProcessSnapshot(at=100.0, loops=(LoopView(name="main", lag=0.0),))).state
        'ok'
        >>> status = tracker.see(ProcessSnapshot(at=140.0, loops=(LoopView(name="main", lag=40.0),)))
        >>> status.state, status.live
        ('down', False)
    """

    def __init__(self, phase: Phase = "running") -> None:
        self.phase: Phase = phase
        self._last: dict[str, tuple[judge.Finding, ComponentStatus]] = {}
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._recent = judge.Recent()

    def see(self, snapshot: ProcessSnapshot) -> Status:
        """The status at a snapshot, which is later than those before it."""
        self._recent.see(snapshot)
        findings = judge.findings(snapshot, self._recent)
        components = [self._component(finding, snapshot.at) for finding in findings]
        for gone in self._last.keys() - {each.component for each in components}:
            del self._last[gone]
        components.sort(key=lambda each: (-WORST[each.state], each.component))
        dead = judge.dead_loops(snapshot)
        full = [*judge.refusing(snapshot), *dead]
        if self.phase != "running":
            full.insert(0, f"the process is {self.phase}")
        return Status(
            at=snapshot.at,
            state=components[0].state if components else "ok",
            live=not dead,
            ready=not full,
            reasons=tuple(full),
            phase=self.phase,
            components=tuple(components),
            events=tuple(reversed(self._events)),
        )

    def _component(self, finding: Finding, now: float) -> ComponentStatus:
        said, before = self._last.get(finding.component, (None, None))
        if before is not None and (said is finding or said == finding):
            return before
        since = now
        if before is not None and before.state == finding.state:
            since = before.since
        elif before is not None or finding.state != "ok":
            self._events.append(
                Event(
                    at=now,
                    component=finding.component,
                    before=None if before is None else before.state,
                    after=finding.state,
                    text=finding.problem or "works again",
                )
            )
        found = ComponentStatus(
            component=finding.component,
            state=finding.state,
            since=since,
            problem=finding.problem,
            detail=finding.detail,
            advice=finding.advice,
            last_success=finding.last_success,
            last_error=finding.last_error,
            last_error_at=finding.last_error_at,
        )
        self._last[finding.component] = finding, found
        return found
