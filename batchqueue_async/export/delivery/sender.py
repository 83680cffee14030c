"""One batch to the sink, and what comes of it: every record is settled when this returns, or given back.

send -- taken --> ack              too large --> halves, down to the record --> dead letter
     -- partly --> each by itself  refused for good --> halves, to find the records that are the reason
     -- destination not well --> back into the queue, with a delay, or given up when its attempts are over
     -- credentials refused --> back into the queue, and everything pauses
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async._support.log import describe
from batchqueue_async.errors import DurableQueueError, PermanentError, QueueClosedError, RetryableError
from batchqueue_async.export.delivery.classify import Verdict, is_sinks_own, judge, reason
from batchqueue_async.export.stats import GivenUp
from batchqueue_async.sinks.base import KeyedSink, PreparingSink, SendResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Sequence

    from batchqueue_async.export.config import ExportConfig
    from batchqueue_async.export.control.backoff import Backoff, Budget
    from batchqueue_async.export.control.send_gate import Gate, Pass
    from batchqueue_async.export.delivery.in_flight import Batch
    from batchqueue_async.export.send_queue.disk import SendQueue
    from batchqueue_async.export.stats import Counts
    from batchqueue_async.sinks.base import Sink

_KEPT = 1_000
# After so many records found bad in a row, and none good, the batch is taken for bad as a whole.
_ALL_BAD = 8


class Courier:
    """Carries batches to one sink.

    Attributes:
        given_up: the last records given up, for the report.
    """

    def __init__(
        self,
        sink: Sink,
        config: ExportConfig,
        *,
        name: str,
        queue: SendQueue,
        gate: Gate,
        backoff: Backoff,
        budget: Budget | None,
        counts: Counts,
        key: Callable[[Any], Hashable] | None,
        on_latency: Callable[[float], None],
        on_failure: Callable[[], None],
        failover: Callable[[Batch, Sequence[int]], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._keyed = sink if isinstance(sink, KeyedSink) else None
        self._config = config
        self._name = name
        self._queue = queue
        self._gate = gate
        self._backoff = backoff
        self._budget = budget
        self._counts = counts
        self._key = key
        self._on_latency = on_latency
        self._on_failure = on_failure
        self._failover = failover
        self._keep = config.path is None
        self.given_up: deque[GivenUp] = deque()
        self._kept = 0

    async def deliver(self, parcel: Batch, leave: Pass) -> None:
        """Send a batch with this leave, which the gate gave, and settle all of it."""
        delay = 0.0
        try:
            await _Trip(self, parcel).run(leave)
        except Exception:
            delay = self._backoff.delay(parcel.attempts)  # a fault of ours may last
            raise
        finally:
            if parcel.unsettled:
                # Cut off, or that fault: nothing may stay leased by nobody.
                await self._return(parcel, delay)

    async def _return(self, parcel: Batch, delay: float) -> None:
        try:
            await parcel.nack(delay, reason="cut_off")
        except QueueClosedError:
            return  # on disk it stays as it is, and in memory the report has it

    # -- one send ------------------------------------------------------------------------------------------------

    async def attempt(self, parcel: Batch, places: Sequence[int], leave: Pass) -> SendResult | BaseException | None:
        """Send the records at these places; what the sink returned or raised."""
        counts = self._counts
        start = self._loop.time()
        counts.sending += 1
        try:
            async with asyncio.timeout(self._config.send_timeout):
                result = await self._send(parcel, places)
        except asyncio.CancelledError as error:
            if not is_sinks_own(error):
                self._gate.release(leave)
                raise
            return error
        except Exception as error:  # noqa: BLE001 - whatever a sink raises is what became of the batch
            return error
        finally:
            counts.sending -= 1
        self._on_latency(self._loop.time() - start)
        return result

    def _send(self, parcel: Batch, places: Sequence[int]) -> Awaitable[SendResult | None]:
        if parcel.prepared is not None and len(places) == len(parcel) and isinstance(self._sink, PreparingSink):
            return self._sink.send_prepared(parcel.prepared)
        records = parcel.take(places)
        if self._keyed is not None:
            return self._keyed.send_keyed(records, parcel.keys(places, self._queue.queue_id))
        return self._sink.send(records)

    def note(self, error: BaseException, leave: Pass, parcel: Batch) -> tuple[Verdict, str]:
        """Count a send that failed, and tell the gate."""
        verdict, kind = judge(error)
        counts = self._counts
        counts.failures[kind] += 1
        if parcel.attempts > 1:
            counts.retry_failures[kind] += 1
        now = self._loop.time()
        if verdict is Verdict.RETRY:
            asked = self._backoff.asked(error.retry_after) if isinstance(error, RetryableError) else None
            was = self._gate.health.state
            self._gate.failed(leave, now, asked)
            self._on_failure()
            if self._gate.health.state == "open" and was == "closed":
                log.warning("breaker_opened", exporter=self._name, **describe(error))
        elif verdict is Verdict.PAUSE:
            self.pause(error, leave)
        else:
            self.answered(leave)
        return verdict, kind

    def answered(self, leave: Pass) -> None:
        """Tell the gate that the destination is well."""
        if self._gate.answered(leave):
            log.info(
                "destination_well", exporter=self._name, breaker=self._gate.health.state, pause=self._gate.auth.state
            )

    def pause(self, error: BaseException, leave: Pass) -> None:
        """The destination refuses our credentials."""
        was = self._gate.auth.state
        self._gate.refused(leave, self._loop.time())
        if was == "closed" and self._gate.auth.state == "open":
            self._counts.pauses += 1
            log.error(
                "exporter_paused",
                exporter=self._name,
                pause=self._config.auth_pause,
                way_out="give the sink credentials that the destination takes; nothing is dropped meanwhile",
                **describe(error),
            )

    # -- what becomes of records ---------------------------------------------------------------------------------

    def delivered(self, parcel: Batch, count: int, skipped: int) -> None:
        """The sink took so many records."""
        counts = self._counts
        counts.delivered += count
        counts.delivered_batches += 1
        counts.skipped += skipped
        if parcel.attempts > 1:
            counts.retry_successes += 1
            if self._budget is not None:
                self._budget.give_back()
        elif self._budget is not None:
            self._budget.earn()

    async def retry(self, parcel: Batch, places: Sequence[int], error: BaseException, kind: str) -> None:
        """Put records off, or give up those whose attempts are over."""
        over, places = self._exhausted(parcel, places)
        for why, gone in over.items():
            if self._failover is not None:
                self._failover(parcel, gone)
                self._counts.failover_in += await parcel.dead_letter(why, gone)
            else:
                await self.give_up(parcel, gone, f"{why}; the last was {reason(error)}")
        if not places:
            return
        asked = error.retry_after if isinstance(error, RetryableError) else None
        # Records that had to wait often don't make those wait that came into the batch beside them.
        for attempts, again in parcel.by_attempts(places).items():
            delay = self._backoff.delay(attempts, asked)
            self._counts.backoff = delay
            await parcel.nack(delay, again, reason=kind)

    def _exhausted(self, parcel: Batch, places: Sequence[int]) -> tuple[dict[str, list[int]], Sequence[int]]:
        policy = self._config.retry
        if policy.max_attempts is None and policy.max_age is None:
            return {}, places
        attempts, ages = parcel.attempts_by_place(), parcel.ages(self._queue.now_ns())
        over: dict[str, list[int]] = {}
        left: list[int] = []
        for place in places:
            why = self._backoff.exhausted(attempts[place], ages[place])
            if why is None:
                left.append(place)
            else:
                over.setdefault(why, []).append(place)
        return over, left

    async def give_up(self, parcel: Batch, places: Sequence[int], why: str) -> None:
        """Records go to the dead letters."""
        records = parcel.take_originals(places)
        try:
            gone = await parcel.dead_letter(why, places)
        except DurableQueueError as error:
            # No room for dead letters, or a disk that fails: the records stay what they are, and come back later.
            log.error("dead_letters_failed", exporter=self._name, records=len(places), **describe(error))
            await parcel.nack(self._backoff.ceiling(parcel.attempts), places, reason="dead_letters_failed")
            return
        self._counts.dead_lettered += gone
        log.warning("records_given_up", exporter=self._name, records=gone, error=why.partition(":")[0])
        if self._keep:
            self._remember(GivenUp(records=records, reason=why))
        self._tell(records, why)

    def _remember(self, letter: GivenUp) -> None:
        self.given_up.append(letter)
        self._kept += len(letter.records)
        while self._kept > _KEPT and len(self.given_up) > 1:
            self._kept -= len(self.given_up.popleft().records)

    def _tell(self, records: list[Any], why: str) -> None:
        if self._config.on_dead_letter is None:
            return
        try:
            self._config.on_dead_letter(records, why)
        except Exception as error:  # noqa: BLE001 - the user's function: what it misses is in the log
            log.error("on_dead_letter_failed", exporter=self._name, **describe(error))


class _Trip:
    """One batch's way: a list of parts that are still to be sent."""

    def __init__(self, courier: Courier, parcel: Batch) -> None:
        self._courier = courier
        self._parcel = parcel
        self._parts: list[Sequence[int]] = []
        self._bad_in_a_row = 0

    async def run(self, leave: Pass) -> None:
        courier, parcel = self._courier, self._parcel
        for place, error in parcel.broken.items():
            await courier.give_up(parcel, [place], reason(error))
        self._parts = list(reversed(self._first_parts()))
        given: Pass | None = leave
        while self._parts:
            if given is None:
                given = courier._gate.acquire(courier._loop.time())
                if given is None:
                    await parcel.nack(0.0, reason="gate_closed", counted=False)
                    return
            parcel.extend()
            places = self._parts.pop()
            outcome = await courier.attempt(parcel, places, given)
            if isinstance(outcome, BaseException):
                if not await self._failed(places, outcome, given):
                    return
            elif not await self._sent(places, outcome, given):
                return
            given = None
        if given is not None:
            courier._gate.release(given)  # nothing could be decoded

    def _first_parts(self) -> list[Sequence[int]]:
        parcel, key = self._parcel, self._courier._key
        if key is not None:
            return parcel.waves(key)
        if parcel.broken:
            good = [place for place in range(len(parcel)) if place not in parcel.broken]
            return [good] if good else []
        return [range(len(parcel))]

    async def _failed(self, places: Sequence[int], error: BaseException, leave: Pass) -> bool:
        """Whether the batch's other parts are still to be sent."""
        courier, parcel = self._courier, self._parcel
        verdict, kind = courier.note(error, leave, parcel)
        if verdict is Verdict.RETRY:
            await courier.retry(parcel, places, error, kind)
            await self._leave_rest()
            return False
        if verdict is Verdict.PAUSE:
            await parcel.nack(0.0, reason=kind, counted=False)
            return False
        if verdict is Verdict.SPLIT and len(places) > 1:
            courier._counts.splits += 1
            self._halve(places)
            return True
        if verdict is Verdict.GIVE_UP and len(places) > 1 and self._worth_isolating():
            courier._counts.isolations += 1
            self._halve(places)
            return True
        self._bad_in_a_row += 1
        await courier.give_up(parcel, places, reason(error))
        return True

    def _worth_isolating(self) -> bool:
        return self._courier._config.retry.isolate and self._bad_in_a_row < _ALL_BAD

    def _halve(self, places: Sequence[int]) -> None:
        middle = (len(places) + 1) // 2
        self._parts += [places[middle:], places[:middle]]

    async def _leave_rest(self) -> None:
        """The parts that were not tried go back as they came."""
        if self._parts:
            await self._parcel.nack(0.0, reason="not_tried", counted=False)

    async def _sent(self, places: Sequence[int], result: SendResult | None, leave: Pass) -> bool:
        """The sink took the part, at least some of it; whether the other parts are still to be sent."""
        courier, parcel = self._courier, self._parcel
        rejected = result.rejected if result is not None else None
        if not rejected:
            courier.answered(leave)
            self._bad_in_a_row = 0
            taken = await parcel.ack(places)
            courier.delivered(parcel, taken, result.skipped if result is not None else 0)
            return True
        return await self._partly(places, rejected, leave, result.skipped if result is not None else 0)

    async def _partly(self, places: Sequence[int], rejected: Any, leave: Pass, skipped: int) -> bool:
        courier, parcel = self._courier, self._parcel
        by_verdict: dict[Verdict, dict[str, list[int]]] = {}
        errors: dict[str, BaseException] = {}
        refused: set[int] = set()
        for at, error in rejected.items():
            if not 0 <= at < len(places):
                error_text = f"the sink rejected record {at} of a batch of {len(places)}"
                error, at = PermanentError(error_text), 0  # noqa: PLW2901 - a sink's fault costs one record, not the count
            verdict, _ = judge(error)
            why = reason(error)
            errors[why] = error
            refused.add(places[at])
            by_verdict.setdefault(verdict, {}).setdefault(why, []).append(places[at])
        paused = by_verdict.get(Verdict.PAUSE)
        if paused:
            courier.pause(next(iter(errors[why] for why in paused)), leave)
        else:
            courier.answered(leave)
        good = [place for place in places if place not in refused]
        if good:
            self._bad_in_a_row = 0
            courier.delivered(parcel, await parcel.ack(good), skipped)
        for verdict in (Verdict.GIVE_UP, Verdict.SPLIT):
            for why, gone in by_verdict.get(verdict, {}).items():
                courier._counts.failures[judge(errors[why])[1]] += 1
                await courier.give_up(parcel, gone, why)
        for why, again in by_verdict.get(Verdict.RETRY, {}).items():
            kind = judge(errors[why])[1]
            courier._counts.failures[kind] += 1
            await courier.retry(parcel, again, errors[why], kind)
        if paused:
            await parcel.nack(0.0, reason="auth", counted=False)
            return False
        if Verdict.RETRY in by_verdict and courier._key is not None:
            await self._leave_rest()
            return False
        return True
