"""What becomes of records that are given up: the disk, another exporter, the user's function, the report."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.export.delivery.leased_batch import STEP, portions
from batchqueue_async.export.send_queue.weight import weigh
from batchqueue_async.export.stats import GivenUp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.export.delivery.context import ExportContext
    from batchqueue_async.export.delivery.leased_batch import Batch

KEPT_RECORDS = 1_000
KEPT_BYTES = 16 << 20


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
        self._letters: deque[tuple[GivenUp, int]] = deque()
        self._records = self._bytes = 0
        self.forward = forward

    @property
    def given_up(self) -> tuple[GivenUp, ...]:
        """The newest of them, within a bound of records and bytes."""
        return tuple(letter for letter, _ in self._letters)

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
            records = batch.take_originals(moved)
        log.warning("records_given_up", exporter=context.name, records=gone, reason=why)
        if self._keep:
            self._remember(records, why)
        await self._report(records, why)

    def take(self) -> list[tuple[Any, str]]:
        """The records that are kept, with their reasons, to be put back; none is kept any more."""
        records = [(record, letter.reason) for letter, _ in self._letters for record in letter.records]
        self._letters.clear()
        self._records = self._bytes = 0
        return records

    def restore(self, letters: Sequence[tuple[Any, str]]) -> None:
        """Records that could not be put back are kept again."""
        for why, same in groupby(letters, itemgetter(1)):
            self._remember([record for record, _ in same], why)

    def _remember(self, records: list[Any], why: str) -> None:
        sizes = [weigh(record) for record in records]
        size = sum(sizes)
        while records and (len(records) > KEPT_RECORDS or size > self._most):
            records, sizes = records[1:], sizes[1:]
            size = sum(sizes)
        letter = GivenUp(records=records, reason=why)
        self._letters.append((letter, size))
        self._records += len(records)
        self._bytes += size
        while self._letters and (
            self._records > KEPT_RECORDS or self._bytes > self._most or len(self._letters) > KEPT_RECORDS
        ):
            old, gone = self._letters.popleft()
            self._records -= len(old.records)
            self._bytes -= gone

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
