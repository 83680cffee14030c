"""The rules that a sink keeps to, each as a check against its real destination; `testing.check_sink` runs them."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from batchqueue_async.errors import BatchQueueError, ConfigError, PermanentError, SinkError, TooLargeError
from batchqueue_async.sinks.base import (
    Attempt,
    BatchKey,
    KeyedSink,
    PreparingSink,
    SendResult,
    Sink,
    SinkNeeds,
    StagingSink,
    TransactionalSink,
    is_concurrent,
    needs_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence

Read: TypeAlias = "Callable[[], Awaitable[Sequence[Any]]]"

_TURNS = 6
_PAUSE = 0.01
_SENT = itertools.count()


class SinkChecks:
    """One sink's checks; `found` is what it does not keep to, each text beginning with the rule's name.

    Example:
        >>> from batchqueue_async.sinks.memory import MemorySink
        >>> checks = SinkChecks(MemorySink, record=lambda number: {"id": number})
        >>> asyncio.run(checks.run(["life", "sends"]))
        >>> checks.found
        []
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        record: Callable[[int], Any],
        bad: Callable[[int], Any] | None = None,
        read: Read | None = None,
        away: Callable[[], Any] | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.found: list[str] = []
        self._make = make
        self._record = record
        self._bad = bad
        self._read = read
        self._away = away
        self._timeout = timeout
        self._grace = timeout / 5
        self._rules: dict[str, Callable[[Any], Coroutine[Any, Any, None]]] = {
            "life": self._life,
            "sends": self._sends,
            "records": self._records,
            "prepare": self._prepare,
            "keys": self._keys,
            "overlap": self._overlap,
            "transactions": self._transactions,
            "staging": self._staging,
            "cancelling": self._cancelling,  # after all that count: what was cancelled may still arrive
            "away": self._is_away,
        }

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of all rules."""
        return ("shape", *self._rules)

    async def run(self, rules: Collection[str] | None = None) -> None:
        """Check the rules of these names, or all."""
        wanted = self.rules if rules is None else rules
        for name in wanted:
            if name not in self.rules:
                raise ConfigError(f"check_sink: there is no rule {name!r}; the rules are {', '.join(self.rules)}")
        if not self._has_shape():
            return
        for name, check in self._rules.items():
            if name in wanted:
                await self._one(name, check)

    def _fail(self, rule: str, what: str) -> None:
        self.found.append(f"{rule}: {what}")

    async def _one(self, name: str, check: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        before = asyncio.all_tasks()
        make = self._away if name == "away" else self._make
        if make is None:
            return
        try:
            async with asyncio.timeout(self._timeout):
                await check(make())
        except TimeoutError:
            self._fail(name, f"was not over within {self._timeout} s")
        except Exception as error:  # noqa: BLE001 - any error of the sink is what was found
            self._fail(name, f"raised {type(error).__name__}: {error}")
        else:
            left = await _left_behind(before, self._grace)
            if left:
                self._fail(name, f"after close() tasks are left: {', '.join(sorted(left))}")

    async def _arrived(self) -> Counter[str]:
        """What is at the destination; records are told apart by how they look."""
        return Counter() if self._read is None else Counter(map(repr, await self._read()))

    async def _expect(self, rule: str, before: Counter[str], wanted: int, what: str) -> None:
        """So many records have arrived since, all of them different; some destinations show them after a while."""
        if self._read is not None:
            loop = asyncio.get_running_loop()
            end = loop.time() + self._grace
            arrived = await self._arrived() - before
            while arrived.total() < wanted and loop.time() < end:
                await asyncio.sleep(_PAUSE)
                arrived = await self._arrived() - before
            if arrived.total() != wanted:
                self._fail(rule, f"{what}, {arrived.total()} arrived")
            elif len(arrived) != wanted:
                self._fail(rule, f"{what}, and among those that arrived only {len(arrived)} are different")

    def _made(self, count: int) -> list[Any]:
        return [self._record(next(_SENT)) for _ in range(count)]

    def _keys_for(self, batch: Sequence[Any]) -> list[str]:
        source = f"{random.getrandbits(128):032x}"
        return [f"{source}/{number}" for number, _ in enumerate(batch)]

    def _look_at(self, rule: str, result: Any, count: int) -> None:
        """What a send returned."""
        if result is None:
            return
        if not isinstance(result, SendResult):
            self._fail(rule, f"send returned {type(result).__name__}, not a SendResult or None")
            return
        for index, error in result.rejected.items():
            if not 0 <= index < count:
                self._fail(rule, f"the index {index} of rejected is not in the batch of {count}")
            if not isinstance(cast("object", error), SinkError):
                self._fail(rule, f"rejected holds {type(error).__name__}, not a SinkError")
            elif self._bad is None or rule != "records":
                self._fail(rule, f"a good record is rejected: {error}")
        if not 0 <= result.skipped <= count:
            self._fail(rule, f"skipped={result.skipped} in a batch of {count}")

    # -- the rules -----------------------------------------------------------------------------------------------

    def _has_shape(self) -> bool:
        sink: Any = self._make()
        if not isinstance(sink, Sink):
            self._fail("shape", "it needs async open(), send(batch) and close()")
            return False
        names = ("open", "send", "close", "send_keyed", "send_prepared", "begin", "publish", "discard", "check")
        for name in names:
            method = getattr(sink, name, None)
            if inspect.isfunction(getattr(method, "__func__", None)) and not inspect.iscoroutinefunction(method):
                self._fail("shape", f"{name}() is not async")
        if not hasattr(sink, "concurrent"):
            warnings.warn(
                f"{type(sink).__name__} does not say whether its sends may overlap, so they are made one at a time; "
                "set its class attribute concurrent to True or to False",
                stacklevel=4,
            )
        elif not isinstance(said := getattr(sink, "concurrent", None), bool):
            self._fail("shape", f"concurrent is {said!r}, neither True nor False")
        if not isinstance(getattr(sink, "needs", SinkNeeds()), SinkNeeds):
            self._fail("shape", "needs is not a SinkNeeds")
        return not self.found

    async def _life(self, sink: Any) -> None:
        """Closed before it was opened and twice, and opened again."""
        before = await self._arrived()
        await sink.close()  # as after an open that failed
        for _ in range(2):
            await sink.open()
            if (check := getattr(sink, "check", None)) is not None:
                await check()
            await sink.send(self._made(1))
            await sink.close()
            await sink.close()
        await self._expect("life", before, 2, "2 records were sent over two openings")

    async def _sends(self, sink: Any) -> None:
        """Each record arrives, and the batch is the caller's."""
        before, sent = await self._arrived(), 0
        most = min(needs_of(sink).max_records or 50, 50)
        await sink.open()
        try:
            for count in (1, most):
                batch = self._made(count)
                copy = list(batch)
                self._look_at("sends", await sink.send(batch), count)
                if batch != copy:
                    self._fail("sends", "the batch that was handed over has changed")
                sent += count
                # What send has returned of is delivered: it does not wait for close.
                await self._expect("sends", before, sent, f"{sent} records were sent")
        finally:
            await sink.close()

    async def _records(self, sink: Any) -> None:
        """A record that is refused takes no other one with it, and is named."""
        if self._bad is None:
            return
        before = await self._arrived()
        batch = [*self._made(2), self._bad(next(_SENT)), *self._made(2)]
        await sink.open()
        try:
            try:
                result = await sink.send(batch)
            except (PermanentError, TooLargeError) as error:
                culprits = getattr(error, "culprits", ())  # empty: the destination names none
                if culprits and list(culprits) != [2]:
                    self._fail("records", f"the bad record is number 2, and culprits says {list(culprits)}")
                await self._expect("records", before, 0, "the batch was refused as a whole")
                await sink.send([record for place, record in enumerate(batch) if place != 2])  # noqa: PLR2004
            else:
                self._look_at("records", result, len(batch))
                refused = list(result.rejected) if isinstance(result, SendResult) else []
                if refused != [2]:
                    self._fail("records", f"the bad record is number 2, and rejected says {refused}")
                elif not isinstance(result.rejected[2], PermanentError | TooLargeError):
                    self._fail("records", f"the bad record is rejected by {type(result.rejected[2]).__name__}")
        except Exception as error:  # noqa: BLE001 - any error of the sink is what was found
            self._fail("records", f"a bad record among good ones raised {type(error).__name__}: {error}")
        finally:
            await sink.close()
        await self._expect("records", before, 4, "4 good records were sent with a bad one")

    async def _prepare(self, sink: Any) -> None:
        """What threads prepare, while other sends are under way, arrives."""
        if not isinstance(sink, PreparingSink):
            return
        before = await self._arrived()
        batches = [self._made(3) for _ in range(3)]
        await sink.open()
        try:
            sending = asyncio.ensure_future(sink.send(self._made(1)))
            prepared = await asyncio.gather(
                *(asyncio.to_thread(sink.prepare, batch, self._keys_for(batch)) for batch in batches)
            )
            await sending
            for batch, each in zip(batches, prepared, strict=True):
                self._look_at("prepare", await sink.send_prepared(each), len(batch))
        finally:
            await sink.close()
        await self._expect("prepare", before, 10, "10 records were sent, 9 of them prepared")

    async def _keys(self, sink: Any) -> None:
        """Keys may be given twice; an idempotent sink takes them once."""
        if not isinstance(sink, KeyedSink):
            return
        before = await self._arrived()
        batch = self._made(3)
        keys = self._keys_for(batch)
        await sink.open()
        try:
            for _ in range(2):
                copies = list(batch), list(keys)
                self._look_at("keys", await sink.send_keyed(batch, keys), len(batch))
                if (batch, keys) != copies:
                    self._fail("keys", "the batch or the keys that were handed over have changed")
        finally:
            await sink.close()
        arrived = (await self._arrived() - before).total()
        if self._read is not None and (
            not len(batch) <= arrived <= 2 * len(batch) or (needs_of(sink).idempotent and arrived != len(batch))
        ):
            self._fail("keys", f"3 records were sent twice with the same keys, {arrived} arrived")

    async def _overlap(self, sink: Any) -> None:
        """Sends at once."""
        if not is_concurrent(sink):
            return
        before = await self._arrived()
        await sink.open()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(sink.send(self._made(2)))
        finally:
            await sink.close()
        await self._expect("overlap", before, 16, "16 records were sent at once")

    async def _cancelling(self, sink: Any) -> None:
        """A send that is cancelled, at any of its waits, ends, and leaves a sink that goes on."""
        await sink.open()
        try:
            for turns in (*range(_TURNS), None):
                task: asyncio.Future[Any] = asyncio.ensure_future(sink.send(self._made(1)))
                for _ in range(turns or 0):
                    await asyncio.sleep(0)
                if turns is None:
                    await asyncio.sleep(_PAUSE)
                task.cancel()
                answer: object = (await asyncio.gather(task, return_exceptions=True))[0]
                if not (answer is None or isinstance(answer, SendResult | asyncio.CancelledError)):
                    self._fail("cancelling", f"a cancelled send raised {type(answer).__name__}")
            before = await self._arrived()
            await sink.send(self._made(1))
            loop = asyncio.get_running_loop()
            end = loop.time() + self._grace
            while self._read is not None and not await self._arrived() - before:
                if loop.time() >= end:
                    self._fail("cancelling", "after cancelled sends nothing arrives any more")
                    break
                await asyncio.sleep(_PAUSE)
        finally:
            await sink.close()

    async def _transactions(self, sink: Any) -> None:
        """All of a batch takes effect at its commit, once; nothing before, and nothing of what was undone."""
        if not isinstance(sink, TransactionalSink):
            return
        rule, key = "transactions", BatchKey(f"check{random.getrandbits(64):x}", 1)
        before = await self._arrived()
        await sink.open()
        try:
            undone = await sink.begin(key)
            if undone is None:
                self._fail(rule, "begin says that a batch is in which never was")
                return
            await undone.send(self._made(2))
            await undone.rollback()
            await self._expect(rule, before, 0, "2 records were rolled back")
            done = await sink.begin(key)
            if done is None:
                self._fail(rule, "begin says that a batch is in which was rolled back")
                return
            waiting = asyncio.ensure_future(sink.begin(BatchKey(key.source, 2)))
            await done.send(self._made(1))
            await done.send(self._made(2))
            await asyncio.sleep(_PAUSE)
            if waiting.done():
                self._fail(rule, "a second begin does not wait for the end of the first transaction")
            await done.commit()
            await done.rollback()  # does nothing after a commit
            second = await waiting
            if second is not None:
                await second.rollback()
            await self._expect(rule, before, 3, "3 records were committed")
            again = await sink.begin(key)
            if again is not None:
                self._fail(rule, "begin takes a batch again that is in")
                await again.rollback()
        finally:
            await sink.close()

    async def _staging(self, sink: Any) -> None:
        """Of what was staged, what is published is visible, once."""
        if not isinstance(sink, StagingSink):
            return
        rule, key = "staging", BatchKey(f"check{random.getrandbits(64):x}", 1)
        before = await self._arrived()
        attempts = [Attempt(key, part, name) for part, name in ((0, "a"), (0, "b"), (1, "a"))]
        for attempt in attempts:
            staged = sink.stage(attempt)
            await staged.open()
            await staged.send(self._made(2))
            await staged.close()
        await self._expect(rule, before, 0, "6 records were staged and not published")
        if not await sink.publish(key, [attempts[0], attempts[2]]):
            self._fail(rule, "publish says that a batch is in which never was")
        await self._expect(rule, before, 4, "4 of 6 staged records were published")
        if await sink.publish(key, [attempts[0]]):
            self._fail(rule, "publish takes a batch again that is in")
        await sink.discard(BatchKey(key.source, 2))
        await self._expect(rule, before, 4, "4 records were published, and again")

    async def _is_away(self, sink: Any) -> None:
        """A destination that is not there is an outage: nothing is given up."""
        error: Exception | None = None
        try:
            await sink.open()
            await sink.send(self._made(1))
        except Exception as caught:  # noqa: BLE001 - which one it is, is the question
            error = caught
        await sink.close()
        if error is None:
            self._fail("away", "the destination is not there, and open and send raised nothing")
        elif isinstance(error, PermanentError | TooLargeError):
            self._fail("away", f"{type(error).__name__} gives records up; an outage is a RetryableError")
        elif not isinstance(error, BatchQueueError | OSError | EOFError):
            self._fail("away", f"{type(error).__name__} is not known to be an outage; raise a RetryableError")


async def _left_behind(before: set[asyncio.Task[Any]], grace: float) -> list[str]:
    """The tasks that are there now and were not, and don't end by themselves soon."""
    loop = asyncio.get_running_loop()
    end = loop.time() + grace
    while left := asyncio.all_tasks() - before:
        if loop.time() >= end:
            return [f"{task.get_name()} in {_place(task)}" for task in left]
        await asyncio.sleep(_PAUSE)
    return []


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task is: the coroutine and its line."""
    frames = task.get_stack(limit=1)
    if not frames:
        return repr(task.get_coro())
    code = frames[0].f_code
    return f"{code.co_qualname} ({code.co_filename}:{frames[0].f_lineno})"
