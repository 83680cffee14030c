"""One Spark batch on its way through a queue: its key, transaction, failure and counts, together with its rows.

A queue of Spark's rows holds chunks. Each is some rows and the batch that they belong to, so that nothing in the queue,
its handlers or the routes has to know which batch is under way: what is left of a batch that failed or was interrupted
is dropped by that batch, and can't come into another one.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async._support import log
from batchqueue_async.errors import BatchQueueError, PermanentError, RetryableError, TooLargeError
from batchqueue_async.export.policies import RetryPolicy
from batchqueue_async.sinks.base import PASSES
from batchqueue_async.spark.bad_rows import BadRows, halves

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from batchqueue_async.sinks.base import BatchKey, SendResult, Transaction
    from batchqueue_async.spark.record_keys import RecordKeys
    from batchqueue_async.spark.route import Route

R = TypeVar("R")

RETRY = RetryPolicy(initial=0.5, max_delay=10.0, max_age=60.0)
"""What a batch does when its destination is away for a moment: wait, and try again for up to a minute."""

_LOOK = 1.0
"""Seconds between two looks whether the query was stopped, while a batch waits."""


class BatchStoppedError(BatchQueueError):
    """The query was stopped while its batch waited for the destination; Spark repeats the batch after the restart."""


class RepeatBatchError(BatchQueueError):
    """The rows of the batch are needed once more, from the first one on."""


class Chunk:
    """Some rows of one batch; what the queues hold.

    Attributes:
        batch: the batch that the rows belong to.
        rows: the rows.
        partition: the queue's partition that they go to, where the user's selector said so.
    """

    __slots__ = ("batch", "partition", "rows")

    def __init__(self, batch: MicroBatch, rows: list[Any], partition: int = 0) -> None:
        self.batch = batch
        self.rows = rows
        self.partition = partition


@cache
def chunk_of(item: type) -> type[Chunk]:
    """The chunks of one type of rows, so that a queue that several sinks share has a handler for each.

    Example:
        >>> chunk_of(dict) is chunk_of(dict), chunk_of(dict) is chunk_of(tuple)
        (True, False)
    """
    return type(f"{item.__name__}Chunk", (Chunk,), {"__slots__": (), "__module__": item.__module__})


async def handle_chunks(chunks: Sequence[Chunk]) -> None:
    """Handle chunks, each by its own batch; the consumer of every queue of Spark's rows."""
    failed: Exception | None = None
    for batch, rows in joined(chunks):
        try:
            await batch.handle(rows)
        except Exception as error:  # noqa: BLE001 - one batch's failure is not the next one's; it is raised below
            failed = failed or error
    if isinstance(failed, RetryableError):
        # A queue repeats what is retryable; this was repeated already, as often as it may be.
        raise PermanentError(str(failed)) from failed
    if failed is not None:
        raise failed


def joined(chunks: Sequence[Chunk]) -> Generator[tuple[MicroBatch, list[Any]]]:
    """The rows of chunks that follow each other, batch by batch."""
    batch, rows, owned = chunks[0].batch, chunks[0].rows, False
    for chunk in chunks[1:]:
        if chunk.batch is not batch:
            yield batch, rows
            batch, rows, owned = chunk.batch, chunk.rows, False
        elif owned:
            rows.extend(chunk.rows)
        else:
            rows, owned = [*rows, *chunk.rows], True
    yield batch, rows


@dataclass(frozen=True, slots=True)
class Patience:
    """How a batch waits for a destination that is away.

    Attributes:
        policy: the delays and their limit; None fails at once.
        is_stopped: asked meanwhile, in a thread: whether the query was asked to stop.
        timeout: seconds that one call of a handler may take; None does not limit them.
    """

    policy: RetryPolicy | None = RETRY
    is_stopped: Callable[[], bool] = lambda: False
    timeout: float | None = None


class Retries:
    """The repetitions of one batch: how often it failed, and since when.

    The attempts count from the last success, so that a batch of many sends may outlive several short outages.
    """

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.count = 0
        self._attempts = 0
        self._since: float | None = None

    def succeeded(self) -> None:
        """What failed before went well."""
        self._attempts, self._since = 0, None

    def take_count(self) -> int:
        """The attempts that were made again since this was asked last."""
        count, self.count = self.count, 0
        return count

    def delay(self, error: BaseException, now: float) -> float | None:
        """Seconds to wait before the next attempt; None: there is none."""
        policy = self.patience.policy
        if policy is None:
            return None
        self._attempts += 1
        self._since = now if self._since is None else self._since
        if policy.max_attempts is not None and self._attempts >= policy.max_attempts:
            return None
        wanted = min(policy.max_delay, policy.initial * policy.multiplier ** min(self._attempts - 1, 64))
        if policy.jitter:
            wanted *= random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        asked = error.retry_after if isinstance(error, RetryableError) else None
        wanted = max(wanted, min(asked or 0.0, policy.max_delay))
        if policy.max_age is not None and now + wanted - self._since > policy.max_age:
            return None
        self.count += 1
        return wanted

    async def wait(self, seconds: float) -> None:
        """Wait, unless the query is stopped.

        Raises:
            BatchStoppedError: it is.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            if await asyncio.to_thread(self.patience.is_stopped):
                raise BatchStoppedError("the query was stopped while its batch waited for the destination")
            await asyncio.sleep(min(_LOOK, left))

    async def wait_after(self, what: str, error: BaseException) -> bool:
        """Wait before the next attempt; False: the limit is reached."""
        seconds = self.delay(error, asyncio.get_running_loop().time())
        if seconds is None:
            return False
        log.warning("spark_batch_waits", batch=what, seconds=round(seconds, 3), **log.describe(error))
        await self.wait(seconds)
        return True


class MicroBatch:
    """One attempt to deliver one batch; belongs to the loop of its route, but for `fail`.

    Invariants: `failure` is set once, by the first thing that went wrong, and from then on rows are dropped. A
    transaction is there from `prepare` to `commit` or `rollback`, and only the holder of the route's turn touches it.

    Attributes:
        what: names the batch in messages.
        key: the batch's key; None where nothing names the query.
        failure: what went wrong first.
        taken: items that were handled, or given to the dead letters.
        repeated: whether the batch was in already, as the sink's note says.
    """

    def __init__(
        self,
        what: str,
        route: Route,
        key: BatchKey | None,
        *,
        keys: RecordKeys | None = None,
        retries: Retries | None = None,
        bad: BadRows | None = None,
        schema: Any = None,
        replace: bool = False,
    ) -> None:
        self.what = what
        self.key = key
        self.failure: BaseException | None = None
        self.taken = 0
        self.repeated = False
        self._route = route
        self._keys = keys
        self._retries = retries or Retries(Patience(policy=None))
        self._bad = bad
        self._schema = schema
        self._replace = replace
        self._prepared = False
        self._transaction: Transaction | None = None

    def fail(self, error: BaseException) -> None:
        """What is left of the batch is dropped; the first error stays."""
        self.failure = self.failure or error

    # -- its life ------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """The batch's first rows are there, and not in the queue yet: wait here for whatever has to be waited for.

        In the queue a handler that waits holds up the others, and so maybe the one that it waits for. A transaction
        begins with the first rows, not while Spark still computes them, because it locks others out.
        """
        try:
            if self.key is not None and self._route.transactional:
                self._transaction = await self._persistently(self._begin)
                self.repeated = self._transaction is None
            elif self._schema is not None:
                await self._persistently(partial(self._route.declare, self._schema))
            self._prepared = True
        except Exception as error:  # noqa: BLE001 - it is the batch's failure, reported as every other
            self.fail(error)

    async def _begin(self) -> Transaction | None:
        async with self._route.turn:
            transaction = await self._route.begin(self.key) if self.key is not None else None
            if transaction is not None:
                try:
                    await self._prepare_table(transaction)
                    await self._check_at_once(transaction)
                except BaseException:
                    await transaction.rollback()
                    raise
            return transaction

    async def _prepare_table(self, transaction: Any) -> None:
        declare = getattr(transaction, "declare", None)
        if declare is not None and self._schema is not None:
            await declare(self._schema)
        if self._replace:
            await transaction.clear()

    async def commit(self) -> bool:
        """End a batch that was handled; False if it had been in before."""
        if not self._prepared:  # a batch without rows
            if self._replace:
                self._transaction = await self._persistently(self._begin)
                self.repeated = self._transaction is None
            elif self._schema is not None:
                await self._persistently(partial(self._route.declare, self._schema))
        async with self._route.turn:
            if self._bad is not None:
                await self._try_held(self._bad)
                await self._check_commit(self._bad)
                await self._bad.bury()
            if self._transaction is not None:
                await self._transaction.commit()
                self._transaction = None
        await self._route.settle()
        return not self.repeated

    async def _check_at_once(self, transaction: Any) -> None:
        check = getattr(transaction, "check", None)
        if check is not None and self._bad is not None and self._bad.check_at_once:
            await check()

    async def _try_held(self, bad: BadRows) -> None:
        """Send what was refused once more: what it needs may have come later. Until no more of it goes in."""
        for _ in range(PASSES):
            before = bad.held
            if self._transaction is None or not before:
                break
            await self._in_transaction(self._transaction, bad.take_held())
            if bad.held == before:
                break
        bad.give_up_held()

    async def _check_commit(self, bad: BadRows) -> None:
        """Find out whether the commit would refuse rows; which ones is known when each send is held to it."""
        check = getattr(self._transaction, "check", None)
        if check is None or bad.check_at_once:
            return
        try:
            await check()
        except PermanentError as error:
            bad.check_at_once = True
            raise RepeatBatchError("the batch is repeated without the rows that its commit refuses") from error

    async def rollback(self) -> None:
        """End a batch that failed, after the call that is under way; may be called twice."""
        self.fail(RuntimeError("the batch was rolled back"))
        async with self._route.turn:
            await self._undo()

    async def _undo(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await transaction.rollback()

    # -- its rows ------------------------------------------------------------------------------------------------

    async def handle(self, rows: list[Any]) -> None:
        """Handle rows, unless the batch has failed."""
        if self.failure is not None:
            return
        try:
            async with self._route.turn if self._route.alone else nullcontext():
                if self.failure is None and not self.repeated:
                    await self._deliver(rows)
        except asyncio.CancelledError:
            self.fail(TimeoutError("the call was cut off by a shutdown"))
            raise
        except Exception as error:
            self.fail(error)
            raise
        if self.failure is None:
            self.taken += len(rows)

    async def _deliver(self, rows: list[Any]) -> None:
        if self._bad is not None:
            rows = self._bad.without(rows)
        if not rows:
            return
        if self._transaction is not None:
            await self._in_transaction(self._transaction, rows)
        else:
            await self._send(rows, None if self._keys is None else self._keys.of(rows))

    async def _in_transaction(self, transaction: Transaction, rows: list[Any]) -> None:
        attempt = None if self._bad is None else getattr(transaction, "try_send", None)
        send = attempt or transaction.send
        try:
            result = await self._in_time(lambda: send(rows))
        except (PermanentError, TooLargeError) as error:
            if self._bad is None or self._bad.is_full:
                raise
            if attempt is not None:
                await self._in_parts(transaction, rows, error)
                return
            # A transaction in which a send failed is of no use: find the rows in ones of their own, then begin anew.
            await self._undo()
            known = self._bad.known
            await self._find_bad(rows, error)
            if self._bad.known == known:  # it is refused with other rows of the batch alone
                raise
            raise RepeatBatchError("the batch is repeated without its bad rows") from error
        for place in self._check(rows, result):
            if self._bad is not None and self._bad.is_full:
                raise PermanentError("the sink rejected too many rows of the batch")
            await self._in_parts(transaction, [rows[place]])

    async def _in_parts(self, transaction: Transaction, rows: list[Any], error: Exception | None = None) -> None:
        """Send rows of which some are refused, none of which is in, as parts: after what was sent before them."""
        if len(parts := halves(rows)) == 1 and error is not None:
            self._note_bad(rows, error)
            return
        for part in parts:
            await self._in_transaction(transaction, part)

    async def _find_bad(self, rows: list[Any], error: Exception) -> None:
        """Find the rows that the sink refuses; every try is undone."""
        if len(parts := halves(rows)) == 1:
            self._note_bad(rows, error, come_again=True)
            return
        for part in parts:
            found = await self._persistently(partial(self._refusal, part))
            if found is not None:
                await self._find_bad(part, found)

    async def _refusal(self, rows: list[Any]) -> Exception | None:
        transaction = await self._route.begin(self.key) if self.key is not None else None
        if transaction is None:
            return None
        try:
            await self._check_at_once(transaction)
            result = await transaction.send(rows)
        except (PermanentError, TooLargeError) as error:
            return error
        finally:
            await transaction.rollback()
        return next(iter(result.rejected.values())) if result is not None and result.rejected else None

    async def _send(self, rows: list[Any], keys: list[str] | None) -> None:
        try:
            result = await self._persistently(lambda: self._in_time(lambda: self._route.send(rows, keys)))
        except (PermanentError, TooLargeError) as error:
            if self._bad is None or not self._route.isolates:
                raise
            if len(parts := halves(rows)) == 1:
                self._note_bad(rows, error)
                return
            at = 0
            for part in parts:
                whole = len(part) if len(rows) > 1 else 0  # parts of one record batch share its key
                await self._send(part, None if keys is None else keys[at : at + whole] or keys)
                at += whole
            return
        for place in self._check(rows, result):
            for part in halves([rows[place]]):
                await self._send(part, None if keys is None else [keys[place]])

    def _check(self, rows: list[Any], result: SendResult | None) -> list[int]:
        """See to the records that the destination did not take: they are bad rows, or fail the batch.

        Returns:
            The places of those that are record batches, of which not all rows need be bad.
        """
        if result is None or not result.rejected:
            return []
        if self._bad is None:
            first = next(iter(result.rejected.values()))
            raise PermanentError(f"the sink rejected {len(result.rejected)} records; the first: {first}") from first
        several = [place for place in result.rejected if len(halves([rows[place]])) > 1]
        for place, reason in result.rejected.items():
            if place not in several:
                self._note_bad([rows[place]], reason)
        return several

    def _note_bad(self, rows: list[Any], error: Exception, *, come_again: bool = False) -> None:
        if self._bad is None:
            return
        if self._transaction is not None and self._route.any_order:
            for each in rows:
                self._bad.hold(each, str(error))
        else:
            self._bad.add(rows, str(error), come_again=come_again)

    async def _persistently(self, call: Callable[[], Awaitable[R]]) -> R:
        """The call's result; while the destination is away, after as many attempts as the policy allows."""
        while True:
            try:
                found = await call()
            except Exception as error:
                if not self._route.may_pass(error) or not await self._retries.wait_after(self.what, error):
                    raise
            else:
                self._retries.succeeded()
                return found

    async def _in_time(self, call: Callable[[], Awaitable[R]]) -> R:
        """The call's result, within `handler_timeout`: of one attempt, not of all of them and the waits between."""
        seconds = self._retries.patience.timeout
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await call()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"a call took longer than handler_timeout={seconds} s") from error
