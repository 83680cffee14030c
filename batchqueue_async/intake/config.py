"""What all consumers have in common to set, checked whole, and resolved into numbers for this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

from batchqueue_async._support.checks import (
    Bytes,
    Checkup,
    Duration,
    Flag,
    Function,
    Kind,
    OptionalDuration,
    Problem,
    Rule,
    Seconds,
    Size,
    Whole,
    default,
    named_fields,
    settle,
)
from batchqueue_async.export.policies import AdaptivePolicy, BatchPolicy, RetryPolicy
from batchqueue_async.intake.ports import DROP, Drop, Order
from batchqueue_async.policies import IO_BOUND_LIMIT, IO_BOUND_PER_CORE, available_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchqueue_async.intake.message import Message

MOST_WORKERS = 200
MOST_PREFETCH = 1_000
DEFAULT_PREFETCH = 500
PREFETCH_PER_WORKER = 10
_MIB = 1 << 20

OrderedBy: TypeAlias = "Order | Callable[[Message], Any] | None"
"""How messages are kept in order: by a function's key, by the broker's partition or key, or not at all."""


class Resolved(NamedTuple):
    """The numbers of a consumer on this machine.

    Attributes:
        workers: handlers at once.
        prefetch: messages held at most.
        capped: what was asked for and lowered, as fields for a warning; empty where nothing was.
    """

    workers: int
    prefetch: int
    capped: dict[str, int]


def cpu_limit() -> int:
    """The cores that this process may use: its affinity, and in a container not more than its quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()[:2]
        allowed = max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no quota
        return available_cpus()
    return min(available_cpus(), allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OrderRule(Rule):
    """None, `PARTITION`, `KEY`, or a function of a message."""

    optional: bool = True

    def judge(self, name: str, value: Any) -> Iterator[Any]:
        """It is one of them."""
        if not isinstance(value, Order):
            yield from Function(parameters=("message",)).judge(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target(Rule):
    """The name of what takes dead letters, or DROP."""

    optional: bool = True

    def judge(self, name: str, value: Any) -> Iterator[Any]:
        """It is a name that is not empty, or DROP."""
        if not isinstance(value, Drop):
            yield from _NAME.judge(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Name(Rule):
    """A text that is not empty."""

    def judge(self, name: str, value: Any) -> Iterator[Any]:
        """It is one."""
        if not isinstance(value, str) or not value:
            yield Problem("is not a name", f"give {name}='orders.dead', or intake.DROP to lose them knowingly")


_NAME = _Name()
_RETRY = RetryPolicy(initial=1.0, max_delay=60.0, max_attempts=8)
_RECONNECT = RetryPolicy(initial=0.5, max_delay=30.0)


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeConfig:
    """What every consumer takes, besides where its messages come from.

    Attributes:
        workers: handlers that run at once; 0 is 4 per core, at most 200. With 1 all messages stay in order.
        prefetch: messages held here in all: waiting, in their delays and in handlers; 0 is 10 per worker, at most 500.
        prefetch_bytes: their bytes, at most.
        ordered_by: messages of one key are handled one after the other, in their order: a function of the message,
            `PARTITION` or `KEY` where the broker has them, None for no order.
        retry: when a message that failed is tried again, and when no more.
        dead_letters: where messages go that are given up; `DROP` drops them; it has to be said.
        dead_letter_text: whether a dead letter carries the text of the error, in which a payload may be quoted.
        handler_timeout: seconds for a call of the handler, after which it is cancelled and counts as failed.
        drain_timeout: seconds that a stop waits for what was taken.
        adaptive: let the number of workers follow depth and latency, between the policy's bounds.
        batch: hand batches to the handler, of this size and after this wait; None hands it single messages.
        decode: makes the value of a message; what it refuses goes to the dead letters at once.
        reconnect: the delays between attempts to connect; `max_attempts` and the like are not used.
        connect_timeout: seconds for one attempt.
        database: the connections that the handlers share, checked against the workers at the start.

    Example:
        >>> IntakeConfig(workers=8, dead_letters="orders.dead").resolve()
        Resolved(workers=8, prefetch=80, capped={})
    """

    workers: int = 0
    prefetch: int = 0
    prefetch_bytes: Size = default(64 * _MIB)
    ordered_by: OrderedBy = None
    retry: RetryPolicy = _RETRY
    dead_letters: str | Drop | None = None
    dead_letter_text: bool = False
    handler_timeout: OptionalDuration = default(60.0)
    drain_timeout: Duration = default(30.0)
    adaptive: AdaptivePolicy | None = None
    batch: BatchPolicy | None = None
    decode: Callable[[Message], Any] | None = None
    reconnect: RetryPolicy = _RECONNECT
    connect_timeout: Duration = default(10.0)
    database: ConnectionPool | None = None

    def __post_init__(self) -> None:
        settle(self, INTAKE_RULES)
        check = Checkup("IntakeConfig", self, INTAKE_RULES)
        if check.sound("dead_letters") and self.dead_letters is None:
            way_out = "give dead_letters='orders.dead', or intake.DROP to lose them knowingly"
            check.fault("dead_letters", "says nothing of messages that are given up", way_out)
        check.finish()

    def resolve(self, cores: int | None = None) -> Resolved:
        """The numbers for a machine with this number of cores; this machine when None."""
        capped: dict[str, int] = {}
        workers = self.workers
        if workers == 0:
            workers = min(IO_BOUND_LIMIT, IO_BOUND_PER_CORE * (cpu_limit() if cores is None else cores))
        if workers > MOST_WORKERS:
            capped["workers"], workers = workers, MOST_WORKERS
        prefetch = self.prefetch or min(DEFAULT_PREFETCH, PREFETCH_PER_WORKER * workers)
        if prefetch > MOST_PREFETCH:
            capped["prefetch"], prefetch = prefetch, MOST_PREFETCH
        return Resolved(workers, prefetch, capped)

    @property
    def drops(self) -> bool:
        """Whether dead letters are dropped."""
        return self.dead_letters is DROP


class IntakeOptions(TypedDict, total=False):
    """The fields of `IntakeConfig` as keyword arguments of a consumer."""

    workers: int
    prefetch: int
    prefetch_bytes: int | str
    ordered_by: OrderedBy
    retry: RetryPolicy
    dead_letters: str | Drop | None
    dead_letter_text: bool
    handler_timeout: float | str | None
    drain_timeout: float | str
    adaptive: AdaptivePolicy | None
    batch: BatchPolicy | None
    decode: Callable[[Message], Any] | None
    reconnect: RetryPolicy
    connect_timeout: float | str
    database: ConnectionPool | None


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionPool:
    """A database pool that handlers share: at the start, consumers check that it is large enough for their workers.

    Example:
        >>> ConnectionPool(name="orders-db", size=74).needed(workers=32, consumers=2)
        74

    Attributes:
        name: what the pool is called, in the warning.
        size: how many connections it has at most.
        spare: connections for everything else.
    """

    name: str
    size: int
    spare: int = 10

    def __post_init__(self) -> None:
        Checkup("ConnectionPool", self, {"name": _NAME, "size": Whole(), "spare": Whole(least=0)}).finish()

    def needed(self, workers: int, consumers: int = 1) -> int:
        """The connections that this number of workers in each consumer takes."""
        return workers * consumers + self.spare


INTAKE_RULES: dict[str, Rule] = {
    "workers": Whole(least=0),
    "prefetch": Whole(least=0),
    "prefetch_bytes": Bytes(),
    "ordered_by": _OrderRule(),
    "retry": Kind(wanted=RetryPolicy),
    "dead_letters": _Target(),
    "dead_letter_text": Flag(),
    "handler_timeout": Seconds(optional=True),
    "drain_timeout": Seconds(above=False),
    "adaptive": Kind(wanted=AdaptivePolicy, optional=True),
    "batch": Kind(wanted=BatchPolicy, optional=True),
    "decode": Function(parameters=("message",), may_be_class=True, optional=True),
    "reconnect": Kind(wanted=RetryPolicy),
    "connect_timeout": Seconds(),
    "database": Kind(wanted=ConnectionPool, optional=True),
}
