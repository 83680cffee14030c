"""One batch to the sink, and what comes of it: every record is settled when this returns, or given back.

send -- taken --> ack              too large --> halves, down to the record --> dead letter
     -- partly --> each by itself  refused for good --> without the culprits, or in halves --> dead letter
     -- destination not well --> back into the queue, with a delay, or given up when its attempts are over
     -- credentials refused --> back into the queue, and everything pauses
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.errors import PermanentError, QueueClosedError, RetryableError, SinkError
from batchqueue_async.export.delivery.classify import (
    SENT_AGAIN,
    Disposition,
    classify,
    culprits,
    is_fatal,
    is_sinks_own,
    reason,
    words,
)
from batchqueue_async.export.delivery.leased_batch import LeasedBatch
from batchqueue_async.export.delivery.send_plan import SendPlan
from batchqueue_async.sinks.base import KeyedSink, PreparingSink, SendResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from batchqueue_async.export.control.send_gate import SendPermit
    from batchqueue_async.export.delivery.context import ExportContext
    from batchqueue_async.export.delivery.dead_letters import DeadLetters
    from batchqueue_async.export.delivery.kept import KeptBatches
    from batchqueue_async.export.delivery.leased_batch import Batch
    from batchqueue_async.export.delivery.waiters import DeliveryWaiters

# Records that are looked at between two turns of the loop.
_STEP = 500
# A send that the process did not survive twice is repeated with one record at a time.
_SUSPECT = 2


class BatchSender:
    """Sends batches to one sink.

    Attributes:
        failover: takes records whose attempts are over; None where they are given up.
        on_latency: called with the seconds of a send that was answered, and its records.
        on_failure: called when the destination was not well.
    """

    def __init__(
        self, context: ExportContext, dead_letters: DeadLetters, kept: KeptBatches, waiters: DeliveryWaiters
    ) -> None:
        self._context = context
        self._waiters = waiters
        self._dead_letters = dead_letters
        self._kept = kept
        self._keyed = context.sink if isinstance(context.sink, KeyedSink) else None
        self._preparing = context.sink if isinstance(context.sink, PreparingSink) else None
        self._alone = asyncio.Lock()
        self.failover: Callable[[Batch, Sequence[int]], None] | None = None
        self.on_latency: Callable[[float, int], None] = _ignore
        self.on_failure: Callable[[], None] = _ignore

    async def deliver(self, batch: Batch, permit: SendPermit) -> None:
        """Send a batch with this leave, which the gate gave, and settle all of it."""
        delay = 0.0
        try:
            await self._run(batch, permit)
        except Exception:
            delay = self._context.backoff.delay(batch.attempts)  # a bug in this library may last
            raise
        finally:
            if batch.unsettled and not batch.kept:
                # Cut off, or that bug: nothing may stay leased by nobody.
                # On disk it stays as it is where the queue is closed, and in memory the report has it.
                with suppress(QueueClosedError):
                    await batch.nack(delay, reason="cut_off")

    async def _run(self, batch: Batch, permit: SendPermit) -> None:
        context = self._context
        for place, error in batch.broken.items():
            await self.give_up(batch, [place], reason(error))
        given: SendPermit | None = permit
        plan = SendPlan(await self._parts(batch), context.config.retry.isolation_sends)
        while plan:
            if given is None:
                given = context.gate.acquire(context.now())
            if given is not None and not context.rate.unlimited:
                given = await self._wait_for_turn(batch, given)
            if given is None:
                await self._put_off(batch, plan.rest(), "gate_closed", counted=False)
                return
            batch.extend()
            places = plan.next()
            outcome = await self._attempt(batch, places, given)
            if isinstance(outcome, BaseException):
                going = await self._failed(batch, plan, places, outcome, given)
            else:
                going = await self._sent(batch, plan, places, outcome, given)
            if not going:
                return
            given = None
        if given is not None:
            context.gate.release(given)  # nothing could be decoded

    async def _parts(self, batch: Batch) -> list[Sequence[int]]:
        """The sends of a batch that was not refused yet."""
        context = self._context
        attempts = context.attempts
        if attempts is not None and attempts.crashes:
            suspects = [place for place, number in enumerate(batch.numbers) if number in attempts.crashes]
            if suspects and (parts := await self._suspected(batch, suspects, attempts.crashes)) is not None:
                return parts
        if context.key is not None:
            return batch.waves(context.key)
        if batch.broken:
            good = [place for place in range(len(batch)) if place not in batch.broken]
            return [good] if good else []
        return [range(len(batch))]

    async def _suspected(
        self, batch: Batch, suspects: list[int], crashes: dict[int, int]
    ) -> list[Sequence[int]] | None:
        """The sends of a batch with records whose sends the process did not survive; None for one send as ever."""
        most = self._context.config.retry.max_attempts
        over = [place for place in suspects if most is not None and crashes[batch.numbers[place]] >= most]
        for place in over:
            count = crashes[batch.numbers[place]]
            await self.give_up(batch, [place], f"{count} attempts, and max_attempts={most}; the process ended in each")
        if not any(crashes.get(batch.numbers[place], 0) >= _SUSPECT for place in suspects) and not over:
            return None
        gone = {*over, *batch.broken}
        return [[place] for place in range(len(batch)) if place not in gone]

    async def _wait_for_turn(self, batch: Batch, permit: SendPermit) -> SendPermit | None:
        """Wait as long as the pace asks for; what leave there is then."""
        context = self._context
        size = batch.weight if isinstance(batch, LeasedBatch) else 0
        wait = context.rate.reserve(context.now(), size)
        if wait <= 0:
            return permit
        try:
            await asyncio.sleep(wait)
        except BaseException:
            context.gate.release(permit)
            raise
        if context.gate.is_valid(permit, context.now()):
            return permit
        context.gate.release(permit)
        return context.gate.acquire(context.now())

    # -- one send ------------------------------------------------------------------------------------------------

    async def _attempt(
        self, batch: Batch, places: Sequence[int], permit: SendPermit
    ) -> SendResult | BaseException | None:
        """Send the records at these places; what the sink returned or raised."""
        context = self._context
        attempts = context.attempts
        if attempts is None:
            return await self._send(batch, places, permit)
        numbers = batch.numbers_at(places)
        if attempts.crashes and any(attempts.crashes.get(number, 0) >= _SUSPECT for number in numbers):
            # Alone, so that no other record is under way when it ends the process again.
            async with self._alone:
                return await self._noted(batch, places, permit, numbers)
        return await self._noted(batch, places, permit, numbers)

    async def _noted(
        self, batch: Batch, places: Sequence[int], permit: SendPermit, numbers: Sequence[int]
    ) -> SendResult | BaseException | None:
        attempts = self._context.attempts
        assert attempts is not None  # noqa: S101 - asked by the caller
        send = attempts.started(numbers)
        try:
            return await self._send(batch, places, permit)
        finally:
            attempts.ended(send)

    async def _send(self, batch: Batch, places: Sequence[int], permit: SendPermit) -> SendResult | BaseException | None:
        context, counts = self._context, self._context.counts
        start = context.now()
        counts.sending += 1
        try:
            async with asyncio.timeout(context.config.send_timeout):
                result = await self._call(batch, places)
        except asyncio.CancelledError as error:
            if not is_sinks_own(error):
                context.gate.release(permit)
                raise
            return error
        except BaseException as error:
            if is_fatal(error):
                context.gate.release(permit)
                raise
            if classify(error).disposition is Disposition.SLOW_DOWN:
                context.rate.refused(context.now(), start)
            return error
        finally:
            counts.sending -= 1
        context.rate.answered()
        self.on_latency(context.now() - start, len(places))
        return self._understood(cast("object", result))

    def _understood(self, result: object) -> SendResult | SinkError | None:
        """What a send returned, which any class may have written: a result, or an error where it says nothing."""
        if result is None:
            return None
        if not isinstance(result, SendResult):
            self._context.warn_of_answer(result)
            return None
        rejected = cast("object", result.rejected)
        if not isinstance(rejected, Mapping):
            return SinkError(f"the sink's `rejected` is a {type(rejected).__name__}, not a mapping by place")
        return result

    def _call(self, batch: Batch, places: Sequence[int]) -> Awaitable[SendResult | None]:
        if batch.prepared is not None and len(places) == len(batch) and self._preparing is not None:
            return self._preparing.send_prepared(batch.prepared)
        records = batch.take(places)
        if self._keyed is not None:
            return self._keyed.send_keyed(records, self._context.queue.keys(batch.numbers_at(places)))
        return self._context.sink.send(records)

    # -- what an error means -------------------------------------------------------------------------------------

    def _note(self, error: BaseException, permit: SendPermit, batch: Batch) -> tuple[Disposition, str]:
        """Count a send that failed, and let the gate know."""
        context = self._context
        counts, gate, now = context.counts, context.gate, context.now()
        disposition, kind = classify(error)
        counts.failures[kind] += 1
        counts.last_error = reason(error)
        if batch.attempts > 1:
            counts.retry_failures[kind] += 1
        asked = context.backoff.asked(error.retry_after) if isinstance(error, RetryableError) else None
        if disposition is Disposition.RETRY:
            was = gate.health.state
            gate.failed(permit, now, asked)
            self.on_failure()
            if gate.health.state == "open" and was == "closed":
                log.warning("breaker_opened", exporter=context.name, reason=reason(error), **describe(error))
        elif disposition is Disposition.SLOW_DOWN:
            gate.throttled(permit, now, asked)
        elif disposition is Disposition.PAUSE:
            context.pause(error, permit)
        elif disposition is Disposition.UNKNOWN:
            gate.release(permit)
            context.warn_of(error)
        else:
            self.answered(permit)
        return disposition, kind

    def answered(self, permit: SendPermit) -> None:
        """The destination is well."""
        gate = self._context.gate
        if gate.answered(permit):
            log.info("destination_well", exporter=self._context.name, breaker=gate.health.state, pause=gate.auth.state)

    async def _failed(
        self, batch: Batch, plan: SendPlan, places: Sequence[int], error: BaseException, permit: SendPermit
    ) -> bool:
        """Whether the batch's other parts are still to be sent."""
        counts, retry = self._context.counts, self._context.config.retry
        disposition, kind = self._note(error, permit, batch)
        if disposition in SENT_AGAIN:
            rest = plan.rest()
            await self._repeat(batch, places, rest, error, kind)
            return False
        if disposition is Disposition.PAUSE:
            await self._put_off(batch, [*places, *plan.rest()], kind, counted=False)
            return False
        if disposition is Disposition.SPLIT and len(places) > 1:
            counts.splits += 1
            plan.extra += 1  # this ends: halves get smaller
            plan.halve(places)
            return True
        if disposition is Disposition.GIVE_UP and len(places) > 1 and retry.isolate:
            counts.isolations += 1
            named = culprits(error, places)
            found = plan.without(places, named) if named else plan.halve(places)
            if named:
                await self.give_up(batch, named, reason(error))
            if not found:
                # It goes on later: what is left may be good, and is not given up for what others were.
                left = [place for place in [*places, *plan.rest()] if place not in set(named)]
                await self._nack(batch, self._context.backoff.delay(1), left, "isolating", counted=False)
            return found
        await self.give_up(batch, places, reason(error))
        return True

    # -- what becomes of records ---------------------------------------------------------------------------------

    async def _repeat(
        self, batch: Batch, places: Sequence[int], rest: Sequence[int], error: BaseException, kind: str
    ) -> None:
        """Put records off that were sent, or give up those whose attempts are over; the rest goes back as it came."""
        context = self._context
        whole = len(places) == batch.unsettled
        again = await self._unexhausted(batch, places, error)
        if not again:
            await self._nack(batch, 0.0, rest, "not_tried", counted=False)
            return
        asked = error.retry_after if isinstance(error, RetryableError) else None
        unknown = classify(error).disposition is Disposition.UNKNOWN and batch.attempts > 1 and not context.strict
        if whole and len(again) == len(batch) and context.together and not unknown and isinstance(batch, LeasedBatch):
            context.counts.backoff = delay = context.backoff.delay(batch.attempts, asked)
            self._keep(batch, delay)
            return
        if unknown and len(again) > 1:
            # One record may be the reason: in two halves, so that the other half gets through.
            middle = (len(again) + 1) // 2
            for part, spread in ((again[:middle], 1.0), (again[middle:], 1.5)):
                delay = spread * context.backoff.ceiling(batch.attempts)
                context.counts.backoff = delay
                await self._nack(batch, delay, part, kind)
        else:
            # Records that had to wait often don't make those wait that came into the batch with them.
            for attempts, part in batch.by_attempts(again).items():
                context.counts.backoff = delay = context.backoff.delay(attempts, asked)
                await self._nack(batch, delay, part, kind)
        await self._nack(batch, 0.0, rest, "not_tried", counted=False)

    def _keep(self, batch: LeasedBatch, delay: float) -> None:
        batch.extend()
        batch.kept = True
        self._kept.add(batch, self._context.now() + delay)

    async def _put_off(self, batch: Batch, places: Sequence[int], why: str, *, counted: bool) -> None:
        """Records go back as they came, or their batch is kept together."""
        if isinstance(batch, LeasedBatch) and batch.repeats and len(places) == len(batch):
            batch.unrepeat()
            self._keep(batch, 0.0)
            return
        await self._nack(batch, 0.0, places, why, counted=counted)

    async def _nack(self, batch: Batch, delay: float, places: Sequence[int], why: str, *, counted: bool = True) -> None:
        """Give records back, so many between two turns of the loop."""
        async for part in _portions(batch, places):
            await batch.nack(delay, part, reason=why, counted=counted)

    async def _unexhausted(self, batch: Batch, places: Sequence[int], error: BaseException) -> Sequence[int]:
        """Those of the records whose attempts are not over; the others are given up."""
        context = self._context
        policy = context.config.retry
        if policy.max_attempts is None and policy.max_age is None:
            return places
        attempts, ages = batch.attempts_by_place(), batch.ages(context.queue.now_ns())
        over: dict[str, list[int]] = {}
        left: list[int] = []
        for place in places:
            why = context.backoff.exhausted(attempts[place], ages[place])
            if why is None:
                left.append(place)
            else:
                over.setdefault(why, []).append(place)
        for why, gone in over.items():
            if self.failover is not None:
                self.failover(batch, gone)
                context.counts.failover_in += await batch.dead_letter(why, gone)
            else:
                await self.give_up(batch, gone, f"{why}; the last was {reason(error)}")
        return left

    async def give_up(self, batch: Batch, places: Sequence[int], why: str) -> None:
        """Records go to the dead letters."""
        numbers = batch.numbers_at(places)
        before = batch.unsettled
        with self._waiters.settling(numbers):
            await self._dead_letters.add(batch, places, why)
            if batch.unsettled < before:
                self._waiters.settled(numbers, why)

    async def _delivered(self, batch: Batch, places: Sequence[int], skipped: int) -> None:
        """The sink took these records."""
        counts = self._context.counts
        numbers = batch.numbers_at(places)
        with self._waiters.settling(numbers):
            async for part in _portions(batch, places):
                done = await batch.ack(part)
                counts.delivered += done
            self.count_delivered(batch, skipped)
            self._waiters.settled(numbers, None)

    def count_delivered(self, batch: Batch, skipped: int) -> None:
        """A send was taken."""
        context, counts = self._context, self._context.counts
        counts.delivered_batches += 1
        counts.skipped += skipped
        if batch.attempts > 1:
            counts.retry_successes += 1
            if context.budget is not None:
                context.budget.give_back()
        elif context.budget is not None:
            context.budget.earn()

    async def _sent(
        self, batch: Batch, plan: SendPlan, places: Sequence[int], result: SendResult | None, permit: SendPermit
    ) -> bool:
        """The sink took the part, at least some of it; whether the other parts are still to be sent."""
        if result is None or not result.rejected:
            self.answered(permit)
            await self._delivered(batch, places, 0 if result is None else result.skipped)
            return True
        return await self._partly(batch, plan, places, result, permit)

    async def _partly(
        self, batch: Batch, plan: SendPlan, places: Sequence[int], result: SendResult, permit: SendPermit
    ) -> bool:
        context = self._context
        refused = await self._by_reason(places, result.rejected)
        pausing = [error for error, _ in refused if classify(error).disposition is Disposition.PAUSE]
        slowing = [error for error, _ in refused if classify(error).disposition is Disposition.SLOW_DOWN]
        if pausing:
            context.pause(pausing[0], permit)
        elif slowing:
            asked = [context.backoff.asked(error.retry_after) for error in slowing if isinstance(error, RetryableError)]
            hold = max((each for each in asked if each is not None), default=None)
            context.gate.throttled(permit, context.now(), hold)
        else:
            self.answered(permit)
        out = {place for _, part in refused for place in part}
        if len(out) < len(places):
            await self._delivered(batch, [place for place in places if place not in out], result.skipped)
        again = False
        paused: list[int] = []
        for error, part in refused:
            disposition, kind = classify(error)
            context.counts.failures[kind] += 1
            context.counts.last_error = reason(error)
            if disposition is Disposition.PAUSE:
                paused += part
            elif disposition in SENT_AGAIN:
                again = True
                if disposition is Disposition.UNKNOWN:
                    context.warn_of(error)
                await self._repeat(batch, part, (), error, kind)
            else:
                await self.give_up(batch, part, reason(error))
        if pausing:
            await self._nack(batch, 0.0, [*paused, *plan.rest()], "auth", counted=False)
            return False
        if again and (context.key is not None or context.config.ordering == "order"):
            await self._nack(batch, 0.0, plan.rest(), "not_tried", counted=False)
            return False
        return True

    async def _by_reason(
        self, places: Sequence[int], rejected: Mapping[int, SinkError]
    ) -> list[tuple[BaseException, list[int]]]:
        """The records that were not taken, by what was said about them."""
        found: dict[tuple[type, str, float | None], tuple[BaseException, list[int]]] = {}
        wrong = 0
        for count, (index, error) in enumerate(rejected.items()):
            if count % _STEP == _STEP - 1:
                await asyncio.sleep(0)
            if type(index) is not int or not 0 <= index < len(places):
                wrong += 1
                continue
            said = cast("object", error)
            known = said if isinstance(said, BaseException) else _not_an_error(said)
            asked = known.retry_after if isinstance(known, RetryableError) else None
            key = (type(known), words(known), self._context.backoff.asked(asked))
            found.setdefault(key, (known, []))[1].append(places[index])
        if wrong and not found:
            # A bug in the sink costs one record, not the count.
            error = PermanentError(f"the sink rejected records that are not in its batch of {len(places)}")
            return [(error, [places[0]])]
        return list(found.values())


async def _portions(batch: Batch, places: Sequence[int]) -> AsyncIterator[Sequence[int]]:
    """Places to settle, so many between two turns of the loop; a batch as a whole costs no more than a record."""
    if len(places) <= _STEP or len(places) == len(batch) or isinstance(places, range):
        if places:
            yield places
        return
    for low in range(0, len(places), _STEP):
        if low:
            await asyncio.sleep(0)
        yield places[low : low + _STEP]


def _not_an_error(said: object) -> SinkError:
    return SinkError(f"the sink rejected records with a {type(said).__name__}, which is not an error")


def _ignore(*_: Any) -> None:
    """Nobody asked."""
