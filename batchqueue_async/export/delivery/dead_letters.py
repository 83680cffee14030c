"""What becomes of records that are given up: the disk, another exporter, the user's function, the report."""

from __future__ import annotations

import asyncio
import inspect
import time
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.durable.dead_letters import DeadLetter
from batchqueue_async.errors import PermanentError
from batchqueue_async.export.delivery.leased_batch import STEP, portions
from batchqueue_async.export.send_queue import codec
from batchqueue_async.export.send_queue.weight import weigh
from batchqueue_async.export.stats import GivenUp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchqueue_async.export.delivery.context import ExportContext
    from batchqueue_async.export.delivery.leased_batch import Batch

KEPT_RECORDS = 1_000
KEPT_BYTES = 16 << 20


class KeptLetter(NamedTuple):
    """A record that was given up, and is kept in memory.

    Attributes:
        seq: its number among the dead letters.
        record: the record.
        reason: why it was given up.
        attempts: how often its batch had been sent.
        original_seq: its number in the send queue.
        enqueued_at: when it was put there.
        died_at: when it was given up.
        size: its bytes, as the send queue counts them.
    """

    seq: int
    record: Any
    reason: str
    attempts: int
    original_seq: int
    enqueued_at: float
    died_at: float
    size: int


def as_dead_letter(letter: KeptLetter) -> DeadLetter:
    """A letter with its record in the form that it would have on disk, or its `repr` where it has none."""
    try:
        payload = codec.encode(letter.record)
    except PermanentError:
        payload = codec.encode(repr(letter.record))
    return DeadLetter(
        seq=letter.seq,
        payload=payload,
        reason=letter.reason,
        attempts=letter.attempts,
        original_seq=letter.original_seq,
        enqueued_at=letter.enqueued_at,
        died_at=letter.died_at,
    )


class DeadLetters:
    """The records that one exporter gave up.

    Attributes:
        given_up: without a directory, the newest of them, for the report and to be put back.
        forward: where they go, if to another destination: takes mappings with the record and its reason.
    """

    def __init__(self, context: ExportContext, forward: Callable[[list[Any]], Any] | None) -> None:
        self._context = context
        self._keep = context.config.path is None and forward is None
        self._most = min(KEPT_BYTES, context.config.byte_limit)
        # By their numbers, which rise.
        self._letters: dict[int, KeptLetter] = {}
        self._bytes = self._last = 0
        self.forward = forward

    @property
    def given_up(self) -> tuple[GivenUp, ...]:
        """The newest of them, within a bound of records and bytes."""
        together = groupby(self._letters.values(), attrgetter("died_at", "reason"))
        return tuple(GivenUp(records=[each.record for each in same], reason=why) for (_, why), same in together)

    async def add(self, batch: Batch, places: Sequence[int], why: str) -> None:
        """Records are given up for this reason; where they can't be kept, the send queue keeps them."""
        context = self._context
        records = batch.take_originals(places)
        gone = 0
        moved: list[int] = []
        try:
            if self.forward is None:
                for part in _pieces(batch, places):
                    done = await batch.dead_letter(why, part)
                    context.counts.given_up(done, why)
                    gone += done
                    moved += part
            else:
                async with asyncio.timeout(context.config.send_timeout):
                    await self.forward(
                        [{"exporter": context.name, "reason": why, "record": record} for record in records]
                    )
                async for part in portions(batch, places):
                    done = await batch.ack(part)
                    context.counts.forwarded += done
                    context.counts.given_up(done, why)
                    gone += done
        except Exception as error:  # noqa: BLE001 - a disk that is full, a destination that is not open: kept meanwhile
            log.error("dead_letters_failed", exporter=context.name, records=len(places), **describe(error))
            await batch.nack(context.backoff.ceiling(batch.attempts), places, reason="dead_letters_failed")
            if not moved:
                return
            places, records = moved, batch.take_originals(moved)
        log.warning("records_given_up", exporter=context.name, records=gone, reason=why)
        if self._keep:
            self._remember(batch, places, records, why)
        await self._report(records, why)

    def kept(self, limit: int) -> list[KeptLetter]:
        """The oldest records that are kept; they stay."""
        return list(islice(self._letters.values(), limit))

    def take(self, numbers: Iterable[int] | None = None, before: float | None = None) -> list[KeptLetter]:
        """Records that are kept, to be put back or forgotten: all, those with these numbers, or the older ones."""
        wanted = None if numbers is None else set(numbers)
        taken = [
            letter
            for letter in self._letters.values()
            if (wanted is None or letter.seq in wanted) and (before is None or letter.died_at < before)
        ]
        for letter in taken:
            self._forget(letter.seq)
        return taken

    def restore(self, letters: Sequence[KeptLetter]) -> None:
        """Records that could not be put back are kept again, by their numbers."""
        if letters:
            known = [*self._letters.values(), *letters]
            self._letters = {letter.seq: letter for letter in sorted(known, key=attrgetter("seq"))}
            self._bytes += sum(letter.size for letter in letters)
            self._evict()

    def _remember(self, batch: Batch, places: Sequence[int], records: list[Any], why: str) -> None:
        now = time.time()
        age = max(0, self._context.queue.now_ns() - batch.enqueued_ns) / 1e9
        numbers = batch.numbers_at(places)
        for record, number in zip(records, numbers, strict=True):
            self._last += 1
            letter = KeptLetter(
                seq=self._last,
                record=record,
                reason=why,
                attempts=batch.attempts,
                original_seq=number,
                enqueued_at=now - age,
                died_at=now,
                size=weigh(record),
            )
            self._letters[letter.seq] = letter
            self._bytes += letter.size
        self._evict()

    def _forget(self, seq: int) -> None:
        self._bytes -= self._letters.pop(seq).size

    def _evict(self) -> None:
        """The oldest go, until what is left is within both bounds."""
        for seq in list(self._letters):
            if len(self._letters) <= KEPT_RECORDS and self._bytes <= self._most:
                break
            self._forget(seq)

    async def _report(self, records: list[Any], why: str) -> None:
        if self._context.config.on_dead_letter is None:
            return
        try:
            answer = self._context.config.on_dead_letter(records, why)
            if inspect.isawaitable(answer):
                # One that hangs must not take a worker for ever: the good records are behind it.
                async with asyncio.timeout(self._context.config.send_timeout):
                    await answer
        except Exception as error:  # noqa: BLE001 - the user's function: what it misses is in the log
            log.error("on_dead_letter_failed", exporter=self._context.name, **describe(error))


def _pieces(batch: Batch, places: Sequence[int]) -> list[Sequence[int]]:
    """The places in pieces that a lease moves as one: of one that fails nothing has gone, and what went is known."""
    numbers = batch.numbers_at(places)
    if len(places) <= STEP or max(numbers) - min(numbers) < len(places):
        return [places]
    return [places[low : low + STEP] for low in range(0, len(places), STEP)]
