"""How an exporter is tuned: frozen values, checked whole before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, get_args

from batchqueue_async._support.checks import (
    MOST_ITEMS,
    Bytes,
    Checkup,
    Choice,
    Duration,
    Function,
    Kind,
    OptionalDuration,
    OptionalSize,
    Problem,
    Rule,
    Seconds,
    Whole,
    default,
    is_count,
    named_fields,
    settle,
)
from batchqueue_async.durable.config import DurableConfig
from batchqueue_async.export.policies import (
    AdaptivePolicy,
    BatchPolicy,
    BreakerPolicy,
    FailoverPolicy,
    RatePolicy,
    RetryPolicy,
    SplitPolicy,
)
from batchqueue_async.export.sizing import memory_share
from batchqueue_async.policies import MOST_WORKERS, OVERFLOWS, Overflow, WorkerPolicy, available_cpus

Ordering = Literal["any", "key", "order"]
DeadLetterHandler = Callable[[Sequence[Any], str], object]
"""Called with records that are given up and with the reason."""

_MIB = 1 << 20
MEMORY_BYTES = 256 * _MIB
DISK_BYTES = 1024 * _MIB
SENDS_PER_CORE = 8


_DURABLE = DurableConfig()
_BATCH = BatchPolicy()
_RETRY = RetryPolicy()
_BREAKER = BreakerPolicy()
_RATE = RatePolicy()
_WORKERS = WorkerPolicy.cpu_cores(2)


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """Everything that can be said about an exporter.

    Attributes:
        path: a directory for the send queue, which makes it durable; None keeps it in memory.
        durable: how the durable send queue behaves, but for `max_records`, `max_bytes`, `overflow`, `block_timeout` and
            the order, which are said here.
        max_records: records in the send queue, those under way included; None sets no limit.
        max_bytes: their bytes: in memory what Python takes for them, and 64 more for each record; on disk, everything
            in the directory. None is `durable.max_bytes`, or else 1 GiB on disk and 256 MiB in memory.
        overflow: what happens at these limits: `drop_oldest` (never what is under way; where that fills the queue, what
            comes in), `drop_newest` (what comes in; `consume` returns, the drop is counted), `block` (`consume` waits)
            or `reject` (it raises `QueueFullError`).
        block_timeout: seconds after which `block` rejects; None waits.
        batch: what a batch is made of.
        retry: when a failed batch is sent again.
        breaker: when sending stops.
        rate: how fast sends may follow each other.
        workers: how many batches are under way at once, if the sink's sends may overlap.
        sends_per_worker: sends that each worker has under way at most.
        max_sends: sends under way over all; when None 8 per core, and not below what `workers` asks for.
        adaptive: lets the number of workers follow the destination; `workers` is where it starts.
        split: prepares batches in threads before they are sent.
        failover: where batches go that ran out of attempts; for exporters without a path.
        ordering: `any`; `key`: records of one key reach the sink in their order, none while an earlier one waits for
            its repetition; `order`: all records do, one batch after the other. What the sink needs beyond `any` is kept
            without being asked for here, where the sink knows the key.
        key: for `ordering="key"`: from a record to its key.
        encode: makes bytes of a record for the disk; the default takes bytes, texts, structs, dataclasses, and
            whatever JSON has.
        decode: makes a record of these bytes again.
        send_timeout: seconds that one send may take, and one call of `on_dead_letter` or of another exporter for dead
            letters.
        auth_pause: seconds that sending pauses after an `AuthError` or `ConfigError`, before one batch tries again.
        drain_timeout: seconds that a shutdown may take to deliver what is left.
        on_dead_letter: called with records that are given up, and the reason; may be a coroutine function. With a path
            they are on disk by then.

    Example:
        >>> config = ExportConfig(max_records=100_000, overflow="block", retry=RetryPolicy(initial=0.5))
        >>> config.batch.max_records
        500
    """

    path: str | PathLike[str] | None = None
    durable: DurableConfig = _DURABLE
    max_records: int | None = None
    max_bytes: OptionalSize = default(None)
    overflow: Overflow = "drop_oldest"
    block_timeout: OptionalDuration = default(30.0)
    batch: BatchPolicy = _BATCH
    retry: RetryPolicy = _RETRY
    breaker: BreakerPolicy = _BREAKER
    rate: RatePolicy = _RATE
    workers: WorkerPolicy = _WORKERS
    sends_per_worker: int = 1
    max_sends: int | None = None
    adaptive: AdaptivePolicy | None = None
    split: SplitPolicy | None = None
    failover: FailoverPolicy | None = None
    ordering: Ordering = "any"
    key: Callable[[Any], Hashable] | None = None
    encode: Callable[[Any], bytes] | None = None
    decode: Callable[[bytes], Any] | None = None
    send_timeout: Duration = default(30.0)
    auth_pause: Duration = default(30.0)
    drain_timeout: Duration = default(30.0)
    on_dead_letter: DeadLetterHandler | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        settle(self, EXPORT_RULES)
        check = Checkup("ExportConfig", self, EXPORT_RULES)
        if check.sound("ordering", "key") and (self.ordering == "key") != (self.key is not None):
            rule = f"does not go with ordering={self.ordering!r}"
            check.fault("key", rule, "give a function with 'key' alone", besides=("ordering",))
        if check.sound("encode", "decode") and (self.encode is None) != (self.decode is None):
            rule = "is given without decode, or decode without it"
            check.fault("encode", rule, "give both or none", besides=("decode",))
        if self.failover is not None and check.sound("failover"):
            self._check_failover(check)
        check.finish()

    def _check_failover(self, check: Checkup) -> None:
        if self.path is not None:
            check.fault("failover", "is given with a path: the disk is the better place", "leave one of them out")
        if check.sound("retry") and self.retry.max_attempts is None and self.retry.max_age is None:
            check.fault("failover", "would never be used: retry has no end", "set retry.max_attempts or retry.max_age")
        if self.ordering != "any":
            rule = f"does not go with ordering={self.ordering!r}: what comes later would pass it"
            check.fault("failover", rule, "leave one of them out")

    @classmethod
    def for_memory(
        cls, share: float = 0.10, *, limit: int | None = None, limit_ratio: float = 0.85, **options: Any
    ) -> ExportConfig:
        """A configuration whose send queue may take a share of what the process may use.

        Args:
            share: the part of the usable memory for `max_bytes`.
            limit: the memory limit in bytes; by default the control group's, or the machine's memory.
            limit_ratio: the part of the limit that counts as usable.
            options: the other fields.

        Example:
            >>> ExportConfig.for_memory(0.10, limit=1_000_000_000).max_bytes
            85000000
        """
        return cls(max_bytes=memory_share(share, limit=limit, limit_ratio=limit_ratio), **options)

    @property
    def worker_count(self) -> int:
        """The workers, on this machine."""
        return self.workers.resolve()

    @property
    def send_limit(self) -> int:
        """The most sends under way over all, on this machine."""
        if self.max_sends is not None:
            return self.max_sends
        if self.split is not None:
            return max(SENDS_PER_CORE * available_cpus(), self.split.sender_count * self.split.sends_per_sender)
        most = self.worker_count if self.adaptive is None else max(self.worker_count, self.adaptive.most)
        return max(SENDS_PER_CORE * available_cpus(), most * self.sends_per_worker)

    @property
    def byte_limit(self) -> int:
        """The bytes that the send queue may hold."""
        if self.max_bytes is not None:
            return self.max_bytes
        if self.path is None:
            return MEMORY_BYTES
        return self.durable.max_bytes or DISK_BYTES


CHANGEABLE = (
    *("batch", "retry", "breaker", "rate", "workers", "sends_per_worker", "max_sends"),
    *("send_timeout", "auth_pause", "drain_timeout"),
)
"""The fields that can change while an exporter runs."""


def frozen_differences(name: str, now: ExportConfig, wanted: ExportConfig) -> list[str]:
    """In what a configuration differs from the present one that can't change while the exporter runs.

    Example:
        >>> frozen_differences("rows", ExportConfig(), ExportConfig(overflow="block"))
        ["exporter 'rows': overflow can't change while it runs; restart"]
    """
    found: list[str] = []
    if now.split is not None and now.max_sends != wanted.max_sends:
        found.append(f"exporter {name!r}: max_sends can't change while it runs and has split; restart")
    for each in EXPORT_RULES:
        if each in CHANGEABLE or getattr(now, each) == getattr(wanted, each):
            continue
        if each in ("max_records", "max_bytes"):
            before, after = (getattr(now, each), getattr(wanted, each))
            before, after = (now.byte_limit, wanted.byte_limit) if each == "max_bytes" else (before, after)
            if now.path is not None:
                found.append(f"exporter {name!r}: {each} of a queue on disk can't change while it runs; restart")
            elif before is None or (after is not None and after < before):
                found.append(f"exporter {name!r}: {each} can't be lowered while it runs; restart")
        else:
            found.append(f"exporter {name!r}: {each} can't change while it runs; restart")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Directory(Rule):
    """The name of a directory."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """It is a path."""
        if not isinstance(value, str | PathLike):
            yield Problem("is not a path", "give the name of a directory, or None")


def _example(text: str) -> Callable[[Any], str]:
    """How a policy is made from the number that was given in its place."""

    def example(value: Any) -> str:
        return text.format(value) if is_count(value, MOST_ITEMS) else ""

    return example


def _policy(wanted: type, example: str = "", *, optional: bool = False) -> Rule:
    return Kind(wanted=wanted, example=_example(example) if example else "", optional=optional)


EXPORT_RULES: dict[str, Rule] = {
    "path": _Directory(optional=True),
    "durable": _policy(DurableConfig, "DurableConfig(max_bytes={})"),
    "max_records": Whole(optional=True),
    "max_bytes": Bytes(optional=True),
    "overflow": Choice(words=OVERFLOWS),
    "block_timeout": Seconds(above=False, optional=True),
    "batch": _policy(BatchPolicy, "BatchPolicy(max_records={})"),
    "retry": _policy(RetryPolicy, "RetryPolicy(max_attempts={})"),
    "breaker": _policy(BreakerPolicy, "BreakerPolicy(threshold={})"),
    "rate": _policy(RatePolicy, "RatePolicy(requests={})"),
    "workers": _policy(WorkerPolicy, "WorkerPolicy.fixed({})"),
    "sends_per_worker": Whole(most=MOST_WORKERS),
    "max_sends": Whole(most=MOST_WORKERS, optional=True),
    "adaptive": _policy(AdaptivePolicy, "AdaptivePolicy(max_workers={})", optional=True),
    "split": _policy(SplitPolicy, "SplitPolicy(preparers={})", optional=True),
    "failover": _policy(FailoverPolicy, "FailoverPolicy(max_entries={})", optional=True),
    "ordering": Choice(words=get_args(Ordering)),
    "key": Function(parameters=("record",), may_be_class=True, optional=True),
    "encode": Function(parameters=("record",), may_be_class=True, optional=True),
    "decode": Function(parameters=("payload",), may_be_class=True, optional=True),
    "send_timeout": Seconds(),
    "auth_pause": Seconds(),
    "drain_timeout": Seconds(above=False),
    "on_dead_letter": Function(parameters=("records", "reason"), may_be_async=True, optional=True),
}
