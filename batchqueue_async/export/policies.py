"""The exporter's policies, a frozen value for each: batches, retries, breaker, workers, stages, failover."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchqueue_async._support.checks import (
    Bytes,
    Checkup,
    Duration,
    Flag,
    Function,
    Kind,
    OptionalDuration,
    Real,
    Rule,
    Seconds,
    Size,
    Whole,
    default,
    named_fields,
    settle,
)
from batchqueue_async.policies import MOST_WORKERS, available_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MIB = 1 << 20
WORKERS_PER_CORE = 4
FAILOVER_BYTES = 256 * _MIB


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """What a batch for the sink is made of: records of several `consume` calls, or a part of one.

    Attributes:
        max_records: the most records of a batch; a full one leaves at once.
        max_bytes: the most bytes of a batch, as the send queue holds them; a larger record goes alone.
        linger: seconds that a record may wait in the send queue for its batch to fill. It is the price of larger
            batches where records come in small ones: 0 sends what there is.

    Example:
        >>> BatchPolicy(max_records=1_000, linger=0.05).max_bytes
        4194304
    """

    max_records: int = 500
    max_bytes: Size = default(4 * _MIB)
    linger: Duration = default(0.2)

    def __post_init__(self) -> None:
        settle(self, BATCH_RULES)
        Checkup("BatchPolicy", self, BATCH_RULES).finish()


BATCH_RULES: dict[str, Rule] = {
    "max_records": Whole(),
    "max_bytes": Bytes(),
    "linger": Seconds(above=False),
}


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudget:
    """How many batches may be sent again while they fail: a bucket of tokens, one for each repetition.

    A repetition that succeeds gives its token back, so the budget limits only those that fail. Without a token the
    batch waits; it is never dropped for that.

    Attributes:
        per_second: tokens that come by themselves.
        share: tokens that each batch delivered at the first attempt brings.
        burst: tokens that the bucket holds, and starts with.

    Example:
        >>> RetryBudget(per_second=2.0).burst
        100
    """

    per_second: float = 10.0
    share: float = 0.1
    burst: int = 100

    def __post_init__(self) -> None:
        Checkup("RetryBudget", self, BUDGET_RULES).finish()


BUDGET_RULES: dict[str, Rule] = {"per_second": Real(), "share": Real(above=False), "burst": Whole()}
_BUDGET = RetryBudget()


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a batch that failed is sent again, and when no more.

    Attributes:
        initial: seconds before the first repetition.
        multiplier: by which the delay grows with each attempt.
        max_delay: the longest delay, for the destination's own `retry_after` too.
        jitter: draw each delay between 0 and what it would be, so that batches that failed together return apart.
        max_attempts: sends of a record, those before a restart included, after which it goes to the dead letters (or
            into the failover queue); None sends for ever. An attempt that met an `AuthError` does not count.
        max_crashes: with a path, sends of a record alone that the process did not survive, one after the other, after
            which it goes to the dead letters; None sends for ever.
        max_age: seconds after `consume`, likewise; a record is always sent once.
        budget: bounds the repetitions while they fail; None does not.
        isolate: find the records that are the reason where a batch is refused for good, so that they alone go to the
            dead letters: those that the error names, or by halving. False gives the whole batch up.
        isolation_sends: extra sends for that in a row; the rest of the batch goes on later, none of it is given up.

    Example:
        >>> RetryPolicy(initial=1.0, max_attempts=10).max_delay
        300.0
    """

    initial: Duration = default(5.0)
    multiplier: float = 2.0
    max_delay: Duration = default(300.0)
    jitter: bool = True
    max_attempts: int | None = None
    max_crashes: int | None = 5
    max_age: OptionalDuration = default(None)
    budget: RetryBudget | None = _BUDGET
    isolate: bool = True
    isolation_sends: int = 128

    def __post_init__(self) -> None:
        settle(self, RETRY_RULES)
        check = Checkup("RetryPolicy", self, RETRY_RULES)
        if check.sound("initial", "max_delay") and self.max_delay < self.initial:
            check.fault("max_delay", f"is below initial={self.initial}", "raise max_delay", besides=("initial",))
        check.finish()


RETRY_RULES: dict[str, Rule] = {
    "initial": Seconds(),
    "multiplier": Real(least=1.0, above=False),
    "max_delay": Seconds(),
    "jitter": Flag(),
    "max_attempts": Whole(optional=True),
    "max_crashes": Whole(least=2, optional=True),
    "max_age": Seconds(optional=True),
    "budget": Kind(wanted=RetryBudget, optional=True),
    "isolate": Flag(),
    "isolation_sends": Whole(least=2),
}


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When sending stops because the destination is not well.

    Attributes:
        enabled: whether there is a breaker at all.
        threshold: failures in a row that open it. Only those of the destination's health count: an answer that
            refuses a batch is an answer.
        reset_timeout: seconds that it stays open; then one batch is sent as a probe.
        ramp: after the probe, let one batch more be under way with each success, doubling, up to all workers.

    Example:
        >>> BreakerPolicy(threshold=3).reset_timeout
        30.0
    """

    enabled: bool = True
    threshold: int = 5
    reset_timeout: Duration = default(30.0)
    ramp: bool = True

    def __post_init__(self) -> None:
        settle(self, BREAKER_RULES)
        Checkup("BreakerPolicy", self, BREAKER_RULES).finish()


BREAKER_RULES: dict[str, Rule] = {
    "enabled": Flag(),
    "threshold": Whole(),
    "reset_timeout": Seconds(),
    "ramp": Flag(),
}


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RatePolicy:
    """How fast sends may follow each other.

    Attributes:
        requests: the most sends per second; None sets no limit.
        bytes: the most bytes per second, as the send queue weighs them; likewise.
        learn: find the rate that the destination takes from its refusals (`ThrottledError`, or a `retry_after`), and
            keep a little below it.

    Example:
        >>> RatePolicy(requests=100.0).learn
        True
    """

    requests: float | None = None
    bytes: float | None = None
    learn: bool = True

    def __post_init__(self) -> None:
        settle(self, RATE_RULES)


RATE_RULES: dict[str, Rule] = {
    "requests": Real(optional=True),
    "bytes": Real(optional=True),
    "learn": Flag(),
}


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePolicy:
    """How the number of workers follows the destination: one more while it keeps up, a share less when it doesn't.

    Attributes:
        min_workers: the least.
        max_workers: the most; 4 per core when None.
        alpha: the weight of the newest latency in the moving average (EWMA).
        tolerance: the average latency, as a multiple of what the destination has shown it can do, above which workers
            are taken away.
        decrease: the share of the workers that is left after an error or a latency above that.
        interval: seconds between two changes.

    Example:
        >>> AdaptivePolicy(max_workers=16).min_workers
        1
    """

    min_workers: int = 1
    max_workers: int | None = None
    alpha: float = 0.3
    tolerance: float = 2.0
    decrease: float = 0.5
    interval: Duration = default(1.0)

    def __post_init__(self) -> None:
        settle(self, ADAPTIVE_RULES)
        check = Checkup("AdaptivePolicy", self, ADAPTIVE_RULES)
        if check.sound("min_workers", "max_workers") and self.most < self.min_workers:
            rule = f"is above max_workers={self.most}"
            check.fault("min_workers", rule, "lower it, or raise max_workers", besides=("max_workers",))
        check.finish()

    @property
    def most(self) -> int:
        """The most workers, on this machine."""
        if self.max_workers is not None:
            return self.max_workers
        return max(self.min_workers, WORKERS_PER_CORE * available_cpus())


ADAPTIVE_RULES: dict[str, Rule] = {
    "min_workers": Whole(most=MOST_WORKERS),
    "max_workers": Whole(most=MOST_WORKERS, optional=True),
    "alpha": Real(most=1.0),
    "tolerance": Real(least=1.0),
    "decrease": Real(most=1.0),
    "interval": Seconds(),
}


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPolicy:
    """A pipeline of two stages: preparers, which compute in threads, and senders, which wait for the network.

    What a preparer does is the sink's `prepare`, if it has one, or `prepare` here; and the decoding of what comes from
    a disk.

    Attributes:
        preparers: batches that are prepared at once; one per core when None.
        senders: 2 per core when None.
        channel: prepared batches that may wait for a sender.
        sends_per_sender: sends that each sender has under way at most.
        prepare: makes what is sent from the records of a batch, in a thread: as many records, in their order.

    Example:
        >>> SplitPolicy(preparers=2, senders=4).channel
        256
    """

    preparers: int | None = None
    senders: int | None = None
    channel: int = 256
    sends_per_sender: int = 4
    prepare: Callable[[list[Any]], Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        Checkup("SplitPolicy", self, SPLIT_RULES).finish()

    @property
    def preparer_count(self) -> int:
        """The preparers, on this machine."""
        return self.preparers or available_cpus()

    @property
    def sender_count(self) -> int:
        """The senders, on this machine."""
        return self.senders or 2 * available_cpus()


SPLIT_RULES: dict[str, Rule] = {
    "preparers": Whole(most=MOST_WORKERS, optional=True),
    "senders": Whole(most=MOST_WORKERS, optional=True),
    "channel": Whole(),
    "sends_per_sender": Whole(most=MOST_WORKERS),
    "prepare": Function(parameters=("records",), may_be_class=True, optional=True),
}


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverPolicy:
    """A last place in memory for batches that ran out of attempts, for exporters without a disk.

    Attributes:
        max_entries: batches that it holds; the oldest makes room for a new one.
        max_bytes: their bytes, likewise.
        interval: seconds between two looks into it.
        drain: batches that each look tries to send.

    Example:
        >>> FailoverPolicy(max_entries=100).interval
        5.0
    """

    max_entries: int = 1_000
    max_bytes: Size = default(FAILOVER_BYTES)
    interval: Duration = default(5.0)
    drain: int = 10

    def __post_init__(self) -> None:
        settle(self, FAILOVER_RULES)
        Checkup("FailoverPolicy", self, FAILOVER_RULES).finish()


FAILOVER_RULES: dict[str, Rule] = {
    "max_entries": Whole(),
    "max_bytes": Bytes(),
    "interval": Seconds(),
    "drain": Whole(),
}
