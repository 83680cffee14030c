"""Every error the library raises on purpose, under one base class.

A message names the thing, the value, the rule it breaks and the way out. Whether an export error may be retried is
a property of its class, so that a worker decides by type and never by parsing text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

_MOST_LINES = 50


class BatchQueueError(Exception):
    """The base of every error that this library raises on purpose.

    Example:
        >>> issubclass(ConfigError, BatchQueueError)
        True
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFault:
    """One thing that is wrong with a configuration; as text, one line of the `ConfigError` that carries it.

    Example:
        >>> print(ConfigFault(owner="queue 'spans'", path="linger", value="-1", rule="is below 0", way_out="raise it"))
        queue 'spans': linger=-1 is below 0; raise it

    Attributes:
        path: the field, with dots where it is inside another: "max_batch", "retry.initial"; "" for a whole file.
        rule: the rule that is broken, as the rest of a sentence about the field.
        way_out: what to do about it.
        value: the value as text: shortened, and hidden where it may be a secret; None where there is none to show.
        owner: whose field it is: "queue 'spans'", "RetryPolicy"; "" where nothing has been read yet.
        origin: where the value was set: a file with line and column, a variable, "overrides"; None for code.
    """

    path: str
    rule: str
    way_out: str
    value: str | None = None
    owner: str = ""
    origin: str | None = None

    def __str__(self) -> str:
        field = self.path if self.value is None else f"{self.path}={self.value}"
        sentence = f"{field} {self.rule}" if field else self.rule
        place = [part for part in (self.origin, self.owner) if part]
        return f"{': '.join([*place, sentence])}; {self.way_out}"


class ConfigError(BatchQueueError, ValueError):
    """A configuration breaks rules; raised before anything starts, and says all of them at once.

    Example:
        >>> raise ConfigError("queue 'spans': max_batch=0 is below 1; set max_batch to 1 or more")
        Traceback (most recent call last):
        ...
        batchqueue_async.errors.ConfigError: queue 'spans': max_batch=0 is below 1; set max_batch to 1 or more

    Attributes:
        faults: what is wrong, one by one; empty where an error is about something other than fields.
    """

    faults: tuple[ConfigFault, ...]

    def __init__(self, message: str = "", faults: Sequence[ConfigFault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)

    @classmethod
    def of(cls, faults: Iterable[ConfigFault]) -> Self:
        """The error that says these faults: on one line when there is one, else on a line each.

        Example:
            >>> fault = ConfigFault(path="linger", value="-1", rule="is below 0", way_out="set linger to 0 or more")
            >>> print(ConfigError.of([fault, fault]))
            2 faults in the configuration:
              linger=-1 is below 0; set linger to 0 or more
              linger=-1 is below 0; set linger to 0 or more
        """
        found = tuple(faults)
        if len(found) == 1:
            return cls(str(found[0]), found)
        lines = [f"{len(found)} faults in the configuration:", *(f"  {fault}" for fault in found[:_MOST_LINES])]
        if len(found) > _MOST_LINES:
            lines.append(f"  and {len(found) - _MOST_LINES} more; the error's `faults` has them all")
        return cls("\n".join(lines), found)


class QueueExistsError(ConfigError):
    """`create` was called with a name that is taken; `get_or_create` shares the existing queue."""


class QueueClosedError(BatchQueueError):
    """The queue is shut down, and the call has no way to say so by its result."""


class WrongLoopError(BatchQueueError, RuntimeError):
    """A queue was called from a thread or event loop other than its own; use `queue.bridge()` there."""


class DeadlockError(BatchQueueError, RuntimeError):
    """The call would wait for its own caller, so it could never return."""


class ForkedError(BatchQueueError, RuntimeError):
    """A queue, scheduler or bridge made before a fork was used in the child, where its loop thread does not run."""


class PartlyAcceptedError(BatchQueueError, TimeoutError):
    """`produce_many` of a bridge ran out of time; `accepted` says how many of the items, the first ones, came in."""

    accepted: int

    def __init__(self, message: str, *, accepted: int = 0) -> None:
        super().__init__(message)
        self.accepted = accepted


class UnhandledTypeError(BatchQueueError, TypeError):
    """No handler, base-class handler or fallback takes an item of this type; given as a reason in `DeliveryError`."""


class ItemDroppedError(BatchQueueError):
    """The queue's strategy refused or evicted the item; given as a reason in `DeliveryError`."""


class ItemTooLargeError(BatchQueueError, ValueError):
    """An item takes more bytes than the queue's `buffer_bytes`, so that it could never come in.

    Nothing of the call it came with was put in.

    Example:
        >>> import asyncio, batchqueue_async as bq
        >>> async def main() -> None:
        ...     config = bq.QueueConfig[bytes](buffer_bytes="1KiB", size_of=len)
        ...     async with bq.BatchQueueManager() as manager, manager.create("pages", config) as pages:
        ...         await pages.produce(bytes(2000))
        >>> asyncio.run(main())
        Traceback (most recent call last):
        batchqueue_async.errors.ItemTooLargeError: queue 'pages': a bytes of 2000 bytes can never come in, ...
    """


class Failure(NamedTuple):
    """Some items of one `deliver` call, and the error that kept them from being handled.

    Example:
        >>> items, error = Failure(("a", "b"), ValueError("no"))
        >>> items
        ('a', 'b')
    """

    items: tuple[Any, ...]
    error: BaseException


class DeliveryError(BatchQueueError):
    """Some items of a `deliver` call were not handled; `failures` says which and why.

    Attributes:
        failures: the items that were not handled, grouped by the error that each group met.
    """

    failures: tuple[Failure, ...]

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class QueueFullError(BatchQueueError):
    """A queue's bound leaves no room, and its rule for that is to refuse.

    Attributes:
        accepted: how many records of the call, the first ones, were put all the same; 0 but for calls that are larger
            than the whole queue.
    """

    accepted: int = 0


class DurableQueueError(BatchQueueError):
    """The base of what the durable queue raises."""


class LockedError(DurableQueueError):
    """Another process or object owns the queue's directory; the message names it."""


class CorruptionError(DurableQueueError):
    """Data on disk fails its checks; the message carries path, offset and what was found."""


class DiskFullError(DurableQueueError, QueueFullError):
    """The disk or the queue's quota has no room for the record."""


class RecordTooLargeError(DurableQueueError, ValueError):
    """A record is larger than the queue's `max_record`."""


class SinkError(BatchQueueError):
    """The base of what a sink raises to say how its failure is to be treated.

    The message is the sink's own words: host, status and wording, never a payload. It goes to logs, statistics and dead
    letters as it is.

    Attributes:
        error_type: what kind of failure it was, for the counts: `throttled`, `refused`, `timeout`, `server`, `network`,
            `config`, `auth`, `too_large`, `permanent` or another short word; each class has one by default.
        culprits: the records of the batch, by index, that the destination named as the reason; empty when it named
            none. Whoever sent the batch then leaves the others alone.

    Example:
        >>> PermanentError("orders.example:5432: 23505 duplicate key", culprits=[3]).culprits
        (3,)
    """

    error_type: str = "failed"
    culprits: tuple[int, ...] = ()

    def __init__(self, message: str = "", *, error_type: str | None = None, culprits: Sequence[int] = ()) -> None:
        super().__init__(*([message] if message else []))
        if error_type is not None:
            self.error_type = error_type
        if culprits:
            self.culprits = tuple(culprits)


class RetryableError(SinkError):
    """The same batch may succeed later: the destination is not well.

    Attributes:
        retry_after: seconds that the destination asked to be left alone, or None. The next attempt comes after that
            time and after the backoff, whichever is later.

    Example:
        >>> RetryableError("503 from collector", retry_after=2.5, error_type="server").retry_after
        2.5
    """

    error_type = "retryable"
    retry_after: float | None

    def __init__(
        self,
        message: str = "",
        *,
        retry_after: float | None = None,
        error_type: str | None = None,
        culprits: Sequence[int] = (),
    ) -> None:
        super().__init__(message, error_type=error_type, culprits=culprits)
        self.retry_after = retry_after


class ThrottledError(RetryableError):
    """The destination is well and wants fewer requests (HTTP 429 and its like): the exporter slows down.

    It does not count for the circuit breaker, as the destination answers.

    Example:
        >>> ThrottledError("api.example: 429", retry_after=1.0).error_type
        'throttled'
    """

    error_type = "throttled"


class PermanentError(SinkError):
    """The same batch can never succeed; the records that are the reason go to the dead letters with it.

    Example:
        >>> PermanentError("api.example: 400 unknown field").error_type
        'permanent'
    """

    error_type = "permanent"


class TooLargeError(SinkError):
    """The destination refuses a batch of this size; the exporter splits it.

    Example:
        >>> TooLargeError("api.example: 413").error_type
        'too_large'
    """

    error_type = "too_large"


class AuthError(SinkError):
    """The credentials are refused or can't be read: sending pauses, an error is logged, and nothing is dropped.

    Example:
        >>> AuthError("api.example: 401").error_type
        'auth'
    """

    error_type = "auth"
