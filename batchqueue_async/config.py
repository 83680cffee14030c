"""How a queue is configured: frozen values, checked whole before anything starts.

>>> config = QueueConfig(workers=WorkerPolicy.fixed(2), partitions=PartitionPolicy.worker_multiply(2))
>>> config.validate("spans")
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

from batchqueue_async._support.checks import (
    Bytes,
    Checkup,
    Choice,
    Duration,
    ErrorHandlerRule,
    Function,
    HandlerRule,
    Kind,
    Layer,
    OptionalDuration,
    OptionalSize,
    Problem,
    Real,
    Rule,
    Seconds,
    Settable,
    UnreadableError,
    Whole,
    default,
    faults_of,
    is_count,
    named_fields,
    refuse,
    settle,
)
from batchqueue_async._support.handlers import handler_problem
from batchqueue_async._support.wording import clip, closest, nearest, short
from batchqueue_async.config_file import PREFIX, Section, Setting, read_call, read_settings
from batchqueue_async.errors import ConfigError, ConfigFault
from batchqueue_async.policies import (
    MOST_PARTITIONS,
    MOST_WORKERS,
    OVERFLOWS,
    Overflow,
    PartitionPolicy,
    RoundRobin,
    Selector,
    WorkerPolicy,
    round_robin,
    throughput_weighted,
    type_hash,
)

T = TypeVar("T")


_ONE_PARTITION = PartitionPolicy.fixed(1)


class Consumer(Protocol[T]):
    """A handler as an object: `consume` takes each batch.

    An `async on_idle()`, if there is one, is called whenever the queue has nothing to do: a timer. An
    `async on_close()`, if there is one, is called once when the queue shuts down, after the last batch and within the
    drain's deadline: the place for what the handler still holds.

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
"""What takes failed batches: a function, async or not, of the batch and the error; it may answer `RETRY`."""


class Again(Enum):
    """What an `on_error` answers that wants its batch to come again."""

    RETRY = "retry"


RETRY: Final = Again.RETRY
"""Answered by `on_error`: the batch comes again after a backoff, as `QueueConfig.retry` says."""


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


_STRATEGIES: dict[BufferStrategy, Overflow] = {
    BufferStrategy.BLOCKING: "block",
    BufferStrategy.IF_POSSIBLE: "reject",
    BufferStrategy.DROP_OLDEST: "drop_oldest",
    BufferStrategy.DROP_NEWEST: "drop_newest",
}
_WORDS: dict[str, BufferStrategy] = {word: strategy for strategy, word in _STRATEGIES.items()}


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


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerRetry:
    """When a batch comes again whose handler raised `RetryableError`, or whose `on_error` asked for it.

    Example:
        >>> retry = HandlerRetry(initial="200ms", max_attempts=4)
        >>> [retry.delay(attempt) for attempt in (1, 2, 3)]
        [0.2, 0.4, 0.8]

    Attributes:
        initial: seconds between the first call and the second.
        multiplier: by which the delay grows with each further call.
        max_delay: the longest delay, for the handler's own `retry_after` too.
        max_attempts: the most calls for one batch, the first one included; 1 never repeats one.
    """

    initial: Duration = default(0.1)
    multiplier: float = 2.0
    max_delay: Duration = default(60.0)
    max_attempts: int = 5

    def __post_init__(self) -> None:
        settle(self, HANDLER_RETRY_RULES)
        check = Checkup("HandlerRetry", self, HANDLER_RETRY_RULES)
        if check.sound("initial", "max_delay") and self.max_delay < self.initial:
            check.fault("max_delay", f"is below initial={self.initial}", "raise max_delay", besides=("initial",))
        check.finish()

    def delay(self, attempt: int) -> float:
        """The seconds to wait after call number `attempt`, from 1 on, has failed."""
        try:
            return min(self.max_delay, self.initial * self.multiplier ** (attempt - 1))
        except OverflowError:
            return self.max_delay


_MOST_ATTEMPTS = 1_000
HANDLER_RETRY_RULES: dict[str, Rule] = {
    "initial": Seconds(),
    "multiplier": Real(least=1.0, above=False),
    "max_delay": Seconds(),
    "max_attempts": Whole(most=_MOST_ATTEMPTS),
}
_HANDLER_RETRY = HandlerRetry()


class _Settled(NamedTuple):
    """How a configuration understood what it was given for a full partition."""

    strategy: BufferStrategy
    overflow: Overflow


@named_fields
@dataclass(frozen=True, kw_only=True)
class QueueConfig(Generic[T]):
    """Everything that can be said about a queue; `validate` says what is wrong with it.

    A configuration is a value: queues made from the same one share nothing, and `dataclasses.replace` changes the
    fields that it names, and the defaults that follow from them.

    Example:
        >>> config = QueueConfig(buffer_size=2_000, max_batch=500, linger="50ms", overflow="drop_oldest")
        >>> config.linger, config.strategy.name
        (0.05, 'DROP_OLDEST')

    Attributes:
        workers: how many drain tasks; they run on the loop that creates the queue. `fixed(1)` when neither this nor
            `scheduler` is given.
        scheduler: a shared scheduler to run on instead, with one drain task; at most one of the two is given.
        partitions: how many bounded partitions.
        selector: which partition an item goes to. None chooses by use: `round_robin()` where a single `consumer`
            takes everything, `type_hash()` where handlers take types.
        buffer_size: how many items each partition holds.
        strategy: what happens when a partition is full; `BLOCKING` when neither this nor `overflow` is given.
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
        overflow: the same as `strategy` in the words that exporters and durable queues use: `block` (`BLOCKING`),
            `reject` (`IF_POSSIBLE`), `drop_oldest`, `drop_newest`. Either may be given; both can be read.
        buffer_bytes: how many bytes each partition holds, next to `buffer_size`; None bounds the items alone.
        size_of: for `buffer_bytes`: from an item to its bytes, such as `len` for items that are bytes. It is called as
            items come in, maybe more than once for one item; what it says as the item gets its place counts.
        feeds: the names of the queues that this queue's handlers produce into; they are shut down after it.
        log_errors: whether log events about failed handlers carry the errors' texts ("full"), which may quote items,
            or only their classes and places ("redacted").
        retry: when a batch comes again whose handler raised `RetryableError`.
    """

    workers: WorkerPolicy | None = None
    scheduler: SharedScheduler | None = None
    partitions: PartitionPolicy = _ONE_PARTITION
    selector: Selector[T] | None = None
    buffer_size: int = 10_000
    strategy: Settable[BufferStrategy, BufferStrategy | None] = default(None)
    block_timeout: OptionalDuration = default(None)
    consumer: Handler[T] | None = None
    fallback: Handler[T] | None = None
    on_error: ErrorHandler[T] | None = None
    max_batch: int = 10_000
    linger: Duration = default(0.0)
    min_idle: Duration = default(0.001)
    max_idle: Duration = default(0.050)
    handler_timeout: OptionalDuration = default(None)
    drain_timeout: Duration = default(30.0)
    balancer: DrainBalancer | None = None
    balance_interval: Duration = default(10.0)
    overflow: Settable[Overflow, Overflow | None] = default(None)
    buffer_bytes: OptionalSize = default(None)
    size_of: Callable[[T], int] | None = None
    feeds: Settable[tuple[str, ...], str | Collection[str]] = default(())
    log_errors: Literal["redacted", "full"] = "redacted"
    retry: HandlerRetry = _HANDLER_RETRY
    # What `strategy` and `overflow` were in the configuration that `dataclasses.replace` copies: it gives the copy the
    # values of all fields, so that only this tells a field that it changes from one that it carries over.
    _settled: _Settled | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        settle(self, QUEUE_RULES)
        settled = _settle_overflow(self.strategy, self.overflow, self._settled)
        object.__setattr__(self, "strategy", settled.strategy)
        object.__setattr__(self, "overflow", settled.overflow)
        object.__setattr__(self, "_settled", settled)

    def validate(self, name: str) -> None:
        """Raise one `ConfigError` that names each field that breaks a rule, its value, the rule and the way out."""
        refuse(_faults(name, self))

    def make_selector(self) -> Selector[T]:
        """The selector for one queue: the one that is given or follows from the use, with a state of its own.

        Example:
            >>> config = QueueConfig(selector=round_robin())
            >>> first, second = config.make_selector(), config.make_selector()
            >>> [first("item", 3), first("item", 3), second("item", 3)]
            [0, 1, 0]
        """
        if self.selector is None:
            return type_hash() if self.consumer is None else round_robin()
        return self.selector.fresh() if isinstance(self.selector, RoundRobin) else self.selector

    def differences(self, other: QueueConfig[Any]) -> list[str]:
        """The names of the fields in which two configurations differ."""
        names = [each for each in _FIELDS if each != "selector" and getattr(self, each) != getattr(other, each)]
        if self.make_selector() != other.make_selector():
            names.append("selector")
        return sorted(names, key=_FIELDS.index)


def _settle_overflow(strategy: Any, overflow: Any, before: _Settled | None) -> _Settled:
    """Both ways to say what happens when a partition is full, each as it follows from the other.

    What is not understood, or contradicts itself, stays as it is, for `validate` to name.
    """
    if before is not None and None not in (strategy, overflow):
        carried = (strategy is before.strategy, overflow == before.overflow)
        if carried == (True, False):
            strategy = None
        elif carried == (False, True):
            overflow = None
    if overflow is None:
        kept = BufferStrategy.BLOCKING if strategy is None else strategy
        return _Settled(kept, _STRATEGIES[kept] if isinstance(kept, BufferStrategy) else "block")
    if strategy is None:
        word: object = overflow
        strategy = _WORDS.get(word, BufferStrategy.BLOCKING) if isinstance(word, str) else BufferStrategy.BLOCKING
    return _Settled(strategy, overflow)


def is_handler(value: object) -> bool:
    """Whether a value can be a handler."""
    return handler_problem(value) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """How one handler is called; what is None is as the queue has it.

    Attributes:
        weight: how much it adds to the number of partitions under `PartitionPolicy.adaptive`.
        max_batch: the most items per call, at most the queue's own.
        linger: how many seconds the first item of a batch may wait for more.
        timeout: how many seconds a call may take.
    """

    weight: float = 1.0
    max_batch: int | None = None
    linger: OptionalDuration = default(None)
    timeout: OptionalDuration = default(None)

    def __post_init__(self) -> None:
        settle(self, HANDLER_OPTION_RULES)


HANDLER_OPTION_RULES: dict[str, Rule] = {
    "weight": Real(most=MOST_PARTITIONS),
    "max_batch": Whole(optional=True),
    "linger": Seconds(above=False, optional=True),
    "timeout": Seconds(optional=True),
}


def check_handler(subject: str, handler: object, options: HandlerOptions, *, most: int) -> None:
    """Raise `ConfigError`, beginning with `subject`, for everything that is wrong with a handler and its options."""
    check = Checkup(subject, options, HANDLER_OPTION_RULES)
    if check.sound("max_batch") and options.max_batch is not None and options.max_batch > most:
        check.fault("max_batch", f"is above the queue's max_batch={most}", "raise the queue's max_batch")
    refuse([*faults_of(subject, "handler", handler, HandlerRule()), *check.faults])


# -- the rules of the fields -------------------------------------------------------------------------------------------


def _worker_example(value: Any) -> str:
    if isinstance(value, float) and 0 < value <= MOST_WORKERS:
        return f"WorkerPolicy.cpu_cores({value})"
    return f"WorkerPolicy.fixed({value if is_count(value, MOST_WORKERS) else 4})"


def _partition_example(value: Any) -> str:
    return f"PartitionPolicy.fixed({value if is_count(value, MOST_PARTITIONS) else 4})"


def _scheduler_example(value: Any) -> str:
    is_name = isinstance(value, str) and value and short(value) == repr(value)
    name = value if is_name else "IO_POOL"
    return f"SharedScheduler({name!r}, {_worker_example(value)})"


def _retry_example(value: Any) -> str:
    return f"HandlerRetry(max_attempts={value if is_count(value, _MOST_ATTEMPTS) else 5})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRule(Kind):
    """A policy; in a file it is written as the call that makes it."""

    makers: Mapping[str, Callable[..., Any]]

    def read(self, value: Any, layer: Layer) -> Any:  # noqa: ARG002 - a rule's signature
        """What a text, a mapping or a number stands for."""
        return value if value is None or isinstance(value, self.wanted) else read_call(value, self.makers)


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedRule(Kind):
    """An object with fields of its own; in a file it is a mapping.

    Attributes:
        rules: of its fields.
        needed: the fields that have no default.
    """

    rules: Mapping[str, Rule]
    needed: tuple[str, ...] = ()

    def read(self, value: Any, layer: Layer) -> Any:
        """The object that a mapping describes."""
        if value is None or isinstance(value, self.wanted):
            return value
        if not isinstance(value, Mapping):
            names = ", ".join(f"{name}: ..." for name in self.rules)
            raise UnreadableError(Problem("is not a mapping", f"write {{{names}}}"))
        section: Mapping[Any, Any] = {**value}
        places = value.places if isinstance(value, Section) else {}
        problems = list(self._misnamed(section))
        values: dict[str, Any] = {}
        for name, rule in self.rules.items():
            if name in section:
                # A mapping in the environment is JSON, so its numbers are numbers.
                values[name], found = _read_inner(rule, name, section[name], "code" if layer == "code" else "file")
                problems += found
        if not problems:
            try:
                return self.wanted(**values)
            except ConfigError as error:
                problems = [Problem(each.rule, each.way_out, f".{each.path}", each.value) for each in error.faults]
        raise UnreadableError(*[each._replace(origin=places.get(each.path.split(".")[1])) for each in problems])

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is an object of the class, and its fields are sound."""
        yield from Kind.judge(self, name, value)  # super() means another class where a dataclass has slots
        if isinstance(value, self.wanted):
            for inner, rule in self.rules.items():
                held = getattr(value, inner)
                yield from _inside(inner, held, rule.problems(inner, held))

    def _misnamed(self, section: Mapping[Any, Any]) -> Iterator[Problem]:
        for name in section:
            if name not in self.rules:
                label = name if isinstance(name, str) else short(name)
                yield Problem("is unknown", nearest(label, self.rules), f".{clip(label)}", "")
        for name in self.needed:
            if name not in section:
                yield Problem("is missing", f"write {name}: ...", f".{name}", "")


def _read_inner(rule: Rule, name: str, value: Any, layer: Layer) -> tuple[Any, list[Problem]]:
    """The value of a field inside another one, and what is wrong with it."""
    try:
        read = rule.read(value, layer)
        problems = list(rule.problems(name, read))
    except UnreadableError as error:
        read, problems = None, [*error.problems]
    return read, list(_inside(name, value, problems))


def _inside(name: str, value: Any, problems: Iterable[Problem]) -> Iterator[Problem]:
    """What is wrong with a field, said of the object that it is in."""
    for each in problems:
        yield each._replace(path=f".{name}{each.path}", value=short(value) if each.value is None else each.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text(Rule):
    """A text that can be printed, and is not empty."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is one."""
        if not _are_texts((value,)):
            yield Problem("is not a printable text", f"set {name} to one")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorRule(Function):
    """A selector; in a file it is one of two words."""

    def read(self, value: Any, layer: Layer) -> Any:  # noqa: ARG002 - a rule's signature
        """The selector that a word stands for."""
        if value is None or callable(value):
            return value
        if isinstance(value, str) and value.strip().startswith("by_key"):
            raise UnreadableError(Problem("needs a function, which is code", "give selector=by_key(fn) in overrides"))
        return read_call(value, {"round_robin": round_robin, "type_hash": type_hash})

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a function of item and number of partitions."""
        way_out = "give type_hash(), round_robin(), by_key(fn) or a function of (item, partition_count)"
        for problem in Function.judge(self, name, value):
            yield problem._replace(way_out=way_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SizeOf(Function):
    """A function from an item to its bytes; in a file it is the word `len`."""

    def read(self, value: Any, layer: Layer) -> Any:  # noqa: ARG002 - a rule's signature
        """The function that the word stands for."""
        if value is None or callable(value):
            return value
        return read_call(value, {"len": lambda: len})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strategy(Rule):
    """A strategy; in a file it is a word."""

    def read(self, value: Any, layer: Layer) -> Any:  # noqa: ARG002 - a rule's signature
        """The strategy that a word stands for."""
        if value is None or isinstance(value, BufferStrategy):
            return value
        word = value.lower() if isinstance(value, str) else ""
        names = [each.value for each in BufferStrategy]
        if word not in names:
            raise UnreadableError(Problem("is not a strategy", nearest(word, names)))
        return BufferStrategy(word)

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """It is one."""
        if not isinstance(value, BufferStrategy):
            word = value.lower() if isinstance(value, str) else ""
            by_value = {each.value: each for each in BufferStrategy}
            meant = _WORDS.get(word) or by_value.get(word, BufferStrategy.DROP_OLDEST)
            way_out = (
                f"give a BufferStrategy such as BufferStrategy.{meant.name}, or say overflow={_STRATEGIES[meant]!r}"
            )
            yield Problem("is not a BufferStrategy", way_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Balancer(Rule):
    """A balancer; in a file it is written as the call that makes it."""

    def read(self, value: Any, layer: Layer) -> Any:  # noqa: ARG002 - a rule's signature
        """The balancer that a text stands for."""
        if value is None or callable(getattr(value, "assign", None)):
            return value
        return read_call(value, {"throughput_weighted": throughput_weighted})

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """It is an object with `assign`."""
        way_out = "give throughput_weighted() or an object with assign"
        if isinstance(value, type):
            yield Problem("is a class", way_out)
        elif not callable(getattr(value, "assign", None)):
            yield Problem("has no assign method", way_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names(Rule):
    """Names of queues."""

    def settle(self, value: Any) -> Any:
        """All names, once each; a text is one name."""
        if isinstance(value, str):
            return (value,) if _are_texts((value,)) else value
        if not isinstance(value, list | tuple | set | frozenset):
            return value
        names = cast("Collection[Any]", value)
        return tuple(dict.fromkeys(names)) if _are_texts(names) else names

    def read(self, value: Any, layer: Layer) -> Any:
        """The names; in the environment they are separated by commas."""
        if layer == "environment" and isinstance(value, str):
            return self.settle([name.strip() for name in value.split(",") if name.strip()])
        return self.settle(value)

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """They are texts that can be printed."""
        if not isinstance(value, tuple) or not _are_texts(cast("Collection[Any]", value)):
            yield Problem("is not the name of a queue, or a list of names", "give a text, or a tuple of texts")


def _are_texts(values: Collection[object]) -> bool:
    return all(isinstance(each, str) and each and each.isprintable() for each in values)


WORKERS_RULE = PolicyRule(
    wanted=WorkerPolicy,
    example=_worker_example,
    makers={kind: getattr(WorkerPolicy, kind) for kind in ("fixed", "cpu_cores", "cpu_cores_with_base", "io_bound")},
)
QUEUE_RULES: dict[str, Rule] = {
    "workers": replace(WORKERS_RULE, optional=True),
    "scheduler": NestedRule(
        wanted=SharedScheduler,
        example=_scheduler_example,
        rules={"name": _Text(), "policy": WORKERS_RULE},
        needed=("name", "policy"),
        optional=True,
    ),
    "partitions": PolicyRule(
        wanted=PartitionPolicy,
        example=_partition_example,
        makers={kind: getattr(PartitionPolicy, kind) for kind in ("fixed", "worker_multiply", "adaptive")},
    ),
    "selector": SelectorRule(parameters=("item", "partition_count"), optional=True),
    "buffer_size": Whole(),
    "strategy": _Strategy(),
    "block_timeout": Seconds(optional=True),
    "consumer": HandlerRule(optional=True),
    "fallback": HandlerRule(optional=True),
    "on_error": ErrorHandlerRule(optional=True),
    "max_batch": Whole(),
    "linger": Seconds(above=False),
    "min_idle": Seconds(),
    "max_idle": Seconds(),
    "handler_timeout": Seconds(optional=True),
    "drain_timeout": Seconds(above=False),
    "balancer": _Balancer(optional=True),
    "balance_interval": Seconds(),
    "overflow": Choice(words=OVERFLOWS),
    "buffer_bytes": Bytes(optional=True),
    "size_of": _SizeOf(parameters=("item",), may_be_class=True, optional=True),
    "feeds": _Names(),
    "log_errors": Choice(words=("redacted", "full")),
    "retry": NestedRule(wanted=HandlerRetry, example=_retry_example, rules=HANDLER_RETRY_RULES),
}
_FIELDS = tuple(QUEUE_RULES)
CHANGEABLE = ("max_batch", "linger", "handler_timeout", "retry", "drain_timeout")
"""The fields that can change while a queue runs."""


def _faults(
    name: str,
    config: QueueConfig[Any],
    settings: Mapping[str, Setting] | None = None,
    unreadable: Mapping[str, Collection[Problem]] | None = None,
    *,
    doubtful: Collection[str] = (),
    whole: bool = True,
) -> list[ConfigFault]:
    """All that is wrong with a queue's configuration; rules between fields only where it is `whole`."""
    settings = settings or {}
    subject = f"queue {clip(repr(name))}"
    check = Checkup(
        subject,
        config,
        QUEUE_RULES,
        origins={field: setting.origin for field, setting in settings.items()},
        shown={field: setting.value for field, setting in settings.items()},
        unreadable=unreadable,
        doubtful=doubtful,
    )
    if whole:
        _check_together(name, config, check)
    text: object = name  # the annotation promises nothing: the caller may not be type-checked
    if isinstance(text, str) and text and text.isprintable():
        return check.faults
    rule, way_out = "is not a printable text", "give the queue a name"
    nameless = ConfigFault(owner=subject, path="name", value=clip(repr(name)), rule=rule, way_out=way_out)
    return [nameless, *check.faults]


def _check_together(name: str, config: QueueConfig[Any], check: Checkup) -> None:
    """The rules between fields."""
    if config.workers is not None and config.scheduler is not None and check.sound("workers", "scheduler"):
        rule, way_out = "is given together with workers", "give at most one of the two"
        check.fault("scheduler", rule, way_out, besides=("workers",))
    if check.sound("min_idle", "max_idle") and config.max_idle < config.min_idle:
        check.fault("max_idle", f"is below min_idle={config.min_idle}", "raise max_idle", besides=("min_idle",))
    if config.consumer is not None and config.fallback is not None:
        rule = "is given together with consumer, which takes every item"
        check.fault("fallback", rule, "give only one of the two", besides=("consumer",))
    if check.sound("strategy", "overflow") and _STRATEGIES[config.strategy] != config.overflow:
        rule = f"contradicts strategy={config.strategy.name}, which means {_STRATEGIES[config.strategy]!r}"
        check.fault("overflow", rule, "give only one of the two", besides=("strategy",))
    if check.sound("buffer_bytes", "size_of") and (config.buffer_bytes is None) != (config.size_of is None):
        if config.size_of is None:
            way_out = "give a function from an item to its bytes, such as size_of=len for bytes"
            check.fault("buffer_bytes", "is given without size_of", way_out, besides=("size_of",))
        else:
            check.fault("size_of", "is given without buffer_bytes", "give both or none", besides=("buffer_bytes",))
    if check.sound("feeds") and name in config.feeds:
        check.fault("feeds", "names the queue itself", "name only other queues")


# -- queues from a file, the environment and overrides -----------------------------------------------------------------

_FROM_CODE = ("consumer", "fallback", "on_error")


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    prefix: str = PREFIX,
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
        ConfigError: the file can't be read, or values are not what they should be; names all of them, each with file,
            line and column or variable, queue, field, value, rule and way out.

    Example:
        >>> environ = {"BATCHQUEUE_QUEUES__SPANS__WORKERS": "cpu_cores(0.5)"}
        >>> configs = load_config(environ=environ, overrides={"spans": {"max_batch": 500, "linger": "50ms"}})
        >>> str(configs["spans"].workers), configs["spans"].max_batch, configs["spans"].linger
        ('cpu_cores(0.5)', 500, 0.05)
    """
    # As a default value the environment, secrets and all, would stand in every printed signature.
    variables = os.environ if environ is None else environ
    layers = read_settings(path, variables, prefix, overrides, _FIELDS)
    faults = list(layers.faults)
    configs: dict[str, QueueConfig[Any]] = {}
    for queue, settings in layers.settings.items():
        configs[queue], wrong = _configure(queue, settings, whole=layers.whole)
        faults += wrong
    refuse(faults)
    return configs


def _configure(
    queue: str, settings: Mapping[str, Setting], *, whole: bool
) -> tuple[QueueConfig[Any], list[ConfigFault]]:
    """A queue's configuration, of what can be read of its settings, and all that is wrong with them."""
    values: dict[str, Any] = {}
    unreadable: dict[str, Collection[Problem]] = {}
    faults: list[ConfigFault] = []
    for name, setting in settings.items():
        if name not in QUEUE_RULES:
            faults.append(
                ConfigFault(
                    origin=setting.origin,
                    owner=f"queue {clip(repr(queue))}",
                    path=clip(name),
                    rule="is not a field of a queue",
                    way_out=nearest(name, _FIELDS),
                )
            )
        elif name in _FROM_CODE and setting.layer != "code":
            way_out = f"give it as overrides={{{queue!r}: {{{name!r}: ...}}}}"
            unreadable[name] = [Problem("is code, which no file or variable can hold", way_out, value="")]
        else:
            try:
                values[name] = QUEUE_RULES[name].read(setting.value, setting.layer)
            except UnreadableError as error:
                unreadable[name] = error.problems
    config: QueueConfig[Any] = QueueConfig(**values)
    meant = [closest(name, _FIELDS) for name in settings if name not in QUEUE_RULES]
    doubtful = [name for name in meant if name is not None]
    faults += _faults(queue, config, settings, unreadable, doubtful=doubtful, whole=whole)
    return config, sorted(faults, key=_place_in(settings))


def _place_in(settings: Mapping[str, Setting]) -> Callable[[ConfigFault], int]:
    """Sorts faults as the settings stand; what is about a queue as a whole comes first."""
    order = {name: place for place, name in enumerate(settings)}
    return lambda fault: order.get(fault.path.partition(".")[0], -1)
