"""One batch to the sink, and what comes of it: every record is settled when this returns, or given back.

send -- taken --> ack              too large --> halves, down to the record --> dead letter
     -- partly --> each by itself  refused for good --> without the culprits, or in halves --> dead letter
     -- destination not well --> back into the queue, with a delay, or given up when its attempts are over
     -- credentials refused --> back into the queue, and everything pauses

What was divided stays divided: a part of a batch that was refused as a whole is set aside, and waits by itself for its
repetition. Put together again it would be refused again, for ever where the parts meet another error each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

from batchqueue_async._support import log, tracing
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
from batchqueue_async.export.delivery.leased_batch import STEP, LeasedBatch, portions
from batchqueue_async.export.delivery.send_plan import SendPlan
from batchqueue_async.export.delivery.stuck import as_it_is
from batchqueue_async.export.send_queue.attempt_log import SUSPECT
from batchqueue_async.sinks.base import KeyedSink, PreparingSink, SendResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from batchqueue_async.export.control.send_gate import SendPermit
    from batchqueue_async.export.delivery.context import ExportContext
    from batchqueue_async.export.delivery.dead_letters import DeadLetters
    from batchqueue_async.export.delivery.host import DeliveryHost
    from batchqueue_async.export.delivery.kept import KeptBatches
    from batchqueue_async.export.delivery.leased_batch import Batch
    from batchqueue_async.export.delivery.waiters import DeliveryWaiters
    from batchqueue_async.export.send_queue.attempt_log import AttemptLog


class BatchSender:
    """Sends batches to one sink."""

    def __init__(
        self,
        context: ExportContext,
        dead_letters: DeadLetters,
        kept: KeptBatches,
        waiters: DeliveryWaiters,
        host: DeliveryHost,
    ) -> None:
        self._context = context
        self._host = host
        self._waiters = waiters
        self._dead_letters = dead_letters
        self._kept = kept
        self._keyed = context.sink if isinstance(context.sink, KeyedSink) else None
        self._preparing = context.sink if isinstance(context.sink, PreparingSink) else None
        self._alone = asyncio.Lock()
        self._in_any_order = context.config.ordering == "any"
        traced = tracing.active
        self._traced = None if traced is None else traced.sends(context.name, type(context.sink).__qualname__)

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
                given = await self._wait_for_turn(batch, batch.weight * plan.size // len(batch), given)
            if given is None:
                await self._put_off(batch, plan, plan.next(), "gate_closed")
                return
            batch.extend()
            places = plan.next()
            outcome = await self._attempt(batch, places, given)
            if isinstance(outcome, BaseException):
                going = await self._failed(batch, plan, places, outcome, given)
                self._end_note(batch)
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
            if suspects and (parts := await self._suspected(batch, suspects, attempts)) is not None:
                return parts
        if context.key is not None:
            return batch.waves(context.key)
        if batch.broken:
            good = [place for place in range(len(batch)) if place not in batch.broken]
            return [good] if good else []
        return [range(len(batch))]

    async def _suspected(self, batch: Batch, suspects: list[int], attempts: AttemptLog) -> list[Sequence[int]] | None:
        """The sends of a batch with records whose sends the process did not survive; None for one send as ever."""
        retry, crashes = self._context.config.retry, attempts.crashes
        gone = {*batch.broken}
        for place in suspects:
            number = batch.numbers[place]
            for name, most, count in (
                ("max_attempts", retry.max_attempts, crashes[number]),
                ("max_crashes", retry.max_crashes, attempts.alone.get(number, 0)),
            ):
                if most is not None and count >= most:
                    gone.add(place)
                    await self.give_up(
                        batch, [place], f"{count} attempts, and {name}={most}; the process ended in each"
                    )
                    break
        if gone <= batch.broken.keys() and not any(crashes[batch.numbers[place]] >= SUSPECT for place in suspects):
            return None
        return [[place] for place in range(len(batch)) if place not in gone]

    async def _wait_for_turn(self, batch: Batch, size: int, permit: SendPermit) -> SendPermit | None:
        """Wait as long as the pace asks for a send of so many bytes; what leave there is then."""
        context = self._context
        wait = context.rate.reserve(context.now(), size)
        if wait <= 0:
            return permit
        try:
            with context.keeper.holding(batch):
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
        if attempts.crashes and any(attempts.crashes.get(number, 0) >= SUSPECT for number in numbers):
            # Alone, so that no other record is under way when it ends the process again.
            with context.keeper.holding(batch):
                await self._alone.acquire()
            try:
                return await self._noted(batch, places, permit, numbers)
            finally:
                self._alone.release()
        return await self._noted(batch, places, permit, numbers)

    async def _noted(
        self, batch: Batch, places: Sequence[int], permit: SendPermit, numbers: Sequence[int]
    ) -> SendResult | BaseException | None:
        attempts = self._context.attempts
        assert attempts is not None  # noqa: S101 - asked by the caller
        repeats, after = (batch.repeats, batch.note) if isinstance(batch, LeasedBatch) else (0, 0)
        note = attempts.started(numbers, repeats, after)
        try:
            outcome = await self._send(batch, places, permit)
        except BaseException:
            # Cut off: the destination may have taken it.
            (attempts.kept if self._context.together else attempts.ended)(note)
            raise
        if len(numbers) == 1:
            attempts.survived(numbers)
        if isinstance(batch, LeasedBatch):
            batch.note = 0
            if self._context.together and isinstance(outcome, BaseException) and _may_be_kept(outcome):
                batch.note = note
                return outcome
        attempts.ended(note)
        return outcome

    def _end_note(self, batch: Batch) -> None:
        """What is not sent again as it is need not be known again."""
        attempts = self._context.attempts
        if attempts is not None and isinstance(batch, LeasedBatch) and batch.note and not batch.kept:
            attempts.ended(batch.note)
            batch.note = 0

    async def _send(self, batch: Batch, places: Sequence[int], permit: SendPermit) -> SendResult | BaseException | None:
        context, counts = self._context, self._context.counts
        start = context.now()
        counts.sending += 1
        try:
            if self._traced is None:
                result = await self._bounded(batch, places)
            else:
                result = await self._traced(partial(self._bounded, batch, places), len(places), batch.attempts)
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
                asked = context.backoff.asked(error.retry_after) if isinstance(error, RetryableError) else None
                context.rate.refused(context.now(), start, asked or 0.0)
            return error
        finally:
            counts.sending -= 1
        context.rate.answered(context.now())
        self._host.answered(context.now() - start, len(places))
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

    async def _bounded(self, batch: Batch, places: Sequence[int]) -> SendResult | None:
        async with asyncio.timeout(self._context.config.send_timeout):
            return await self._call(batch, places)

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
        counts.failed(reason(error))
        if batch.attempts > 1:
            counts.retry_failures[kind] += 1
        asked = context.backoff.asked(error.retry_after) if isinstance(error, RetryableError) else None
        if disposition is Disposition.RETRY:
            was = gate.health.state
            gate.failed(permit, now, asked)
            self._host.failed()
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
            apart = self._context.together or plan.divided or _is_apart(batch)
            await self._repeat(batch, places, error, kind, apart=apart)
            await self._give_back(batch, plan, "not_tried")
            return False
        if disposition is Disposition.PAUSE:
            await self._put_off(batch, plan, places, kind)
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
                left = [place for place in places if place not in set(named)]
                delay = self._context.backoff.delay(1)
                if left:
                    await self._set_aside(batch, left, delay, "isolating", counted=False)
                for part in plan.rest():
                    await self._nack(batch, delay, part, "isolating", counted=False)
            return found
        await self.give_up(batch, places, reason(error))
        return True

    # -- what becomes of records ---------------------------------------------------------------------------------

    async def _repeat(
        self, batch: Batch, places: Sequence[int], error: BaseException, kind: str, *, apart: bool
    ) -> None:
        """Put records off that were sent, or give up those whose attempts are over; `apart`, they stay together."""
        context = self._context
        again = await self._unexhausted(batch, places, error)
        if not again:
            return
        asked = error.retry_after if isinstance(error, RetryableError) else None
        unknown = classify(error).disposition is Disposition.UNKNOWN
        divided = unknown and len(again) > 1 and self._may_be_divided(batch)
        if unknown and not divided and batch.attempts >= self._as_it_is:
            context.is_stuck(batch.numbers_at(again), batch.attempts, error)
        if divided:
            await self._divide(batch, again, kind)
        elif apart and len(again) == len(places) and (context.strict or not unknown or batch.attempts == 1):
            context.counts.backoff = delay = context.backoff.delay(batch.attempts, asked)
            await self._set_aside(batch, again, delay, kind, counted=True)
        else:
            # Records that had to wait often don't make those wait that came into the batch with them.
            for attempts, part in batch.by_attempts(again).items():
                context.counts.backoff = delay = context.backoff.delay(attempts, asked)
                await self._nack(batch, delay, part, kind)

    @property
    def _as_it_is(self) -> int:
        return as_it_is(self._context.config.retry.max_attempts)

    def _may_be_divided(self, batch: Batch) -> bool:
        """Whether a batch that failed, nobody knows why, may be sent in parts: one record may be the reason.

        Where a repetition must be the same request, it is that for a while. Its parts are other requests then, with
        keys of their own; without keys the destination could tell nothing apart, so that the batch stays as it is.
        """
        if not self._context.strict:
            return batch.attempts > 1
        if self._keyed is None:
            return False
        return batch.attempts >= self._as_it_is or not isinstance(batch, LeasedBatch)

    async def _divide(self, batch: Batch, places: Sequence[int], why: str) -> None:
        """Send records again in two halves, so that the one without the reason gets through."""
        context = self._context
        middle = (len(places) + 1) // 2
        halves = ((places[:middle], 1.0), (places[middle:], 1.5))
        if not context.strict:
            for part, spread in halves:
                context.counts.backoff = delay = spread * context.backoff.ceiling(batch.attempts)
                await self._nack(batch, delay, part, why)
            return
        if isinstance(batch, LeasedBatch) and batch.note and context.attempts is not None:
            context.attempts.ended(batch.note)  # the whole is no request any more
            batch.note = 0
        # The delays of the whole led nowhere: they begin anew.
        attempts = batch.attempts - self._as_it_is + 1
        for part, spread in halves:
            context.counts.backoff = delay = spread * context.backoff.ceiling(attempts)
            if self._in_any_order or part is halves[0][0]:
                await self._set_aside(batch, part, delay, why, counted=True)
            else:
                await self._nack(batch, 0.0, part, why)

    async def _set_aside(self, batch: Batch, places: Sequence[int], delay: float, why: str, *, counted: bool) -> None:
        """Let records wait for their repetition as a batch of their own."""
        context = self._context
        if not isinstance(batch, LeasedBatch):
            batch.divide(places)
            await self._nack(batch, delay, places, why, counted=counted)
            return
        part = batch if len(places) == len(batch) else batch.part(places)
        if part is not batch:
            part.note, batch.note = batch.note, 0
        if not counted:
            part.unrepeat()
        part.extend()
        self._kept.add(part, context.now() + delay)
        if part.note and context.attempts is not None:
            context.attempts.kept(part.note)

    async def _put_off(self, batch: Batch, plan: SendPlan, places: Sequence[int], why: str) -> None:
        """Records go back as they came, with what is left of the plan, or wait as a batch of their own."""
        repeated = isinstance(batch, LeasedBatch) and batch.repeats > 0 and len(places) == len(batch)
        if repeated or plan.divided or _is_apart(batch):
            await self._set_aside(batch, places, 0.0, why, counted=False)
        else:
            await self._nack(batch, 0.0, places, why, counted=False)
        await self._give_back(batch, plan, why)

    async def _give_back(self, batch: Batch, plan: SendPlan, why: str) -> None:
        """The records that have not been sent go back as they came."""
        apart = (plan.divided or _is_apart(batch)) and self._in_any_order
        for part in plan.rest():
            if apart:
                await self._set_aside(batch, part, 0.0, why, counted=False)
            else:
                await self._nack(batch, 0.0, part, why, counted=False)

    async def _nack(self, batch: Batch, delay: float, places: Sequence[int], why: str, *, counted: bool = True) -> None:
        """Give records back, so many between two turns of the loop."""
        async for part in portions(batch, places):
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
            if self._host.fail_over(batch, gone):
                context.stuck.settled(batch.numbers_at(gone))
                context.counts.failover_in += await batch.dead_letter(why, gone)
            else:
                await self.give_up(batch, gone, f"{why}; the last was {reason(error)}")
        return left

    async def give_up(self, batch: Batch, places: Sequence[int], why: str) -> None:
        """Records go to the dead letters."""
        numbers = batch.numbers_at(places)
        before = batch.unsettled
        if self._context.stuck:
            self._context.stuck.settled(numbers)
        with self._waiters.settling(numbers):
            await self._dead_letters.add(batch, places, why)
            if batch.unsettled < before:
                self._waiters.settled(numbers, why)

    async def _delivered(self, batch: Batch, places: Sequence[int], skipped: int) -> None:
        """The sink took these records."""
        counts = self._context.counts
        numbers = batch.numbers_at(places)
        if self._context.stuck:
            self._context.stuck.settled(numbers)
        with self._waiters.settling(numbers):
            async for part in portions(batch, places):
                done = await batch.ack(part)
                counts.delivered += done
                counts.delivered_bytes += batch.weight * done // len(batch)
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
            context.counts.failed(reason(error))
            if disposition is Disposition.PAUSE:
                paused += part
            elif disposition in SENT_AGAIN:
                again = True
                if disposition is Disposition.UNKNOWN:
                    context.warn_of(error)
                await self._repeat(batch, part, error, kind, apart=plan.divided or _is_apart(batch))
            else:
                await self.give_up(batch, part, reason(error))
        if pausing:
            await self._nack(batch, 0.0, paused, "auth", counted=False)
            await self._give_back(batch, plan, "auth")
            return False
        if again and not self._in_any_order:
            await self._give_back(batch, plan, "not_tried")
            return False
        return True

    async def _by_reason(
        self, places: Sequence[int], rejected: Mapping[int, SinkError]
    ) -> list[tuple[BaseException, list[int]]]:
        """The records that were not taken, by what was said about them."""
        found: dict[tuple[type, str, float | None], tuple[BaseException, list[int]]] = {}
        wrong = 0
        for count, (index, error) in enumerate(rejected.items()):
            if count % STEP == STEP - 1:
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


def _is_apart(batch: Batch) -> bool:
    return isinstance(batch, LeasedBatch) and batch.apart


def _may_be_kept(error: BaseException) -> bool:
    """Whether a batch may wait for its repetition as it is after this."""
    disposition = classify(error).disposition
    return disposition in SENT_AGAIN or disposition is Disposition.PAUSE


def _not_an_error(said: object) -> SinkError:
    return SinkError(f"the sink rejected records with a {type(said).__name__}, which is not an error")
