"""The worker pool: a bounded number of handlers at once, fed by key lanes, whose outcomes go to the settlement.

What is true between two awaits: every message that was received and has no outcome is in exactly one place. It waits in
the lanes (`buffered`), it waits in the retry queue (`waiting`), or it is with a worker or the settlement (`in_flight`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log, tracing
from batchqueue_async.errors import AuthError, ConfigError, PermanentError, QueueFullError, SinkError
from batchqueue_async.export.policies import BatchPolicy
from batchqueue_async.intake.batching import Batches
from batchqueue_async.intake.calls import NOTHING, SingleCall, rejected_of
from batchqueue_async.intake.cancelling import ENDS
from batchqueue_async.intake.gate import Gate
from batchqueue_async.intake.key_lanes import KeyLanes, hashable
from batchqueue_async.intake.ports import DeadLetter, Delivery, Epoch, Retry, Room
from batchqueue_async.intake.retrying import HandlerTimeoutError, Hold, RetryQueue, UndecodableError
from batchqueue_async.intake.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Sequence

    from batchqueue_async.intake.calls import BatchHandler, Decoder, HandlerCall, Rejected
    from batchqueue_async.intake.message import Message
    from batchqueue_async.intake.pacing import Pacer
    from batchqueue_async.intake.ports import Retries, Taken
    from batchqueue_async.intake.retrying import Judge, Verdict
    from batchqueue_async.intake.settlement import Settlement
    from batchqueue_async.intake.stats import Counters
    from batchqueue_async.intake.workers import Worker

DOWNSTREAM = "downstream"
# A retry that is kept keeps its slot of the prefetch, so only short ones are, and only some.
_SHORT = 5.0
_KEPT_SHARE = 10
# Where the broker's bound does not count what waits, the waiting have this many times the prefetch for themselves.
_WAITING_ROOM = 10
_ALL = "everything"
_SINGLE = BatchPolicy(max_records=1, linger=0.0)


class WorkerPool:
    """Runs the handlers of one consumer.

    Attributes:
        lanes: what waits for a handler.
        retries: what waits for its next attempt.
        gate: whether handlers may start.
        workers: what runs the handlers.
        held_bytes: the bytes of all that is held.
        limit: workers that may be at work now.
        last_outcome: the loop's time of the last outcome, or None.
        busy_since: the loop's time since which something has been held without a break, or of the last such time.
        last_error: the class of the last failure of a handler.
    """

    def __init__(
        self,
        name: str,
        call: SingleCall | HandlerCall,
        *,
        counts: Counters,
        judge: Judge,
        workers: int,
        prefetch: int,
        prefetch_bytes: int,
        batch: BatchPolicy | None = None,
        decode: Decoder | None = None,
        order: Callable[[Message], Any] | None = None,
        everything_ordered: bool = False,
        drops: bool = False,
        handler_timeout: float | None = None,
        scaler: Pacer | None = None,
        wall_clock: Callable[[], float],
        on_room: Callable[[], None],
    ) -> None:
        """Say what to call and within which bounds.

        Args:
            name: the consumer's, for logs.
            call: the handler.
            counts: what is counted.
            judge: what a failure means.
            workers: handlers at once.
            prefetch: messages held.
            prefetch_bytes: their bytes.
            batch: what a batch is; None is a message per call.
            decode: makes the values.
            order: the function that gives a message's key.
            everything_ordered: whether all messages are one lane.
            drops: whether dead letters are dropped.
            handler_timeout: seconds for a call.
            scaler: the number of workers that is right now.
            wall_clock: seconds since 1970.
            on_room: called when there may be room for more.
        """
        self._name = name
        self._call = call
        self._counts = counts
        self._judge = judge
        self._prefetch = prefetch
        self._prefetch_bytes = prefetch_bytes
        self._decode = decode
        self._order = order
        self._everything_ordered = everything_ordered
        self._drops = drops
        self._timeout = handler_timeout if call.cancellable else None
        self.workers = Workers(name, workers, self._timeout)
        self._scaler = scaler
        self._wall_clock = wall_clock
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self.lanes = KeyLanes()
        self._batches = Batches(self.lanes, batch or _SINGLE)
        self.retries = RetryQueue()
        self.gate = Gate(self._gate_opened)
        self.held_bytes = 0
        self.limit = workers if scaler is None else scaler.workers
        self.last_outcome: float | None = None
        self.busy_since: float | None = None
        self.last_error: str | None = None
        self._settlement: Settlement
        self._keeps: Retries = "kept"
        self._counts_held = False
        self._epoch: Epoch | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._retry_at = 0.0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._quiet: list[asyncio.Future[None]] = []

    def start(self, settlement: Settlement) -> None:
        """Begin to work; outcomes go to the settlement."""
        self._settlement = settlement
        call, traced = self._call, tracing.active
        if isinstance(call, SingleCall):
            one = call.handler if traced is None else traced.message(self._name, call.handler)
            self.workers.start(partial(self._run_singles, one))
        else:
            many = call if traced is None else traced.messages(self._name, call)
            self.workers.start(partial(self._run_batches, many))

    def use(self, retries: Retries, *, counts_held: bool) -> None:
        """What the lane's broker can do."""
        self._keeps = retries
        self._counts_held = counts_held

    @property
    def keys(self) -> int:
        """Lanes with messages in them."""
        return len(self.lanes)

    # -- in ----------------------------------------------------------------------------------------------------------

    def room(self) -> Room | None:
        """What may be taken now; None while there is no room."""
        counts = self._counts
        held = counts.received - counts.settled
        if not self._counts_held:
            waiting = counts.waiting
            if waiting >= _WAITING_ROOM * self._prefetch:
                return None
            held -= waiting
        messages, size = self._prefetch - held, self._prefetch_bytes - self.held_bytes
        return Room(messages, size) if messages > 0 and size > 0 else None

    def accept(self, deliveries: Sequence[Taken]) -> None:
        """Take deliveries in; from now on the pool answers for each."""
        now = self._loop.time()
        lanes, order = self.lanes, self._order
        size = messages = again = 0
        bad: list[tuple[Delivery, UndecodableError]] = []
        for delivery in deliveries:
            if delivery.epoch is not self._epoch:
                self._epoch = delivery.epoch
                delivery.epoch.watch(self._epoch_changed)
            delivery.taken = now
            size += delivery.size
            messages += delivery.count
            again += delivery.attempt > 1
            if order is not None:
                try:
                    delivery.order = self._key_of(order, delivery)
                    lanes.add(delivery)  # which compares keys, and that is the user's code too
                except BaseException as error:  # the user's function; the message is at fault, not the pool
                    if isinstance(error, ENDS):
                        raise
                    delivery.order = None
                    bad.append((delivery, UndecodableError(f"ordered_by raised {type(error).__qualname__}")))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
                continue
            if self._everything_ordered:
                delivery.order = _ALL
            lanes.add(delivery)
        counts = self._counts
        if counts.received == counts.settled:
            self.busy_since = now
        with counts:
            counts.received += messages
            counts.redelivered += again
            counts.in_flight += len(bad)
        self.held_bytes += size
        for delivery, wrong in bad:
            delivery.epoch.running += 1
            self._failed([delivery], {0: wrong})
        self.workers.wake(2)

    @staticmethod
    def _key_of(order: Callable[[Message], Any], delivery: Any) -> Hashable | None:
        key = order(delivery)
        # Equal keys of two topics are two keys.
        return None if key is None else (delivery.source, hashable(key))

    # -- epochs ------------------------------------------------------------------------------------------------------

    def _epoch_changed(self, epoch: Epoch) -> None:
        """An epoch has closed or ended: what was not started of it is the broker's again."""
        gone: list[Taken] = [*self.lanes.forget(epoch)]
        waiting = self.retries.forget(epoch)
        self._forget(gone, waiting)
        if epoch is self._epoch:
            self._epoch = None  # another delivery of it would be watched again, which does nothing
        for each in waiting:
            self.lanes.free(each.order)
        self.workers.wake(2)

    def _forget(self, gone: Sequence[Taken], waiting: Sequence[Delivery]) -> None:
        counts = self._counts
        size = sum(each.size for each in gone) + sum(each.size for each in waiting)
        with counts:
            counts.stale += sum(each.count for each in gone) + len(waiting)
            counts.waiting -= len(waiting)
        self._batches.forget((*gone, *waiting))
        self.held_bytes -= size
        if gone or waiting:
            self._on_room()
            self._check_quiet()

    def settled(self, messages: int, size: int) -> None:  # noqa: ARG002 - the settlement's hook
        """The settlement is done with this number of messages and bytes."""
        self.held_bytes -= size
        self.last_outcome = self._loop.time()
        self._on_room()
        if self._quiet:
            self._check_quiet()

    # -- workers -----------------------------------------------------------------------------------------------------

    def _gate_opened(self) -> None:
        self.workers.wake(len(self.workers.idle))
        self._on_room()

    async def _run_singles(  # noqa: C901, PLR0912 - the path of each message: a call less where it stands whole
        self, handler: Callable[[Message], Awaitable[Any]], worker: Worker
    ) -> None:
        """Messages one at a time."""
        counts, settlement, lanes, loop, gate = self._counts, self._settlement, self.lanes, self._loop, self.gate
        decode, scaler, workers = self._decode, self._scaler, self.workers
        delivery: Any = None
        while True:
            if not lanes.ready or gate.shut or (scaler is not None and workers.active > self.limit):
                delivery = None  # an idle worker keeps nothing of its last message
                await workers.park()
                continue
            delivery = lanes.next()
            epoch: Epoch = delivery.epoch
            if not epoch.open:  # it closed before the pool had seen it
                lanes.free(delivery.order)
                self._forget((delivery,), ())
                continue
            if workers.idle and lanes.ready:
                workers.wake(2)
            counts.in_flight += 1
            epoch.running += 1
            worker.since = loop.time()
            worker.busy = (delivery,)
            if workers.unwatched:
                workers.watch(worker.since)
            rejected: Rejected = NOTHING
            try:
                if decode is not None and (bad := decode(delivery)) is not None:
                    rejected = {0: bad}
                else:
                    answer: Any = await handler(delivery)
                    if answer is not None:
                        rejected = rejected_of(answer, 1)
            except BaseException as error:  # noqa: BLE001 - any error at all: the message gets its outcome
                self._raised(worker, [delivery], error)
                continue
            finally:
                worker.busy = None
            ending = worker.why is not None and worker.outlived()
            if scaler is not None:
                self._learn(worker, 1)
            if rejected:
                self._failed([delivery], rejected, worker)
            else:
                settlement.acked.append(delivery)
                if settlement.asleep:
                    settlement.wake()
                if delivery.order is not None:
                    lanes.free(delivery.order)
            if ending:
                return

    async def _run_batches(self, call: BatchHandler, worker: Worker) -> None:
        """Batches, one at a time."""
        while True:
            if not self._may_leave():
                await self.workers.park()
            elif await self._run_batch(call, worker):
                return

    async def _run_batch(self, call: BatchHandler, worker: Worker) -> bool:
        """One batch; whether its worker ends. Nothing of the batch is left in the worker when it returns."""
        units = self._next_batch()
        if not units:
            return False
        self._begin(worker, units)
        try:
            batch, bad = self._open(units)
            rejected = await (self._call_with(call, batch, bad) if bad else call(batch))
        except BaseException as error:  # noqa: BLE001 - any error at all: every message gets its outcome
            self._raised(worker, self._split(units), error)
            return False
        finally:
            worker.busy = None
        ending = worker.why is not None and worker.outlived()
        if self._scaler is not None:
            self._learn(worker, sum(unit.count for unit in units))
        if rejected:
            self._failed(self._split(units), rejected, worker)
        else:
            self._batches.forget(units)
            self._settlement.acked.extend(units)
            self._settlement.wake()
            for key in {each.order for each in units}:
                self.lanes.free(key)
        return ending

    def _begin(self, worker: Worker, units: Sequence[Taken]) -> None:
        """A worker takes a batch; another one looks for the next."""
        workers = self.workers
        if workers.idle and self.lanes.ready:
            workers.wake(2)
        worker.since = self._loop.time()
        worker.busy = units
        if workers.unwatched:
            workers.watch(worker.since)

    def _may_leave(self) -> bool:
        """Whether a worker may take a batch now; where one only has to wait for its time, a worker is woken then."""
        lanes = self.lanes
        if not lanes.ready or self.gate.shut or (self._scaler is not None and self.workers.active > self.limit):
            return False
        due = self._batches.due(held_bytes=self.held_bytes, crowded=self._prefetch <= lanes.size)
        if due <= self._loop.time():
            return True
        if self._linger_timer is None:
            self._linger_timer = self._loop.call_at(due, self._lingered)
        return False

    def _lingered(self) -> None:
        self._linger_timer = None
        self.workers.wake(1)

    def _next_batch(self) -> list[Taken]:
        """Take a batch, which is in flight from now on."""
        stale: list[Taken] = []
        units = self._batches.next(stale)
        if stale:
            self._forget(stale, ())
        for unit in units:
            unit.epoch.running += unit.count
            self._counts.in_flight += unit.count
        return units

    def _open(self, units: list[Taken]) -> tuple[Any, dict[int, BaseException]]:
        """What the handler is called with, and the places in it that could not be decoded."""
        batch: Any = units
        if not all(issubclass(kind, Delivery) for kind in set(map(type, units))):
            # There are runs, which are sequences of messages. They stay whole while all of their messages share a fate.
            batch = units[0] if len(units) == 1 else _messages(units)
        decode = self._decode
        if decode is None:
            return batch, {}
        return batch, {at: bad for at, each in enumerate(batch) if (bad := decode(each)) is not None}

    @staticmethod
    async def _call_with(call: BatchHandler, batch: Sequence[Message], bad: dict[int, BaseException]) -> Rejected:
        """Call the handler with what could be decoded; its answer and the rest, by place in the whole batch."""
        places = [place for place in range(len(batch)) if place not in bad]
        if not places:
            return bad
        try:
            rejected = await call([batch[place] for place in places])
        except Exception as error:  # noqa: BLE001 - it is the others' outcome; the bad ones have theirs
            rejected = dict.fromkeys(range(len(places)), error)
        return bad | {places[place]: error for place, error in rejected.items()}

    @staticmethod
    def _split(units: Sequence[Taken]) -> list[Delivery]:
        """The single deliveries of a batch."""
        found: list[Delivery] = []
        for unit in units:
            if isinstance(unit, Delivery):
                found.append(unit)
                continue
            for each in unit.split():
                each.taken = unit.taken
                found.append(each)
        return found

    # -- failures ----------------------------------------------------------------------------------------------------

    def _raised(self, worker: Worker, deliveries: list[Delivery], error: BaseException) -> None:
        """A call ended in an error, for all that it was given."""
        why, worker.why = worker.why, None
        task = worker.task
        if isinstance(error, asyncio.CancelledError):
            if why == "timeout":
                task.uncancel()
                error = HandlerTimeoutError(f"the handler took longer than handler_timeout={self._timeout}")
            elif why == "stop" or task.cancelling():  # our own stop, or the loop's: never the message's failure
                self._release(deliveries)
                raise error
            # Otherwise the handler raised it itself, as after awaiting a task that was cancelled: it has failed.
        elif isinstance(error, ENDS):
            self._release(deliveries)
            raise error
        elif why is not None:
            task.uncancel()
            if why == "stop":
                self._release(deliveries)
                raise asyncio.CancelledError
        if self._scaler is not None and isinstance(error, HandlerTimeoutError):
            self._scaler.failed(self._loop.time())
            self.limit = self._scaler.workers
        held = isinstance(error, (QueueFullError, AuthError, ConfigError))
        if len(deliveries) > 1 and not held and self._isolate(deliveries, error, worker):
            return
        self._failed(deliveries, dict.fromkeys(range(len(deliveries)), error), worker, whole=True)

    def _isolate(self, deliveries: list[Delivery], error: BaseException, worker: Worker) -> bool:
        """Find the ones that are the reason: by the error's own word, or by smaller batches from now on."""
        culprits = set(error.culprits) if isinstance(error, SinkError) else set[int]()
        if culprits and culprits < set(range(len(deliveries))):
            # The others are innocent, and come again at once, not one attempt older.
            rejected = dict.fromkeys(culprits, error)
            self._counts.failures += len(culprits)
            self._note(worker, deliveries, error)
            verdicts = [
                self._verdict(each, rejected[place]) if place in rejected else Retry(0.0, each.attempt)
                for place, each in enumerate(deliveries)
            ]
            self._apply(deliveries, verdicts)
            return True
        self._batches.narrow(deliveries)
        if isinstance(error, PermanentError):
            self._counts.failures += len(deliveries)
            self._note(worker, deliveries, error)
            self._apply(deliveries, [Retry(0.0, each.attempt) for each in deliveries])
            return True
        return False

    def _release(self, deliveries: list[Delivery]) -> None:
        settlement = self._settlement
        settlement.released.extend(deliveries)
        settlement.wake()

    def _failed(
        self, deliveries: list[Delivery], rejected: Rejected, worker: Worker | None = None, *, whole: bool = False
    ) -> None:
        """Some of a call's messages failed: judge each, and ack the rest; `whole`: nobody knows which ones."""
        self._counts.failures += len(rejected)
        if rejected:
            self._note(worker, deliveries, next(iter(rejected.values())), len(rejected))
        verdicts: list[Verdict | None] = [
            self._verdict(each, rejected[place]) if place in rejected else None for place, each in enumerate(deliveries)
        ]
        if whole and len(deliveries) > 1:
            # Nobody is given up for what a neighbour may have done: those whose attempts are over get one alone.
            for place, each in enumerate(deliveries):
                if isinstance(verdicts[place], DeadLetter):
                    verdicts[place] = Retry(0.0, each.attempt)
                    self._batches.alone(each)
        self._apply(deliveries, verdicts)

    def _note(self, worker: Worker | None, deliveries: list[Delivery], error: BaseException, count: int = 0) -> None:
        self.last_error = type(error).__qualname__
        log.warning(
            "message_failed",
            consumer=self._name,
            worker=0 if worker is None else worker.number,
            message=deliveries[0].id,
            attempt=deliveries[0].attempt,
            count=count or len(deliveries),
            **log.describe(error),
        )

    def _verdict(self, delivery: Delivery, error: BaseException) -> Verdict:
        now = self._loop.time()
        age = max(0.0, now - delivery.taken)
        return self._judge.verdict(error, attempt=delivery.attempt, age=age, now=self._wall_clock())

    def _apply(self, deliveries: list[Delivery], verdicts: Sequence[Verdict | None]) -> None:
        """Give every message of a call its outcome; a key whose message stays here, or is not confirmed, stays busy."""
        settlement, lanes = self._settlement, self.lanes
        ended: list[Delivery] = []
        again: dict[Hashable | None, list[tuple[Delivery, float | None]]] = {}
        forwards: list[tuple[Delivery, Retry | DeadLetter]] = []
        for delivery, verdict in zip(deliveries, verdicts, strict=True):
            if verdict is None or delivery.epoch.over:
                settlement.acked.append(delivery)  # where the epoch is over, the settlement finds it stale
                ended.append(delivery)
            elif isinstance(verdict, DeadLetter):
                self._log_dead(delivery, verdict)
                if self._drops:
                    settlement.given_up.append(delivery)
                else:
                    forwards.append((delivery, verdict))
                ended.append(delivery)
            elif isinstance(verdict, Hold):
                self.gate.close_for(DOWNSTREAM, verdict.delay)
                again.setdefault(delivery.order, []).append((delivery, None))
            elif self._is_kept(delivery, verdict):
                if verdict.attempt != delivery.attempt:
                    delivery.attempt = verdict.attempt
                    settlement.kept.append(delivery)
                again.setdefault(delivery.order, []).append((delivery, verdict.delay))
            else:
                forwards.append((delivery, verdict))
                ended.append(delivery)
        self._batches.forget(ended)
        settlement.wake()
        for key, kept in again.items():
            self._keep(key, kept)
        self._forward(forwards, again)
        for key in {each.order for each in deliveries} - set(again) - {each.order for each, _ in forwards}:
            lanes.free(key)
        self.workers.wake(2)

    def _is_kept(self, delivery: Delivery, retry: Retry) -> bool:
        if delivery.order is not None or self._keeps == "kept" or retry.delay <= 0:
            return True
        few = self._counts.waiting < max(1, self._prefetch // _KEPT_SHARE)
        return self._keeps == "long" and retry.delay <= _SHORT and few

    def _keep(self, key: Hashable | None, kept: list[tuple[Delivery, float | None]]) -> None:
        """Keep what failed: of a key the first waits, and the others stand behind it in their order."""
        counts, lanes = self._counts, self.lanes
        for delivery, _ in kept:
            delivery.epoch.finished()
        heads = kept if key is None else kept[:1]
        rest = [] if key is None else [each for each, _ in kept[1:]]
        delayed = [(each, delay) for each, delay in heads if delay]
        with counts:
            counts.in_flight -= len(kept)
            counts.waiting += len(delayed)
        lanes.behind(rest)
        for each, delay in reversed(heads):
            if not delay:
                lanes.ready_again(each, first=True)
        now = self._loop.time()
        for each, delay in delayed:
            assert delay is not None  # noqa: S101 - it was looked at above
            self.retries.add(each, due=now + delay)
        self._arm_retries()
        if self._batches.flushing and delayed:
            self.release_waiting()  # a stop waits for no delay
        # What closed while it ran: nobody will ask for it again.
        for epoch in {each.epoch for each, _ in kept if not each.epoch.open}:
            self._epoch_changed(epoch)

    def _forward(self, forwards: list[tuple[Delivery, Retry | DeadLetter]], again: dict[Hashable | None, Any]) -> None:
        """Hand over to the broker; a key stays busy until the last of its messages is confirmed."""
        left: dict[Hashable, int] = {}
        for delivery, _ in forwards:
            if delivery.order is not None and delivery.order not in again:
                left[delivery.order] = left.get(delivery.order, 0) + 1

        def confirmed(key: Hashable) -> None:
            if key in left:
                left[key] -= 1
                if not left[key]:
                    self.lanes.free(key)
                    self.workers.wake(1)

        for delivery, outcome in forwards:
            key = delivery.order
            self._settlement.forward(delivery, outcome, None if key is None else lambda key=key: confirmed(key))  # type: ignore[misc]

    def _log_dead(self, delivery: Delivery, letter: DeadLetter) -> None:
        log.error(
            "message_dropped" if self._drops else "message_dead_lettered",
            consumer=self._name,
            message=delivery.id,
            reason=letter.reason,
            error=letter.error,
            attempts=letter.attempts,
        )

    # -- time --------------------------------------------------------------------------------------------------------

    def _arm_retries(self) -> None:
        first = self.retries.first
        if first is None or (self._retry_timer is not None and self._retry_at <= first):
            return
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._retry_at = first
        self._retry_timer = self._loop.call_at(first, self._retries_due)

    def _retries_due(self) -> None:
        self._retry_timer = None
        due = self.retries.due(self._loop.time())
        with self._counts:
            self._counts.waiting -= len(due)
        for delivery in due:
            self.lanes.ready_again(delivery)
        self._arm_retries()
        self.workers.wake(2)

    def _learn(self, worker: Worker, size: int) -> None:
        """Let the number of workers follow what calls take, and whether more is waiting."""
        scaler = self._scaler
        assert scaler is not None  # noqa: S101 - asked only with one
        now = self._loop.time()
        busy = bool(self.lanes.ready) and self.workers.active >= self.limit
        scaler.ended(now - worker.since, now, busy=busy, size=size)
        if scaler.workers != self.limit:
            more = scaler.workers - self.limit
            self.limit = scaler.workers
            if more > 0:
                self.workers.wake(more)

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Let batches leave as they are from now on."""
        self._batches.flushing = True
        self.workers.wake(2)

    def release_waiting(self) -> None:
        """Give back what waits for a later attempt, and what stands behind it: a stop does not wait for a delay."""
        gone = self.retries.forget(None)
        behind: list[Taken] = []
        for each in gone:
            while each.order is not None and self.lanes.peek_behind(each.order) is not None:
                behind.append(self.lanes.next_behind(each.order))
            self.lanes.free(each.order)
        self._give_back(behind, gone)

    def release_buffered(self) -> None:
        """Give back everything that was not started."""
        self._give_back(self.lanes.forget(None), [])

    def _give_back(self, buffered: list[Taken], waiting: list[Delivery]) -> None:
        if not buffered and not waiting:
            return
        count = sum(each.count for each in buffered)
        with self._counts:
            self._counts.waiting -= len(waiting)
            self._counts.in_flight += len(waiting) + count
        for each in (*buffered, *waiting):
            each.epoch.running += each.count
        self._batches.forget((*buffered, *waiting))
        self._settlement.released.extend((*buffered, *waiting))
        self._settlement.wake()

    async def quiet(self) -> None:
        """Return when no message is held."""
        while self._counts.received != self._counts.settled:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._quiet.append(waiter)
            await waiter

    def _check_quiet(self) -> None:
        if self._counts.received == self._counts.settled:
            waiters, self._quiet = self._quiet, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def cancel(self, grace: float) -> int:
        """End the workers, cancelling their calls; how many calls did not end within the grace."""
        for timer in (self._retry_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        return await self.workers.cancel(grace)


def _messages(units: Sequence[Taken]) -> list[Message]:
    """The messages of a batch that has runs among its deliveries."""
    found: list[Message] = []
    for unit in units:
        if isinstance(unit, Delivery):
            found.append(unit)
        else:
            found.extend(unit)
    return found
