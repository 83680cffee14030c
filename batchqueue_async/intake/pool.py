"""The worker pool: a bounded number of handlers at once, fed by key lanes, whose outcomes go to the settlement.

A worker is a task that takes what is ready as long as there is something, and only then waits. It belongs to the pool
and not to a message, so that a message costs no task, future, timer or log line.

What is true between two awaits: every message that was received and has no outcome is in exactly one place. It waits in
the lanes (`buffered`), it waits in the retry queue (`waiting`), or it is with a worker or the settlement (`in_flight`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.errors import AuthError, ConfigError, PermanentError, QueueFullError, SinkError
from batchqueue_async.intake.calls import NOTHING, SingleCall, rejected_of
from batchqueue_async.intake.gate import Gate
from batchqueue_async.intake.key_lanes import KeyLanes, hashable
from batchqueue_async.intake.ports import DeadLetter, Delivery, Epoch, Retry, Room
from batchqueue_async.intake.retrying import (
    ALONE_STEP,
    HandlerTimeoutError,
    Hold,
    RetryQueue,
    UndecodableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from batchqueue_async.export.policies import BatchPolicy
    from batchqueue_async.intake.calls import Decoder, HandlerCall, Rejected
    from batchqueue_async.intake.message import Message
    from batchqueue_async.intake.pacing import Pacer
    from batchqueue_async.intake.ports import Retries, Taken
    from batchqueue_async.intake.retrying import Judge, Verdict
    from batchqueue_async.intake.settlement import Settlement
    from batchqueue_async.intake.stats import Counters

DOWNSTREAM = "downstream"
# A retry that is kept keeps its slot of the prefetch, so only short ones are, and only some.
_SHORT = 5.0
_KEPT_SHARE = 10
# Where the broker's bound does not count what waits, the waiting have this many times the prefetch for themselves.
_WAITING_ROOM = 10
_ALL = "everything"


class _Worker:
    """One of the workers: its task, and the call that it is in.

    Attributes:
        number: from 1, for logs.
        since: the loop's time at which its call began; meaningful while `busy`.
        busy: the deliveries of its call; None between calls.
        why: why its call was cancelled by us: "timeout" or "stop"; None while it was not.
    """

    __slots__ = ("busy", "number", "since", "task", "why")

    def __init__(self, number: int) -> None:
        self.number = number
        self.since = 0.0
        self.busy: Sequence[Taken] | None = None
        self.why: str | None = None
        self.task: asyncio.Task[None]


class WorkerPool:
    """Runs the handlers of one consumer.

    Attributes:
        lanes: what waits for a handler.
        retries: what waits for its next attempt.
        gate: whether handlers may start.
        held_bytes: the bytes of all that is held.
        limit: workers that may be at work now.
        last_outcome: the loop's time of the last outcome, or None.
        busy_since: the loop's time since which something has been held without a break, or of the last such time.
        last_error: the class of the last failure of a handler.
    """

    def __init__(
        self,
        name: str,
        call: HandlerCall,
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
        self._batch = batch
        self._decode = decode
        self._order = order
        self._everything_ordered = everything_ordered
        self._drops = drops
        self._timeout = handler_timeout if call.cancellable else None
        self._scaler = scaler
        self._wall_clock = wall_clock
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self.lanes = KeyLanes()
        self.retries = RetryQueue()
        self.gate = Gate(self._gate_opened)
        self.held_bytes = 0
        self.limit = workers if scaler is None else scaler.workers
        self.last_outcome: float | None = None
        self.busy_since: float | None = None
        self.last_error: str | None = None
        self._workers = [_Worker(number) for number in range(1, workers + 1)]
        self._idle: deque[asyncio.Future[None]] = deque()
        self._settlement: Settlement
        self._keeps: Retries = "kept"
        self._counts_held = False
        self._epoch: Epoch | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._retry_at = 0.0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._flushing = False
        self._stopping = False
        self._quiet: list[asyncio.Future[None]] = []
        # The largest batch in which a message may come again that was in a batch that failed as a whole.
        self._limits: dict[Any, int] = {}

    def start(self, settlement: Settlement) -> None:
        """Begin to work; outcomes go to the settlement."""
        self._settlement = settlement
        run = self._run_singles if isinstance(self._call, SingleCall) else self._run_batches
        for worker in self._workers:
            name = f"intake-{self._name}-worker-{worker.number}"
            worker.task = self._loop.create_task(run(worker), name=name)
            worker.task.add_done_callback(self._worker_ended)

    def use(self, retries: Retries, *, counts_held: bool) -> None:
        """What the lane's broker can do."""
        self._keeps = retries
        self._counts_held = counts_held

    @property
    def keys(self) -> int:
        """Lanes with messages in them."""
        return len(self.lanes)

    @property
    def active(self) -> int:
        """Workers that are not idle."""
        return len(self._workers) - len(self._idle)

    def oldest_in_flight(self, now: float) -> float:
        """Seconds that the call that has run longest has taken; from any thread."""
        return max((now - worker.since for worker in self._workers if worker.busy is not None), default=0.0)

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
                except Exception as error:  # noqa: BLE001 - the user's function; the message is at fault, not the pool
                    delivery.order = None
                    bad.append((delivery, UndecodableError(f"ordered_by raised {type(error).__qualname__}")))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
                    continue
            elif self._everything_ordered:
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
        self._wake(2)

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
        self._wake(2)

    def _forget(self, gone: Sequence[Taken], waiting: Sequence[Delivery]) -> None:
        counts = self._counts
        size = sum(each.size for each in gone) + sum(each.size for each in waiting)
        with counts:
            counts.stale += sum(each.count for each in gone) + len(waiting)
            counts.waiting -= len(waiting)
        for each in (*gone, *waiting):
            self._limits.pop(each, None)
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

    def _wake(self, most: int) -> None:
        idle = self._idle
        while most and idle:
            waiter = idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                most -= 1

    def _gate_opened(self) -> None:
        self._wake(len(self._idle))
        self._on_room()

    async def _park(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._idle.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._idle:
                self._idle.remove(waiter)
            raise

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("intake_worker_broke", consumer=self._name, task=task.get_name(), **log.describe(error))

    @property
    def broken(self) -> bool:
        """Whether a worker has ended that nobody has stopped."""
        return not self._stopping and any(worker.task.done() for worker in self._workers)

    async def _run_singles(self, worker: _Worker) -> None:  # noqa: C901, PLR0912 - the hot path stands whole
        """Messages one at a time: the path on which every step counts."""
        counts, settlement, lanes, loop, gate = self._counts, self._settlement, self.lanes, self._loop, self.gate
        decode, scaler = self._decode, self._scaler
        assert isinstance(self._call, SingleCall)  # noqa: S101 - `start` has looked
        handler = self._call.handler
        while True:
            if not lanes.ready or gate.shut or (scaler is not None and self.active > self.limit):
                await self._park()
                continue
            delivery: Any = lanes.next()
            epoch: Epoch = delivery.epoch
            if not epoch.open:  # it closed before the pool had seen it
                lanes.free(delivery.order)
                self._forget((delivery,), ())
                continue
            if self._idle and lanes.ready:
                self._wake(2)
            counts.in_flight += 1
            epoch.running += 1
            worker.since = loop.time()
            worker.busy = (delivery,)
            if self._deadline is None and self._timeout is not None:
                self._arm(worker.since)
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
            ending = worker.why is not None and self._outlived(worker)
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

    async def _run_batches(self, worker: _Worker) -> None:  # noqa: C901, PLR0912 - the hot path stands whole
        counts, settlement, lanes, loop, gate = self._counts, self._settlement, self.lanes, self._loop, self.gate
        scaler = self._scaler
        while True:
            if not lanes.ready or gate.shut or (scaler is not None and self.active > self.limit) or not self._full():
                await self._park()
                continue
            units = self._next_batch()
            if not units:
                continue
            if self._idle and lanes.ready:
                self._wake(2)
            count = 0
            for unit in units:
                count += unit.count
                unit.epoch.running += unit.count
            counts.in_flight += count
            worker.since = loop.time()
            worker.busy = units
            if self._deadline is None and self._timeout is not None:
                self._arm(worker.since)
            places: Sequence[Taken] = units
            try:
                bad: dict[int, BaseException] = {}
                batch: Any = units
                if count != len(units):
                    if len(units) == 1 and self._decode is None:
                        batch = units[0]
                    else:
                        places = batch = self._split(units)
                if self._decode is not None:
                    bad = {
                        place: wrong for place, each in enumerate(batch) if (wrong := self._decode(each)) is not None
                    }
                rejected = await self._call_with(batch, bad)
            except BaseException as error:  # noqa: BLE001 - any error at all: every message gets its outcome
                self._raised(worker, self._split(places), error)
                continue
            finally:
                worker.busy = None
            ending = worker.why is not None and self._outlived(worker)
            if scaler is not None:
                self._learn(worker, count)
            if rejected:
                self._failed(self._split(places), rejected, worker)
            else:
                if self._limits:
                    for each in places:
                        self._limits.pop(each, None)
                settlement.acked.extend(places)
                if settlement.asleep:
                    settlement.wake()
                for key in {each.order for each in places}:
                    lanes.free(key)
            if ending:
                return

    async def _call_with(self, batch: Sequence[Message], bad: dict[int, BaseException]) -> Rejected:
        """Call the handler with what could be decoded; its answer and the rest, by place in the whole batch."""
        if not bad:
            return await self._call(batch)
        places = [place for place in range(len(batch)) if place not in bad]
        if not places:
            return bad
        try:
            rejected = await self._call([batch[place] for place in places])
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

    # -- batches -----------------------------------------------------------------------------------------------------

    def _full(self) -> bool:
        """Whether a batch may leave: it is full, has waited long enough, or nothing may wait any more."""
        policy = self._batch
        assert policy is not None  # noqa: S101 - only a pool with batches asks
        if policy.linger <= 0 or self._flushing or self.lanes.size >= policy.max_records:
            return True
        if self.held_bytes >= policy.max_bytes or self._prefetch <= self.lanes.size:
            return True
        due = self.lanes.ready[0].taken + policy.linger
        if due <= self._loop.time():
            return True
        if self._linger_timer is None:
            self._linger_timer = self._loop.call_at(due, self._lingered)
        return False

    def _lingered(self) -> None:
        self._linger_timer = None
        self._wake(1)

    def _next_batch(self) -> list[Taken]:
        """Take what is ready, from each lane as much as stands there, up to the batch's bounds."""
        policy = self._batch
        assert policy is not None  # noqa: S101 - only a pool with batches asks
        lanes, limits = self.lanes, self._limits
        batch: list[Taken] = []
        count = size = 0
        most = policy.max_records
        while lanes.ready:
            head = lanes.ready[0]
            if batch and (count + head.count > most or size + head.size > policy.max_bytes):
                break
            if limits and isinstance(head, Delivery) and head in limits:
                if batch and count >= limits[head]:
                    break
                most = min(most, limits[head])
            each: Taken | None = lanes.next()
            key = head.order
            while each is not None:
                if each.epoch.open:
                    batch.append(each)
                    count += each.count
                    size += each.size
                else:
                    self._forget((each,), ())
                    if each is head:  # the rest of its lane is as stale, or of a newer epoch, whose turn comes
                        lanes.free(key)
                        break
                behind = None if key is None else lanes.peek_behind(key)
                fits = behind is not None and count + behind.count <= most and size + behind.size <= policy.max_bytes
                each = lanes.next_behind(key) if fits and key is not None and behind not in limits else None
        return batch

    # -- failures ----------------------------------------------------------------------------------------------------

    def _raised(self, worker: _Worker, deliveries: list[Delivery], error: BaseException) -> None:
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
        elif not isinstance(error, Exception):  # KeyboardInterrupt and the like
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

    def _isolate(self, deliveries: list[Delivery], error: BaseException, worker: _Worker) -> bool:
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
        limit = max(1, len(deliveries) // ALONE_STEP)
        for each in deliveries:
            self._limits[each] = limit
        if isinstance(error, PermanentError):
            self._counts.failures += len(deliveries)
            self._note(worker, deliveries, error)
            self._apply(deliveries, [Retry(0.0, each.attempt) for each in deliveries])
            return True
        return False

    @staticmethod
    def _outlived(worker: _Worker) -> bool:
        """A handler was cancelled and returned all the same, so it has handled its message; whether its worker ends."""
        why, worker.why = worker.why, None
        worker.task.uncancel()
        return why == "stop"

    def _release(self, deliveries: list[Delivery]) -> None:
        settlement = self._settlement
        settlement.released.extend(deliveries)
        settlement.wake()

    def _failed(
        self, deliveries: list[Delivery], rejected: Rejected, worker: _Worker | None = None, *, whole: bool = False
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
                    self._limits[each] = 1
        self._apply(deliveries, verdicts)

    def _note(self, worker: _Worker | None, deliveries: list[Delivery], error: BaseException, count: int = 0) -> None:
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

    def _apply(  # noqa: C901, PLR0912 - one branch per verdict
        self, deliveries: list[Delivery], verdicts: Sequence[Verdict | None]
    ) -> None:
        """Give every message of a call its outcome; a key whose message stays here, or is not confirmed, stays busy."""
        settlement, lanes = self._settlement, self.lanes
        again: dict[Hashable | None, list[tuple[Delivery, float | None]]] = {}
        forwards: list[tuple[Delivery, Retry | DeadLetter]] = []
        for delivery, verdict in zip(deliveries, verdicts, strict=True):
            if verdict is None:
                settlement.acked.append(delivery)
            elif delivery.epoch.over:
                settlement.acked.append(delivery)  # the settlement finds it stale
            elif isinstance(verdict, DeadLetter):
                self._log_dead(delivery, verdict)
                if self._drops:
                    settlement.given_up.append(delivery)
                else:
                    forwards.append((delivery, verdict))
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
                self._limits.pop(delivery, None)
            if verdict is None or isinstance(verdict, DeadLetter):
                self._limits.pop(delivery, None)
        settlement.wake()
        for key, kept in again.items():
            self._keep(key, kept)
        self._forward(forwards, again)
        for key in {each.order for each in deliveries} - set(again) - {each.order for each, _ in forwards}:
            lanes.free(key)
        self._wake(2)

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
        if self._flushing and delayed:
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
                    self._wake(1)

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

    def _arm(self, since: float) -> None:
        assert self._timeout is not None  # noqa: S101 - asked only with one
        self._deadline = self._loop.call_at(since + self._timeout, self._sweep)

    def _sweep(self) -> None:
        """Cancel the calls whose time is over, and look again when the next one's will be.

        The time is the same for all, so the call that began first is over first: one timer is exact for all of them,
        and a call costs none.
        """
        self._deadline = None
        assert self._timeout is not None  # noqa: S101 - armed only with one
        now = self._loop.time()
        oldest: float | None = None
        for worker in self._workers:
            if worker.busy is None or worker.why is not None:
                continue
            if worker.since + self._timeout <= now:
                worker.why = "timeout"
                worker.task.cancel()
            elif oldest is None or worker.since < oldest:
                oldest = worker.since
        if oldest is not None:
            self._arm(oldest)

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
        self._wake(2)

    def _learn(self, worker: _Worker, size: int) -> None:
        """Let the number of workers follow what calls take, and whether more is waiting."""
        scaler = self._scaler
        assert scaler is not None  # noqa: S101 - asked only with one
        now = self._loop.time()
        busy = bool(self.lanes.ready) and self.active >= self.limit
        scaler.ended(now - worker.since, now, busy=busy, size=size)
        if scaler.workers != self.limit:
            more = scaler.workers - self.limit
            self.limit = scaler.workers
            if more > 0:
                self._wake(more)

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Let batches leave as they are from now on."""
        self._flushing = True
        self._wake(2)

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
            self._limits.pop(each, None)
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
        self._stopping = True
        tasks = [worker.task for worker in self._workers if not worker.task.done()]
        for worker in self._workers:
            if not worker.task.done():
                worker.why = "stop"
                worker.task.cancel()
        for timer in (self._deadline, self._retry_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        if not tasks:
            return 0
        _, left = await asyncio.wait(tasks, timeout=grace)
        if left:
            busy = [worker for worker in self._workers if worker.task in left]
            for worker in busy:
                log.error(
                    "handler_abandoned",
                    consumer=self._name,
                    worker=worker.number,
                    seconds=round(self._loop.time() - worker.since, 3),
                )
        return len(left)
