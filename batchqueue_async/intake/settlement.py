"""From outcomes to the broker: collected for a turn of the loop, applied once, dropped where their epoch is over.

What a worker decides is appended to a list, and costs it no call. One task hands the lists to the session, and what is
decided meanwhile goes with its next call. Dead letters and retries through the broker have to be confirmed first: each
is a task of its own, a bounded number at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchqueue_async._support import log
from batchqueue_async.errors import PermanentError
from batchqueue_async.intake.cancelling import asked_for
from batchqueue_async.intake.ports import DeadLetter, Outcomes, Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchqueue_async.export.control.backoff import Backoff
    from batchqueue_async.intake.gate import Gate
    from batchqueue_async.intake.ports import Delivery, Session, Taken
    from batchqueue_async.intake.stats import Counters

_FORWARDS = 32
UNREACHABLE = "dead_letters"


class Settlement:
    """Applies the outcomes of one consumer.

    What is in `acked`, `given_up`, `released` or `_under_way` counts as in flight until the session has it; only then
    its epoch's `running` and the room change.

    Attributes:
        acked: handled, to be acknowledged; a worker appends and calls `wake` if `asleep`.
        given_up: dead letters that are dropped: acknowledged, and counted as dead-lettered.
        released: to be given back.
        kept: failed and waiting here; the session may note their attempts.
        asleep: whether the settling task has to be woken.
    """

    def __init__(
        self,
        name: str,
        counts: Counters,
        gate: Gate,
        backoff: Backoff,
        *,
        settled: Callable[[int, int], None],
    ) -> None:
        """Say whose outcomes they are.

        Args:
            name: the consumer's, for logs.
            counts: what is counted.
            gate: closed while dead letters can't be published.
            backoff: the delays between attempts to publish one.
            settled: called with the messages and bytes that were settled, after the counts have changed.
        """
        self._name = name
        self._counts = counts
        self._gate = gate
        self._backoff = backoff
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self.acked: list[Taken] = []
        self.given_up: list[Delivery] = []
        self.released: list[Taken] = []
        self.kept: list[Delivery] = []
        self.asleep = False
        self._busy = False
        self._bell: asyncio.Future[None] | None = None
        self._idle: list[asyncio.Future[None]] = []
        self._forwards: dict[asyncio.Task[None], Delivery] = {}
        self._turns = asyncio.Semaphore(_FORWARDS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to settle."""
        self._task = self._loop.create_task(self._run(), name=f"intake-{self._name}-settle")

    def bind(self, session: Session | None) -> None:
        """Settle into this session from now on; None while there is none."""
        self._session = session

    def wake(self) -> None:
        """There is something to settle."""
        if self.asleep:
            self.asleep = False
            bell = self._bell
            if bell is not None and not bell.done():
                bell.set_result(None)

    # -- acks and releases -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if self._nothing:
                self._wake_idle()
                self._bell = self._loop.create_future()
                self.asleep = True
                await self._bell
            self._busy = True
            try:
                await self._apply()
            finally:
                self._busy = False

    @property
    def _nothing(self) -> bool:
        return not (self.acked or self.released or self.given_up or self.kept)

    async def _apply(self) -> None:
        acked, released, given_up, kept = self.acked[:], self.released[:], self.given_up[:], self.kept[:]
        self.acked.clear()
        self.released.clear()
        self.given_up.clear()
        self.kept.clear()
        session = self._session
        stale = [each for each in (*acked, *released, *given_up) if each.epoch.over] if self._any_over(acked) else []
        if not stale and (released or given_up):
            stale = [each for each in (*released, *given_up) if each.epoch.over]
        if stale or session is None:
            gone = set(map(id, stale))
            acked = [each for each in acked if id(each) not in gone]
            released = [each for each in released if id(each) not in gone]
            given_up = [each for each in given_up if id(each) not in gone]
        if session is None:
            stale = [*stale, *acked, *released, *given_up]
            acked, released, given_up = [], [], []
        kept = [each for each in kept if not each.epoch.over]
        try:
            if session is not None and (acked or released or given_up or kept):
                await session.settle(Outcomes([*acked, *given_up] if given_up else acked, released, kept))
        except (Exception, asyncio.CancelledError) as error:  # a client raises anything; the workers go on
            self._account([], [], [], [*stale, *acked, *released, *given_up])
            if asked_for(error):
                raise
            self._counts.settle_errors += 1
            log.warning("settling_failed", consumer=self._name, count=len(acked), **log.describe(error))
            if session is not None and not isinstance(error, PermanentError):
                await session.end()
            return
        self._account(acked, released, given_up, stale)

    def _any_over(self, deliveries: list[Taken]) -> bool:
        """Whether any has a stale epoch: one look per epoch where they come in stretches, as they do."""
        last = None
        for each in deliveries:
            epoch = each.epoch
            if epoch is not last:
                if epoch.over:
                    return True
                last = epoch
        return False

    def _account(self, acked: list[Taken], released: list[Taken], given_up: list[Delivery], stale: list[Taken]) -> None:
        counts = self._counts
        messages = size = 0
        with counts:
            for deliveries, name in ((acked, "acked"), (released, "released"), (given_up, "dead"), (stale, "stale")):
                if not deliveries:
                    continue
                found, found_size = _count(deliveries)
                messages += found
                size += found_size
                if name == "acked":
                    counts.acked += found
                elif name == "released":
                    counts.released += found
                elif name == "dead":
                    counts.dead_lettered += found
                    counts.dropped += found
                else:
                    counts.stale += found
            counts.in_flight -= messages
        if messages:
            self._settled(messages, size)

    # -- through the broker ------------------------------------------------------------------------------------------

    def forward(self, delivery: Delivery, outcome: Retry | DeadLetter, done: Callable[[], None] | None = None) -> None:
        """Publish a retry or a dead letter; `done` is called when the delivery has its outcome, stale included."""
        task = self._loop.create_task(
            self._forward(delivery, outcome, done), name=f"intake-{self._name}-forward-{delivery.id}"
        )
        self._forwards[task] = delivery
        task.add_done_callback(self._forwarded)

    def _forwarded(self, task: asyncio.Task[None]) -> None:
        self._forwards.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:  # not expected: a bug, and it shows
            log.error("forwarding_broke", consumer=self._name, **log.describe(error))
        self._wake_idle()

    async def _forward(self, delivery: Delivery, outcome: Retry | DeadLetter, done: Callable[[], None] | None) -> None:
        counts = self._counts
        sent = cancelled = False
        try:
            async with self._turns:
                sent = await self._publish(delivery, outcome)
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            with counts:
                counts.in_flight -= 1
                if sent and isinstance(outcome, Retry):
                    counts.retried += 1
                elif sent:
                    counts.dead_lettered += 1
                elif cancelled:
                    counts.released += 1
                else:
                    counts.stale += 1
            self._settled(1, delivery.size)
            delivery.epoch.finished()
            if done is not None:
                done()

    async def _publish(self, delivery: Delivery, outcome: Retry | DeadLetter) -> bool:
        """Try until it is confirmed, or its epoch is over; whether it was confirmed."""
        tries = 0
        while not delivery.epoch.over and (session := self._session) is not None:
            try:
                await session.forward(delivery, outcome)
            except (Exception, asyncio.CancelledError) as error:  # a client raises anything, and the message is kept
                if asked_for(error):
                    raise
                tries += 1
                self._counts.forward_errors += 1
                self._gate.close(UNREACHABLE)
                delay = max(0.05, self._backoff.delay(tries))
                if not tries & (tries - 1):  # the first, second, fourth ...: an outage does not fill the log
                    log.error(
                        "dead_letter_not_published" if isinstance(outcome, DeadLetter) else "retry_not_published",
                        consumer=self._name,
                        message=delivery.id,
                        tries=tries,
                        delay=round(delay, 3),
                        **log.describe(error),
                    )
                await asyncio.sleep(delay)
                continue
            if tries:
                self._gate.open(UNREACHABLE)
            return True
        if tries:
            self._gate.open(UNREACHABLE)
        return False

    # -- the end -----------------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Return when nothing is left to settle or to forward."""
        while not self._nothing or self._busy or self._forwards:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._idle.append(waiter)
            await waiter

    def _wake_idle(self) -> None:
        waiters, self._idle = self._idle, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def abandon_forwards(self) -> None:
        """Give up what is not confirmed yet: its messages are the broker's again."""
        while len(self._forwards):
            for task in list(self._forwards):
                task.cancel()
            await asyncio.wait(self._forwards)

    async def close(self) -> None:
        """End the tasks."""
        await self.abandon_forwards()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))


def _count(deliveries: Sequence[Taken]) -> tuple[int, int]:
    """The messages and the bytes of deliveries; their epochs learn that the lane has them."""
    messages = size = stretch = 0
    last = None
    for each in deliveries:
        count = each.count
        messages += count
        size += each.size
        if each.epoch is not last:
            if last is not None:
                last.finished(stretch)
            last, stretch = each.epoch, 0
        stretch += count
    if last is not None:
        last.finished(stretch)
    return messages, size
