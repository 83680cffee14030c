"""What sinks of one message a record have in common: the bytes of a record, the wait for all answers, the verdict."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar, cast

from batchqueue_async.errors import PermanentError, SinkError
from batchqueue_async.sinks._shared.records import is_table, lines
from batchqueue_async.sinks.base import SendResult

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping, Sequence

T = TypeVar("T")


def payload(record: Any) -> bytes:
    """A record as the body of a message: bytes as they are, text in UTF-8, anything else as JSON.

    Example:
        >>> payload(b"x"), payload("y"), payload({"a": 1})
        (b'x', b'y', b'{"a":1}')
    """
    if isinstance(record, bytes):
        return record
    if isinstance(record, str):
        return record.encode()
    if is_table(record):
        raise PermanentError("a record is an Arrow table, which is many messages; send its rows")
    if isinstance(record, bytearray | memoryview):
        return bytes(cast("bytes", record))
    return lines([record])[0]


def payloads(batch: Sequence[Any]) -> tuple[dict[int, bytes], dict[int, SinkError]]:
    """The bodies by their places in the batch, and the records that have none, with their reasons.

    Example:
        >>> bodies, rejected = payloads([b"a", object()])
        >>> bodies, list(rejected)
        ({0: b'a'}, [1])
    """
    bodies: dict[int, bytes] = {}
    rejected: dict[int, SinkError] = {}
    for place, record in enumerate(batch):
        try:
            bodies[place] = payload(record)
        except PermanentError as error:
            rejected[place] = error
    return bodies, rejected


class UnderWay:
    """The calls of batches that share one line, which answers them in about their order.

    A batch is not late while the line works off what was asked before it: on a slow machine some batches at once take
    longer than any of them has, and a line that is cut for it begins again with all of them.

    Example:
        >>> async def main() -> None:
        ...     print(await UnderWay().all_of([asyncio.sleep(0, "done"), asyncio.sleep(60, "late")], timeout=0.01))
        >>> asyncio.run(main())
        ['done', TimeoutError()]
    """

    def __init__(self) -> None:
        self._batches: list[list[asyncio.Task[Any]]] = []

    async def all_of(self, calls: Iterable[Coroutine[Any, Any, T]], timeout: float) -> list[T | Exception]:
        """Make calls at once, and give what each returned or raised; those that are late are cancelled.

        Late is what is not there when for `timeout` seconds none of this batch and of those before it has come.
        """
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(call) for call in calls]
        self._batches.append(tasks)
        try:
            late: set[asyncio.Task[T]] = set(tasks)
            came, before = self._came(tasks), None
            while late and came != before:
                _, late = await asyncio.wait(late, timeout=timeout)
                came, before = self._came(tasks), came
        finally:
            self._batches = [each for each in self._batches if each is not tasks]
            left = [task for task in tasks if not task.done()]
            for task in left:
                task.cancel()
            if left:
                await asyncio.gather(*left, return_exceptions=True)
        results: list[T | Exception] = [_result(task) for task in tasks]
        return results

    def _came(self, tasks: list[asyncio.Task[Any]]) -> list[tuple[int, int]]:
        """What has come for each batch until this one; a batch that ended is gone, which is a difference too."""
        until = next(place for place, each in enumerate(self._batches) if each is tasks)
        return [(id(each), sum(task.done() for task in each)) for each in self._batches[: until + 1]]


def _result(task: asyncio.Task[T]) -> T | Exception:
    if task.cancelled():  # by us, or by a client that closes its connection so
        return TimeoutError()
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, Exception):
        return error
    raise error


def verdict(errors: Mapping[int, SinkError], count: int, *, skipped: int = 0) -> SendResult | None:
    """The result of a send of `count` records; where none was taken, the error is that of the whole.

    Example:
        >>> verdict({}, 2) is None
        True
        >>> verdict({1: PermanentError("no")}, 2).rejected
        {1: PermanentError('no')}
    """
    if errors and len(errors) == count:
        first = next(iter(errors.values()))
        if not isinstance(first, PermanentError) and {type(error) for error in errors.values()} == {type(first)}:
            raise first
    if errors or skipped:
        return SendResult(rejected=errors, skipped=skipped)
    return None
