"""How a queue is configured: frozen values, checked whole before anything starts.

>>> config = QueueConfig(workers=WorkerPolicy.fixed(2), partitions=PartitionPolicy.worker_multiply(2))
>>> config.validate("spans")
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar, get_type_hints

import msgspec

from batchqueue_async.config_file import Setting, nearest, read_call, read_settings, short
from batchqueue_async.errors import ConfigError
from batchqueue_async.policies import (
    PartitionPolicy,
    RoundRobin,
    Selector,
    TypeHash,
    WorkerPolicy,
    round_robin,
    throughput_weighted,
    type_hash,
)

T = TypeVar("T")


_ONE_PARTITION = PartitionPolicy.fixed(1)


class Consumer(Protocol[T]):
    """A handler as an object: `consume` takes each batch; an `async on_idle()`, if there is one, is a timer.

    Example:
        >>> class Writer:
        ...     async def consume(self, batch: list[str]) -> None:
        ...         print(len(batch))
    """

    async def consume(self, batch: list[T], /) -> object:
        """Handle one batch; what it raises goes to `on_error` with the batch."""
        ...


Handler = Callable[[list[T]], Awaitable[object]] | Consumer[T]
"""What takes batches: an async function of one batch, or a `Consumer`."""
ErrorHandler = Callable[[Sequence[T], BaseException], object]
"""What takes failed batches: a function, async or not, of the batch and the error."""


class DrainBalancer(Protocol):
    """Decides, from time to time, which worker owns which partition; `throughput_weighted` is the usual one.

    Example:
        >>> class BackToRoundRobin:
        ...     def assign(self, throughput: Sequence[int], owners: Sequence[int], workers: int) -> list[int] | None:
        ...         return [partition % workers for partition in range(len(owners))]
    """

    def assign(self, throughput: Sequence[int], owners: Sequence[int], workers: int) -> list[int] | None:
        """The new owner of each partition, or None to leave everything where it is.

        Args:
            throughput: items accepted by each partition since the last call.
            owners: the worker that owns each partition now.
            workers: how many workers there are; owners are numbered from 0.
        """
        ...


class BufferStrategy(Enum):
    """What `produce` does when the item's partition is full.

    Example:
        >>> QueueConfig(strategy=BufferStrategy.DROP_OLDEST).strategy.name
        'DROP_OLDEST'
    """

    BLOCKING = "blocking"
    """`produce` waits, first come, first served, up to `block_timeout`; `produce_nowait` refuses."""
    IF_POSSIBLE = "if_possible"
    """The item is refused; `produce` returns False at once."""
    DROP_OLDEST = "drop_oldest"
    """The oldest waiting item of the partition makes room, and is counted as dropped."""
    DROP_NEWEST = "drop_newest"
    """The new item is dropped and counted; `produce` returns False."""


@dataclass(frozen=True, slots=True)
class SharedScheduler:
    """A named event loop in its own thread, made by the manager on first reference and shared by all that name it.

    Example:
        >>> SharedScheduler("IO_POOL", WorkerPolicy.cpu_cores(0.5)).name
        'IO_POOL'

    Attributes:
        name: the scheduler's name within its manager.
        policy: how many handler calls run at once over all queues of the scheduler.
    """

    name: str
    policy: WorkerPolicy


@dataclass(frozen=True, kw_only=True)
class QueueConfig(Generic[T]):
    """Everything that can be said about a queue; `validate` says what is wrong with it.

    Example:
        >>> config = QueueConfig(buffer_size=2_000, max_batch=500, linger=0.05)
        >>> config.buffer_size
        2000

    Attributes:
        workers: how many drain tasks; they run on the loop that creates the queue. `fixed(1)` when neither this nor
            `scheduler` is given.
        scheduler: a shared scheduler to run on instead, with one drain task; at most one of the two is given.
        partitions: how many bounded partitions.
        selector: which partition an item goes to. None chooses by use: `round_robin()` where a single `consumer`
            takes everything, `type_hash()` where handlers take types.
        buffer_size: how many items each partition holds.
        strategy: what happens when a partition is full.
        block_timeout: how many seconds a `BLOCKING` produce waits for room before it is refused; None waits.
        consumer: the single handler of every batch; without it, handlers are added by type.
        fallback: the handler of items whose type has no handler.
        on_error: called, and awaited if need be, with each batch whose handler failed and with the error.
        max_batch: the most items that one handler call receives.
        linger: how many seconds the first item of a batch may wait for the batch to fill; a full one leaves at once.
        min_idle: the first sleep, in seconds, of a drain task that found nothing.
        max_idle: the longest sleep; each sleep is double the one before.
        handler_timeout: how many seconds a handler call may take; its batch then goes to `on_error`.
        drain_timeout: how many seconds a shutdown may take to handle what is left.
        balancer: moves partitions between workers as their load changes; None leaves them where they are.
        balance_interval: how many seconds pass between two calls of the balancer.
    """

    workers: WorkerPolicy | None = None
    scheduler: SharedScheduler | None = None
    partitions: PartitionPolicy = _ONE_PARTITION
    selector: Selector[T] | None = None
    buffer_size: int = 10_000
    strategy: BufferStrategy = BufferStrategy.BLOCKING
    block_timeout: float | None = None
    consumer: Handler[T] | None = None
    fallback: Handler[T] | None = None
    on_error: ErrorHandler[T] | None = None
    max_batch: int = 10_000
    linger: float = 0.0
    min_idle: float = 0.001
    max_idle: float = 0.050
    handler_timeout: float | None = None
    drain_timeout: float = 30.0
    balancer: DrainBalancer | None = None
    balance_interval: float = 10.0

    def __post_init__(self) -> None:
        if self.selector is None:
            chosen = TypeHash() if self.consumer is None else RoundRobin()
            object.__setattr__(self, "selector", chosen)

    def validate(self, name: str) -> None:
        """Raise `ConfigError`, naming queue, field, value and rule, for the first value that breaks a rule."""
        text: object = name  # whatever the annotation says, the caller may not be type-checked
        if not isinstance(text, str) or not text or not text.isprintable():
            raise ConfigError(f"queue {name!r}: name={name!r} is not a printable text; give the queue a name")
        _Checker(name, self).run()

    def differences(self, other: QueueConfig[Any]) -> list[str]:
        """The names of the fields in which two configurations differ."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]


def is_handler(value: object) -> bool:
    """Whether a value has the shape of a handler: a callable, or an object with `consume`."""
    return callable(value) or callable(getattr(value, "consume", None))


class _Checker:
    """The rules of a `QueueConfig`, each with a message that names queue, field, value, rule and way out."""

    def __init__(self, name: str, config: QueueConfig[Any]) -> None:
        self.name = name
        self.config = config

    def run(self) -> None:
        config = self.config
        self.kind("workers", WorkerPolicy, "a WorkerPolicy", optional=True)
        self.kind("scheduler", SharedScheduler, "a SharedScheduler", optional=True)
        if config.workers is not None and config.scheduler is not None:
            self.fail("scheduler", "is given beside workers", "give at most one of the two")
        if config.scheduler is not None:
            self.scheduler(config.scheduler)
        self.kind("partitions", PartitionPolicy, "a PartitionPolicy")
        self.kind("strategy", BufferStrategy, "a BufferStrategy")
        if not callable(config.selector):
            self.fail("selector", "is not callable", "give type_hash(), round_robin(), by_key(fn) or a function")
        self.handlers()
        self.whole("buffer_size")
        self.whole("max_batch")
        self.seconds("block_timeout", optional=True)
        self.seconds("linger", zero=True)
        self.seconds("min_idle")
        self.seconds("max_idle")
        if config.max_idle < config.min_idle:
            self.fail("max_idle", f"is below min_idle={config.min_idle}", "raise max_idle")
        self.seconds("handler_timeout", optional=True)
        self.seconds("drain_timeout", zero=True)
        self.seconds("balance_interval")
        if config.balancer is not None and not callable(getattr(config.balancer, "assign", None)):
            self.fail("balancer", "has no assign method", "give throughput_weighted() or an object with assign")

    def scheduler(self, scheduler: SharedScheduler) -> None:
        name: object = scheduler.name
        policy: object = scheduler.policy
        if not isinstance(name, str) or not name:
            self.fail("scheduler", "has no name", "give SharedScheduler a name")
        if not isinstance(policy, WorkerPolicy):
            self.fail("scheduler", "has no WorkerPolicy", "give SharedScheduler a WorkerPolicy")

    def handlers(self) -> None:
        config = self.config
        for field in ("consumer", "fallback"):
            if getattr(config, field) is not None and not is_handler(getattr(config, field)):
                self.fail(
                    field, "is no handler", "give an async callable(batch) or an object with async consume(batch)"
                )
        on_error: Any = config.on_error
        if on_error is not None and not callable(on_error):
            self.fail("on_error", "is not callable", "give a function of (batch, error)")
        if config.consumer is not None and config.fallback is not None:
            self.fail("fallback", "is given beside consumer, which takes every item", "give only one of the two")

    def fail(self, field: str, rule: str, way_out: str) -> None:
        value = getattr(self.config, field)
        raise ConfigError(f"queue {self.name!r}: {field}={value!r} {rule}; {way_out}")

    def kind(self, field: str, wanted: type, described: str, *, optional: bool = False) -> None:
        value = getattr(self.config, field)
        if not (isinstance(value, wanted) or (optional and value is None)):
            self.fail(field, f"is not {described}", f"give {described}")

    def whole(self, field: str) -> None:
        value = getattr(self.config, field)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(field, "is not a whole number", "give an int of 1 or more")
        if value < 1:
            self.fail(field, "is below 1", f"set {field} to 1 or more")

    def seconds(self, field: str, *, optional: bool = False, zero: bool = False) -> None:
        value = getattr(self.config, field)
        if optional and value is None:
            return
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self.fail(field, "is not a finite number of seconds", "give seconds as a float")
        if value < 0 or (value == 0 and not zero):
            self.fail(field, f"is {'below' if value < 0 else 'not above'} 0", f"set {field} to a positive number")


# -- queues from a file, the environment and overrides -----------------------------------------------------------------

_FROM_CODE = ("consumer", "fallback", "on_error")
_WORKERS = {kind: getattr(WorkerPolicy, kind) for kind in ("fixed", "cpu_cores", "cpu_cores_with_base", "io_bound")}
_PARTITIONS = {kind: getattr(PartitionPolicy, kind) for kind in ("fixed", "worker_multiply", "adaptive")}
_SELECTORS = {"round_robin": round_robin, "type_hash": type_hash}


class _SchedulerSection(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    policy: Any


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    prefix: str = "BATCHQUEUE_",
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, QueueConfig[Any]]:
    """The configurations of queues, by name, from a YAML file, the environment and overrides; the later one wins.

    A file has one section, `queues`, with the fields of `QueueConfig` under each queue's name. The environment has
    `BATCHQUEUE_QUEUES__SPANS__MAX_BATCH=500` for `max_batch` of "spans". Handlers are code: only overrides hold them.

    Args:
        path: a YAML file; reading one needs the extra `batchqueue-async[yaml]`. None reads none.
        environ: the environment variables; those of the process when None.
        prefix: what the names of the environment variables begin with.
        overrides: fields by queue name, as in the file, or the objects themselves.

    Raises:
        ConfigError: the file can't be read, or a value is not what it should be; names file, queue, field and value.

    Example:
        >>> environ = {"BATCHQUEUE_QUEUES__SPANS__WORKERS": "cpu_cores(0.5)"}
        >>> configs = load_config(environ=environ, overrides={"spans": {"max_batch": 500}})
        >>> str(configs["spans"].workers), configs["spans"].max_batch
        ('cpu_cores(0.5)', 500)
    """
    configs: dict[str, QueueConfig[Any]] = {}
    # As a default value the environment, secrets and all, would stand in every printed signature.
    variables = os.environ if environ is None else environ
    for queue, settings in read_settings(path, variables, prefix, overrides).items():
        values = {field: _field(queue, field, setting) for field, setting in settings.items()}
        configs[queue] = QueueConfig(**values)
        try:
            configs[queue].validate(queue)
        except ConfigError as error:
            origins = dict.fromkeys(setting.origin for setting in settings.values())
            raise ConfigError(f"{' and '.join(origins)}: {error}") from None
    return configs


def _field(queue: str, field: str, setting: Setting) -> Any:
    names = [each.name for each in fields(QueueConfig)]
    subject = f"{setting.origin}: queue {queue!r}"
    if field not in names:
        raise ConfigError(f"{subject}: {field} is no field of a queue; {nearest(field, names)}")
    if field in _FROM_CODE and setting.layer != "code":
        raise ConfigError(
            f"{subject}: {field} is code, which no file or variable can hold; "
            f"give it as overrides={{{queue!r}: {{{field!r}: ...}}}}"
        )
    try:
        return _value(field, setting)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{subject}: {field}={short(setting.value)}: {error}") from None


def _value(field: str, setting: Setting) -> Any:
    value = setting.value
    hint = _hints()[field]
    if hint in (int, float, float | None):
        try:
            return msgspec.convert(value, hint, strict=setting.layer != "environment")
        except msgspec.ValidationError as error:
            unit = "a whole number, such as 500" if hint is int else "seconds as a plain number, such as 0.05"
            raise ValueError(f"{error}; give {unit}") from None
    return value if value is None or field in _FROM_CODE else _OBJECTS[field](value)


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(QueueConfig)


def _policy(kind: type, makers: Mapping[str, Callable[..., Any]]) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else read_call(value, makers)


def _scheduler(value: Any) -> SharedScheduler:
    if isinstance(value, SharedScheduler):
        return value
    section = msgspec.convert(value, _SchedulerSection)
    return SharedScheduler(section.name, _OBJECTS["workers"](section.policy))


def _selector(value: Any) -> Any:
    if isinstance(value, str) and value.strip().startswith("by_key"):
        raise ValueError("by_key needs a function, which is code; give selector=by_key(fn) in overrides")
    return value if callable(value) else read_call(value, _SELECTORS)


def _strategy(value: Any) -> BufferStrategy:
    if isinstance(value, BufferStrategy):
        return value
    names = [each.value for each in BufferStrategy]
    if not isinstance(value, str) or value.lower() not in names:
        raise ValueError(f"is no strategy; {nearest(str(value).lower(), names)}")
    return BufferStrategy(value.lower())


def _balancer(value: Any) -> Any:
    is_balancer = callable(getattr(value, "assign", None))
    return value if is_balancer else read_call(value, {"throughput_weighted": throughput_weighted})


_OBJECTS: dict[str, Callable[[Any], Any]] = {
    "workers": _policy(WorkerPolicy, _WORKERS),
    "scheduler": _scheduler,
    "partitions": _policy(PartitionPolicy, _PARTITIONS),
    "selector": _selector,
    "strategy": _strategy,
    "balancer": _balancer,
}
