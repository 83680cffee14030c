"""Reads that are never cancelled on one connection, acknowledgements on another.

A read of a group that is cancelled loses what the server has already assigned: it stays in the list of pending entries
until somebody claims it. So a read here always ends by itself: with entries, after its blocking time, by the server's
UNBLOCK, or with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.intake.portions import Portion
from batchqueue_async.intake.ports import DeadLetter, Delivery, Epoch, Outcomes, Retry, SessionLostError
from batchqueue_async.intake.redis.message import RedisDelivery, RedisFields
from batchqueue_async.sinks._shared.redis_client import end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from batchqueue_async.intake.ports import Plan, Room, Taken

_PAGE = 100
_LEAVE = 1.0  # seconds


class RedisSession:
    """One connection that reads a stream as one consumer of a group.

    Entries come from three places, in this order: our own pending ones, which an earlier life of this consumer has left
    or a reconnect has interrupted; new ones; and from time to time those of consumers that are gone.
    """

    hand_over = False

    def __init__(
        self,
        reader: Any,
        writer: Any,
        plan: Plan,
        *,
        fields: RedisFields,
        group: str,
        consumer: str,
        block: float,
        claim_after: float,
        lost: Callable[[int], None],
        leaves: bool = False,
    ) -> None:
        self.epoch = Epoch(f"{fields.stream}/{group}")
        self._reader = reader
        self._writer = writer
        self._plan = plan
        self._fields = fields
        self._stream = fields.stream
        self._group = group
        self._consumer = consumer
        self._block = block
        self._claim_after = claim_after
        self._lost = lost
        self._leaves = leaves
        self._loop = asyncio.get_running_loop()
        self._own_from: bytes | None = b"0-0"
        self._claim_from = b"0-0"
        self._claim_at = 0.0
        self._stopped = False
        self._over: Exception | None = None
        self._ended = False
        self._reading = False
        self._reader_id: int | None = None
        self._held: dict[RedisDelivery, None] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._lag: int | None = None
        self._portion = Portion()

    async def start(self) -> None:
        """Learn the name of the reading connection, and keep what is held from being claimed."""
        self._reader_id = int(await self._reader.client_id())
        self._keeper = self._loop.create_task(self._keep(), name=f"intake-{self._plan.name}-keep")

    def lose(self, why: str) -> SessionLostError:
        """The connection is over: nothing of it may be settled any more."""
        error = SessionLostError(f"Redis: {why}")
        if self._over is None:
            self._over = error
        self.epoch.end()
        return error

    # -- in ----------------------------------------------------------------------------------------------------------

    async def take(self, room: Room) -> Sequence[Taken]:
        """Our own pending entries first, then new ones, and now and then those of the dead."""
        while True:
            if self._over is not None:
                raise self._over
            if self._stopped:
                return []
            self._reading = True
            try:
                found = await self._read(self._portion.most(room.messages, room.bytes))
            except Exception as error:
                if self._over is not None:
                    raise self._over from None
                raise self._lost_by(error) from error
            finally:
                self._reading = False
            if self._over is not None:
                raise self._over
            if found:
                now = self._loop.time()
                size = 0
                for each in found:
                    each.taken = now
                    size += each.size
                self._portion.took(len(found), size)
                self._held.update(dict.fromkeys(found))
                return cast("Sequence[Taken]", found)

    async def _read(self, most: int) -> list[RedisDelivery]:
        if self._own_from is not None:
            return await self._read_own(most)
        if self._claim_after and self._loop.time() >= self._claim_at:
            claimed = await self._claim(most)
            if claimed:
                return claimed
        block = max(1, int(self._block * 1000))
        answer = await self._reader.xreadgroup(
            self._group, self._consumer, {self._stream: ">"}, count=most, block=block
        )
        epoch, fields = self.epoch, self._fields
        return [RedisDelivery(entry, values, epoch, fields) for entry, values in entries_of(answer)]

    async def _read_own(self, most: int) -> list[RedisDelivery]:
        """What the group says is ours already: a page at a time, each with the number of its deliveries."""
        assert self._own_from is not None  # noqa: S101 - asked only then
        answer = await self._reader.xreadgroup(
            self._group, self._consumer, {self._stream: self._own_from}, count=min(most, _PAGE)
        )
        found = entries_of(answer)
        if not found:
            self._own_from = None
            return []
        first, last = found[0][0], found[-1][0]
        self._own_from = last
        return await self._with_counts(found, first, last)

    async def _claim(self, most: int) -> list[RedisDelivery]:
        """Entries whose consumers have not given a sign of life."""
        idle = int(self._claim_after * 1000)
        answer = await self._reader.xautoclaim(
            self._stream, self._group, self._consumer, idle, start_id=self._claim_from, count=min(most, _PAGE)
        )
        self._claim_from = answer[0]
        if self._claim_from == b"0-0":
            self._claim_at = self._loop.time() + self._claim_after / 2
        gone: list[Any] = answer[2] if len(answer) > 2 else []  # noqa: PLR2004 - since Redis 7
        if gone:
            self._note_lost(len(gone))
        found = [(entry, values) for entry, values in answer[1] if entry is not None]
        return await self._with_counts(found, found[0][0], found[-1][0]) if found else []

    async def _with_counts(
        self, found: list[tuple[bytes, Mapping[bytes, bytes]]], first: bytes, last: bytes
    ) -> list[RedisDelivery]:
        pending = await self._reader.xpending_range(
            self._stream, self._group, first, last, len(found) + _PAGE, self._consumer
        )
        counts = {each["message_id"]: int(each["times_delivered"]) for each in pending}
        gone = [entry for entry, values in found if not values]
        if gone:
            # Trimmed away while they were pending: nobody will ever see them, and they would stay pending for ever.
            await self._writer.xack(self._stream, self._group, *gone)
            self._note_lost(len(gone))
        # The count is raised by a claim, and not by reading one's own: then this delivery is one more than it says.
        return [
            RedisDelivery(entry, values, self.epoch, self._fields, max(1, counts.get(entry, 1)))
            for entry, values in found
            if values
        ]

    def _note_lost(self, count: int) -> None:
        self._lost(count)
        log.error("messages_trimmed", consumer=self._plan.name, stream=self._stream, count=count)

    def _lost_by(self, error: Exception) -> SessionLostError:
        text = str(error)
        if text.startswith("NOGROUP") or "NOGROUP" in text:
            return self.lose(f"the group {self._group!r} of {self._stream!r} is gone")
        return self.lose(f"reading failed: {type(error).__name__}")

    # -- out ---------------------------------------------------------------------------------------------------------

    async def settle(self, outcomes: Outcomes) -> None:
        """Acknowledge in one command, give back by making entries claimable at once, and note attempts."""
        try:
            for each in outcomes.kept:
                assert isinstance(each, RedisDelivery)  # noqa: S101 - there are no others here
                await self._writer.xclaim(
                    self._stream, self._group, self._consumer, 0, [each.entry], retrycount=each.attempt, justid=True
                )
            if outcomes.acked:
                await self._writer.xack(self._stream, self._group, *self._ids(outcomes.acked))
            if outcomes.released:
                await self._give_back(self._ids(outcomes.released))
        except Exception as error:
            raise self.lose(f"acknowledging failed: {type(error).__name__}") from error

    def _ids(self, deliveries: Iterable[Taken]) -> list[bytes]:
        held = self._held
        found: list[bytes] = []
        for each in deliveries:
            assert isinstance(each, RedisDelivery)  # noqa: S101 - there are no others here
            held.pop(each, None)
            found.append(each.entry)
        return found

    async def _give_back(self, entries: list[bytes]) -> None:
        # There is no way to give an entry back; one that seems idle for long is claimed by whoever looks next.
        idle = int(self._claim_after * 1000) + 1
        await self._writer.xclaim(self._stream, self._group, self._consumer, 0, entries, idle=idle, justid=True)

    async def forward(self, delivery: Delivery, outcome: Retry | DeadLetter) -> None:
        """Write a dead letter and acknowledge in one transaction."""
        assert isinstance(delivery, RedisDelivery)  # noqa: S101 - there are no others here
        target = self._plan.dead_letters
        if target is None or isinstance(outcome, Retry):
            raise ConfigError("Redis: there is no stream for dead letters; give dead_letters=...")
        added = outcome.headers(delivery)
        fields: dict[Any, Any] = dict(delivery.fields)
        fields.update({name.encode(): value.encode() for name, value in added.items() if name.startswith("bq-")})
        fields[b"bq-id"] = delivery.entry
        pipeline = self._writer.pipeline(transaction=True)
        pipeline.xadd(target, fields)
        pipeline.xack(self._stream, self._group, delivery.entry)
        try:
            await pipeline.execute()
        except Exception as error:
            raise RetryableError(f"Redis: the dead letter is not written: {type(error).__name__}") from error
        self._held.pop(delivery, None)

    async def _keep(self) -> None:
        """Give a sign of life for what is held, so that nobody claims it."""
        pause = self._claim_after / 3 if self._claim_after else 60.0
        while True:
            await asyncio.sleep(pause)
            before = self._loop.time() - pause / 2
            entries: list[bytes] = []
            for each in list(self._held):
                if each.taken > before:
                    break
                entries.append(each.entry)
            try:
                for at in range(0, len(entries), _PAGE):
                    await self._writer.xclaim(
                        self._stream, self._group, self._consumer, 0, entries[at : at + _PAGE], justid=True
                    )
                await self._look_at_lag()
            except Exception as error:  # noqa: BLE001 - reading or settling will say what is wrong
                log.debug("redis_keep_failed", consumer=self._plan.name, **log.describe(error))

    async def _look_at_lag(self) -> None:
        for each in await self._writer.xinfo_groups(self._stream):
            if each.get("name") in {self._group, self._group.encode()}:
                self._lag = each.get("lag")

    # -- the end -----------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Nothing is left: every command has been answered."""

    async def stop(self) -> None:
        """End the read that is blocked, without cancelling it."""
        self._stopped = True
        while self._reading and self._over is None:
            # A read that is not blocked yet is not unblocked: ask until it has ended.
            await self._writer.client_unblock(self._reader_id)
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Close both connections."""
        if self._ended:
            return
        self._ended = True
        if self._leaves and self._stopped and not self._reading and self._over is None:
            await self._leave()
        self.lose("the session was ended")
        if self._keeper is not None:
            self._keeper.cancel()
        with contextlib.suppress(Exception):  # it is over either way
            await end(self._reader, self._writer)

    async def _leave(self) -> None:
        """Take our name, which nobody will have again, out of the group; with anything pending it has to stay."""
        try:
            async with asyncio.timeout(_LEAVE):
                if not await self._writer.xpending_range(self._stream, self._group, "-", "+", 1, self._consumer):
                    await self._writer.xgroup_delconsumer(self._stream, self._group, self._consumer)
        except Exception as error:  # noqa: BLE001 - the group has one more name then
            log.debug("redis_leave_failed", consumer=self._plan.name, **log.describe(error))

    def lag(self) -> int | None:
        """Entries that the group has not delivered, when it was last asked."""
        return self._lag


def entries_of(answer: Any) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
    """The entries of one stream in what a read answers, in any of the client's shapes.

    Example:
        >>> entries_of([[b"s", [(b"1-0", {b"a": b"1"})]]]), entries_of({b"s": [[(b"1-0", {})]]}), entries_of([])
        ([(b'1-0', {b'a': b'1'})], [(b'1-0', {})], [])
    """
    if not answer:
        return []
    streams: Any = answer
    found: Any = next(iter(streams.values())) if hasattr(streams, "values") else streams[0][1]
    first: Any = found[0] if found else None
    # With RESP3 the entries of a stream are one level deeper.
    entries: Any = found if first is None or (first and isinstance(first[0], bytes)) else first
    return [(entry, values or {}) for entry, values in entries]
