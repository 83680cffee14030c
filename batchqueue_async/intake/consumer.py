"""What all consumers share: their life from the first connection to the report, around one pool and one settlement.

A consumer class brings a lane. Connecting again, pausing, stopping, statistics and health are here, so that they are
the same for every broker.
"""

from __future__ import annotations

import asyncio
import math
import time
from random import Random
from typing import TYPE_CHECKING, Any, Literal, Self

from batchqueue_async._support import forks, log
from batchqueue_async._support.checks import check_timeout
from batchqueue_async._support.registry import everything
from batchqueue_async.errors import AuthError, ConfigError, DeadlockError, ForkedError, QueueClosedError, WrongLoopError
from batchqueue_async.export.control.backoff import Backoff
from batchqueue_async.export.control.concurrency import Scaler
from batchqueue_async.intake.calls import Decoder, DeliverCall, SingleCall, make_call
from batchqueue_async.intake.cancelling import asked_for
from batchqueue_async.intake.config import MOST_WORKERS, IntakeConfig
from batchqueue_async.intake.pacing import Pacer
from batchqueue_async.intake.pool import WorkerPool
from batchqueue_async.intake.ports import Order, Plan, Room
from batchqueue_async.intake.retrying import Judge
from batchqueue_async.intake.settlement import Settlement
from batchqueue_async.intake.stats import Counters, IntakeReport, IntakeStats, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchqueue_async.intake.message import Message
    from batchqueue_async.intake.ports import Lane, Session

USER = "user"
_GRACE = 1.0
_PROGRESS = 5.0
_END_TIMEOUT = 5.0
# A session that has lasted this long works, though no message has come.
_PROVEN = 5.0


class Consumer:
    """The part of a consumer that no broker changes; `AmqpConsumer`, `KafkaConsumer` and the others derive from it.

    Attributes:
        name: what logs, metrics and the broker call it.
        config: how it handles.
        report: what became of the messages; None before the end.
    """

    orders: frozenset[Order] = frozenset({Order.KEY})
    """The orders that the lane has of its own."""

    default_order: Order | None = None
    """The order where `ordered_by` is not given."""

    lane_orders: bool = False
    """Whether the lane sets `delivery.order` for `PARTITION` and `KEY`."""

    def __init__(self, handler: Any, config: IntakeConfig, *, name: str, random: Random | None = None) -> None:
        """Say what handles messages, and how; nothing happens before `async with`."""
        self.name = name
        self.config = config
        self.report: IntakeReport | None = None
        self._handler = handler
        self._random = random or Random()  # noqa: S311 - it spreads retries, and guards nothing
        self._call, self._batch = make_call(self._owner, handler, config.batch, decoded=config.decode is not None)
        self._plan = self._make_plan()
        self._counts = Counters()
        self._phase: Literal["new", "connecting", "running", "draining", "closed"] = "new"
        self._loop: asyncio.AbstractEventLoop
        self._pool: WorkerPool
        self._settlement: Settlement
        self._lane_object: Lane
        self._session: Session | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[IntakeReport] | None = None
        self._unused: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[None]
        self._started: asyncio.Future[None]
        self._room_bell: asyncio.Future[None] | None = None
        self._deadline = math.inf
        self._hasten = asyncio.Event()
        self._unwell: float | None = None
        self._born = 0.0
        self._last_message: float | None = None
        self._last_error: str | None = None
        self._sessions = 0
        self._session_began = 0.0
        self._reads_dry = False
        self._other_lane: Callable[[Plan], Lane] | None = None
        self._forked = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._phase})"

    @property
    def _owner(self) -> str:
        return f"{type(self).__name__} {self.name!r}"

    # -- what a consumer class says --------------------------------------------------------------------------------

    def _lane(self, plan: Plan) -> Lane:
        """The way to the broker, made once, at the start."""
        raise NotImplementedError

    def use_lane(self, make: Callable[[Plan], Lane]) -> None:
        """Consume by another lane than the class's own, such as that of a `FakeBroker`; before it is entered."""
        if self._phase != "new":
            raise QueueClosedError(f"{self._owner}: {self._phase} already; replace its lane before it is entered")
        self._other_lane = make

    # -- the numbers -----------------------------------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        config = self.config
        resolved = config.resolve()
        workers = resolved.workers
        prefetch = resolved.prefetch
        if config.adaptive is not None:
            workers = max(workers, min(MOST_WORKERS, config.adaptive.most))
        if self._batch is not None:
            prefetch = max(prefetch, self._batch.max_records)
        ordered_by = config.ordered_by
        order: Literal["none", "partition", "key", "function"] = "none"
        if ordered_by is None and workers == 1 and config.adaptive is None:
            ordered_by = self.default_order
            order = "function"  # everything is one lane
        elif ordered_by is None:
            ordered_by = self.default_order
        if isinstance(ordered_by, Order):
            if ordered_by not in self.orders:
                raise ConfigError(
                    f"{self._owner}: ordered_by={ordered_by.name} is not an order that this broker has; "
                    f"give a function of the message, or {' or '.join(sorted(each.name for each in self.orders))}"
                )
            order = "partition" if ordered_by is Order.PARTITION else "key"
        elif ordered_by is not None:
            order = "function"
        runs = self._batch is not None and order in {"none", "partition"} and config.decode is None
        return Plan(
            name=self.name,
            workers=workers,
            prefetch=prefetch,
            prefetch_bytes=config.prefetch_bytes,
            order=order,
            run=self._batch.max_records if runs and self._batch is not None else 0,
            dead_letters=None if config.drops else str(config.dead_letters),
            handler_timeout=config.handler_timeout,
            drain_timeout=config.drain_timeout,
        )

    @property
    def plan(self) -> Plan:
        """The resolved numbers."""
        return self._plan

    # -- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connect and begin to consume; a broker that is away is tried again in the background.

        Raises:
            ConfigError: something is set up wrong, here or at the broker.
            AuthError: the credentials are refused.
        """
        if self._phase != "new":
            raise QueueClosedError(f"{self._owner}: {self._phase} already; make another")
        self._phase = "connecting"
        self._loop = loop = asyncio.get_running_loop()
        self._closed = loop.create_future()
        self._started = loop.create_future()
        self._born = self._unwell = loop.time()
        try:
            self._build()
        except BaseException:
            self._phase = "closed"
            raise
        forks.watch(self)
        everything.add("consumer", self)
        self._log_start()
        self._settlement.start()
        self._pool.start(self._settlement)
        # A task of its own: it outlives the task, and the request, that has started the consumer.
        self._supervisor = loop.create_task(self._supervise(), name=f"intake-{self.name}")
        self._supervisor.add_done_callback(self._supervisor_ended)
        try:
            await asyncio.shield(self._started)
        except BaseException:
            await self.shutdown(0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def _build(self) -> None:
        config, plan = self.config, self._plan
        backoff = Backoff(config.retry, self._random)
        ordered_by = config.ordered_by
        adaptive = config.adaptive
        scaler = None
        if adaptive is not None:
            scaler = Pacer(Scaler(adaptive, config.resolve().workers), float(adaptive.interval))
        self._pool = WorkerPool(
            self.name,
            self._call,
            counts=self._counts,
            judge=Judge(config.retry, self._random, texts=config.dead_letter_text),
            workers=plan.workers,
            prefetch=plan.prefetch,
            prefetch_bytes=plan.prefetch_bytes,
            batch=None if isinstance(self._call, SingleCall) else self._batch,
            decode=None if config.decode is None else Decoder(config.decode),
            order=ordered_by if callable(ordered_by) else self._key_order(),
            everything_ordered=plan.order == "function" and not callable(ordered_by),
            drops=config.drops,
            handler_timeout=config.handler_timeout,
            scaler=scaler,
            wall_clock=time.time,
            on_room=self._room_came,
        )
        self._settlement = Settlement(self.name, self._counts, self._pool.gate, backoff, settled=self._pool.settled)
        self._lane_object = lane = (self._lane if self._other_lane is None else self._other_lane)(plan)
        self._pool.use(lane.retries, counts_held=lane.counts_held)

    def _key_order(self) -> Any:
        """KEY for a lane that sets no order itself: by the message's key."""
        return _key if self._plan.order == "key" and not self.lane_orders else None

    def _log_start(self) -> None:
        plan, config = self._plan, self.config
        capped = config.resolve().capped
        if capped:
            log.warning("intake_capped", consumer=self.name, workers=plan.workers, prefetch=plan.prefetch, asked=capped)
        log.info(
            "intake_started",
            consumer=self.name,
            workers=plan.workers,
            prefetch=plan.prefetch,
            prefetch_bytes=plan.prefetch_bytes,
            order=plan.order,
            batch=None if self._batch is None else self._batch.max_records,
        )
        if isinstance(self._call, DeliverCall) and self._call.unsynced is not None:
            log.warning(
                "intake_acks_unsynced",
                consumer=self.name,
                durability=self._call.unsynced,
                advice="what is acknowledged at the broker can be lost with the machine's power; give the exporter "
                "DurableConfig(durability='always'), or a handler that awaits its deliver()",
            )
        self._check_database()

    def _check_database(self) -> None:
        """Workers that wait for a connection of their pool are workers for nothing: say so at the start."""
        database = self.config.database
        if database is None:
            return
        sharing = [
            each.thing
            for each in everything.all("consumer")
            if isinstance(each.thing, Consumer) and each.thing.config.database == database
        ]
        workers = sum(each.plan.workers for each in sharing)
        needed = workers + database.spare
        if needed > database.size:
            log.warning(
                "database_pool_too_small",
                consumer=self.name,
                pool=database.name,
                size=database.size,
                needed=needed,
                workers=workers,
                consumers=len(sharing),
                spare=database.spare,
            )

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if not self._started.done():
            if error is None:
                self._started.set_exception(QueueClosedError(f"{self._owner}: shut down while it was connecting"))
            else:
                self._started.set_exception(error)
        elif error is not None:
            self._last_error = type(error).__qualname__
            log.error("intake_broke", consumer=self.name, **log.describe(error))

    # -- sessions ------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Connect, read until the session is over, and again: the first time at once, then ever later."""
        backoff = Backoff(self.config.reconnect, self._random)
        failures = 0
        while self._goes_on():
            began = self._loop.time()
            session = await self._connect()
            if session is not None and not self._goes_on():
                # A stop came while it was made: nobody handles any more what it would take.
                self._unused = self._loop.create_task(self._end(session), name=f"intake-{self.name}-unused")
                return
            delay = 0.0
            if session is not None:
                before = self._counts.settled
                await self._consume(session)
                lived = self._loop.time() - began
                # A session that ends before it has done anything, or sooner than we would wait, is paced as a failure:
                # a broker that takes us in and throws us out again is not hammered.
                floor = backoff.ceiling(failures + 1)
                if self._counts.settled > before and lived >= floor:
                    failures = 0
                else:
                    failures += 1
                    delay = max(0.0, backoff.delay(failures) - lived) if failures > 1 else 0.0
            else:
                failures += 1
                delay = backoff.delay(failures)
            if not self._goes_on():
                return
            self._phase = "connecting"
            now = self._loop.time()
            if self._unwell is None or (session is not None and now - self._session_began >= _PROVEN):
                self._unwell = now
            if delay:
                log.info("intake_reconnects", consumer=self.name, delay=round(delay, 3), tries=failures)
                await self._wait(delay)

    def _goes_on(self) -> bool:
        return self._phase in {"connecting", "running"}

    async def _wait(self, seconds: float) -> None:
        """Sleep, unless the stop comes first."""
        try:
            async with asyncio.timeout(seconds):
                await self._hasten.wait()
        except TimeoutError:
            pass

    async def _connect(self) -> Session | None:
        try:
            async with asyncio.timeout(self.config.connect_timeout):
                session = await self._lane_object.connect()
        except (ConfigError, AuthError) as error:
            if not self._started.done():
                raise
            # It was right once: the broker may be put in order again, so this is said and tried again.
            self._say("intake_refused", error)
            return None
        except (Exception, asyncio.CancelledError) as error:  # a client raises anything: an outage, and tried again
            if asked_for(error):
                raise
            self._say("intake_not_connected", error)
            self._begun()
            return None
        return session

    def _say(self, event: str, error: BaseException) -> None:
        self._last_error = type(error).__qualname__
        (log.error if isinstance(error, ConfigError | AuthError) else log.warning)(
            event, consumer=self.name, **log.describe(error)
        )

    def _begun(self) -> None:
        if not self._started.done():
            self._started.set_result(None)

    async def _consume(self, session: Session) -> None:
        self._sessions += 1
        if self._sessions > 1:
            self._counts.reconnects += 1
        self._session = session
        self._session_began = self._loop.time()
        self._settlement.bind(session)
        if self._phase == "connecting":
            self._phase = "running"
        log.info("intake_connected", consumer=self.name, session=self._sessions)
        self._begun()
        try:
            await self._read(session)
        except (Exception, asyncio.CancelledError) as error:  # however it ended, it is over, and another one is made
            if asked_for(error):
                raise
            self._say("intake_disconnected", error)
        finally:
            # While a stop is under way the session is still needed: it settles what was handled.
            if self._phase != "draining" or not self._reads_dry:
                await self._end(session)

    async def _read(self, session: Session) -> None:
        """Take what there is room for, until nothing more comes."""
        pool = self._pool
        gate = pool.gate
        while True:
            draining = self._phase == "draining"
            room = pool.room()
            if not draining and (gate.shut or room is None):
                self._room_bell = self._loop.create_future()
                await asyncio.wait((self._room_bell,))
                continue
            if room is None:  # what is under way at the broker has to come out, a little above the bound
                room = Room(1, 1)
            taken = await session.take(room)
            if taken:
                self._last_message = self._loop.time()
                self._unwell = None
                pool.accept(taken)
                taken = ()  # what is done is not kept while we wait for more
            elif self._phase == "draining":
                self._reads_dry = True
                return
            else:
                self._unwell = None
                await asyncio.sleep(0)

    def _room_came(self) -> None:
        bell = self._room_bell
        if bell is not None and not bell.done():
            bell.set_result(None)

    async def _end(self, session: Session) -> None:
        try:
            async with asyncio.timeout(_END_TIMEOUT):
                await session.end()
        except (Exception, asyncio.CancelledError) as error:  # it should not raise; it is over either way
            if asked_for(error):
                raise
            log.warning("session_end_failed", consumer=self.name, **log.describe(error))
        if self._session is session:
            self._session = None
            self._settlement.bind(None)

    # -- what users call ---------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start nothing more, and take nothing more, until `resume`; what is with a handler goes on.

        A stop that is under way is not paused: it handles what was taken.
        """
        self._check("pause")
        if self._phase != "draining":
            self._pool.gate.close(USER)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._check("resume")
        self._pool.gate.open(USER)

    async def closed(self) -> IntakeReport:
        """Wait until it has been shut down; the report."""
        self._check("closed")
        self._check_waits("closed")
        await asyncio.shield(self._closed)
        assert self.report is not None  # noqa: S101 - it is made before the future
        return self.report

    def stats(self) -> IntakeStats:
        """The numbers now; from any thread."""
        return self.peek()

    def peek(self) -> IntakeStats:
        """The numbers now, without waiting, from any thread."""
        counts, plan = self._counts, self._plan
        if self._phase == "new":
            return IntakeStats(name=self.name, state="new", workers=plan.workers, prefetch=plan.prefetch)
        now, pool, session = self._loop.time(), self._pool, self._session

        def look() -> IntakeStats:
            return IntakeStats(
                name=self.name,
                state=self._state(),
                workers=min(pool.limit, plan.workers),
                prefetch=plan.prefetch,
                received=counts.received,
                acked=counts.acked,
                retried=counts.retried,
                dead_lettered=counts.dead_lettered,
                released=counts.released,
                stale=counts.stale,
                buffered=counts.buffered,
                waiting=counts.waiting,
                in_flight=counts.in_flight,
                held_bytes=pool.held_bytes,
                failures=counts.failures,
                dropped=counts.dropped,
                settle_errors=counts.settle_errors,
                forward_errors=counts.forward_errors,
                lost=counts.lost,
                redelivered=counts.redelivered,
                reconnects=counts.reconnects,
                rebalances=counts.rebalances,
                commits=counts.commits,
                keys=pool.keys,
                lag=None if session is None else session.lag(),
                oldest_in_flight=pool.workers.oldest(now),
                last_message=None if self._last_message is None else now - self._last_message,
                last_outcome=None if pool.last_outcome is None else now - pool.last_outcome,
                last_error=pool.last_error or self._last_error,
                paused_for=pool.gate.reasons,
            )

        return counts.read(look)

    def _state(self) -> State:
        if self._phase == "running" and self._pool.gate.reasons:
            return "paused"
        return self._phase

    def healthy(self, stall: float = 60.0) -> bool:
        """Whether outcomes follow what is taken, and there is a connection; from any thread.

        False when it is closed, when a task of its own has broken, when there has been no working connection for
        `stall` seconds, when something was to be handled and nothing has had an outcome for that long, or when dead
        letters could not be published or the downstream has refused for that long. A pause of the user's is healthy.
        """
        check_timeout(self._owner, stall, name="stall")
        if self._phase in {"new", "closed"} or self._forked or self._pool.workers.broken:
            return False
        supervisor = self._supervisor
        if supervisor is None or (supervisor.done() and self._phase != "draining"):
            return False
        now = self._loop.time()
        proven = self._session is not None and now - self._session_began >= min(stall, _PROVEN)
        unwell = self._unwell
        if unwell is not None and now - unwell >= stall and not proven:
            return False
        counts, pool = self._counts, self._pool
        if pool.gate.reasons == (USER,) and not counts.in_flight:
            return True
        pending = counts.received - counts.settled - counts.waiting
        if pending <= 0:
            return True
        since = max(each for each in (pool.last_outcome, pool.busy_since, self._born) if each is not None)
        return now - since < stall

    async def shutdown(self, timeout: float | None = None) -> IntakeReport:
        """Take no more, handle what was taken, settle it, and close; a second call joins, and can only hasten.

        Args:
            timeout: seconds to wait for handlers; `drain_timeout` when None.

        Returns:
            What became of the messages. What was not handled in time was given back.

        Raises:
            DeadlockError: called in a handler of this consumer, which it would wait for.
        """
        check_timeout(self._owner, timeout)
        if self._phase == "new":
            self._phase = "closed"
            self.report = self._make_report(0.0, 0)
            return self.report
        self._check("shutdown", closed=True)
        if self.report is not None:
            return self.report
        self._check_waits("shutdown")
        now = self._loop.time()
        deadline = now + (self.config.drain_timeout if timeout is None else timeout)
        if deadline < self._deadline:
            self._deadline = deadline
            self._hasten.set()
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name=f"intake-{self.name}-close")
        return await asyncio.shield(self._closing)

    def _check(self, call: str, *, closed: bool = False) -> None:
        if self._forked:
            raise ForkedError(f"{self._owner}: {call} in a forked child; its connection stayed behind; make another")
        if self._phase == "new" or (self._phase == "closed" and not closed and call != "closed"):
            raise QueueClosedError(f"{self._owner}: {call} is not possible while it is {self._phase}; enter it first")
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            raise WrongLoopError(f"{self._owner}: {call} was called on another loop than its own; call it there")

    def _check_waits(self, call: str) -> None:
        if self._pool.workers.has(asyncio.current_task()):
            raise DeadlockError(
                f"{self._owner}: {call} in a handler of its own waits for that handler; "
                f"call it in another task, such as that which has entered the consumer"
            )

    def after_fork(self) -> None:
        """In a forked child the connection is the parent's."""
        self._forked = True

    # -- the stop ----------------------------------------------------------------------------------------------------

    async def _close(self) -> IntakeReport:
        began = self._loop.time()
        self._phase = "draining"
        progress = self._loop.create_task(self._log_progress(), name=f"intake-{self.name}-progress")
        pool, settlement = self._pool, self._settlement
        abandoned = 0
        try:
            session = self._session
            self._room_came()
            pool.gate.open(USER)
            if session is not None:
                await self._drain(session)
            pool.release_waiting()
            pool.release_buffered()
            abandoned = await pool.cancel(_GRACE)
            await settlement.abandon_forwards()
            await self._bounded(settlement.settled(), _GRACE)
            if (session := self._session) is not None:
                await self._bounded(session.flush(), _GRACE)
                await self._end(session)
            supervisor = self._supervisor
            if supervisor is not None and not supervisor.done():
                supervisor.cancel()
                await asyncio.wait((supervisor,), timeout=_GRACE)
            if self._unused is not None:
                await asyncio.wait((self._unused,))
            await settlement.close()
        finally:
            progress.cancel()
            self._phase = "closed"
            everything.remove(self)
            self.report = self._make_report(self._loop.time() - began, abandoned)
            if not self._closed.done():
                self._closed.set_result(None)
        left = self._counts.received - self._counts.settled
        log.info(
            "intake_closed",
            consumer=self.name,
            acked=self.report.acked,
            released=self.report.released,
            stale=self.report.stale,
            left=left,
            abandoned=abandoned,
            seconds=round(self.report.elapsed, 3),
        )
        return self.report

    async def _drain(self, session: Session) -> None:
        """The part of the stop that has time: until everything is handled, or the deadline."""
        pool = self._pool
        await self._until_deadline(self._stop_taking(session))
        if session.hand_over:
            pool.release_buffered()
        pool.release_waiting()
        pool.flush()
        await self._until_deadline(self._drained())

    async def _stop_taking(self, session: Session) -> None:
        try:
            await session.stop()
        except (Exception, asyncio.CancelledError) as error:  # then there is nothing left to stop
            if asked_for(error):
                raise
            log.warning("session_stop_failed", consumer=self.name, **log.describe(error))
            return
        supervisor = self._supervisor
        if supervisor is not None:
            await asyncio.wait((supervisor,))

    async def _drained(self) -> None:
        await self._pool.quiet()
        await self._settlement.settled()

    async def _until_deadline(self, step: Any) -> bool:
        """Run a step until it has ended or the deadline is there, which may move nearer meanwhile."""
        task = self._loop.create_task(step)
        while not task.done():
            left = self._deadline - self._loop.time()
            if left <= 0:
                break
            self._hasten.clear()
            hastened = self._loop.create_task(self._hasten.wait())
            await asyncio.wait((task, hastened), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            hastened.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.wait((task,))
        return False

    @staticmethod
    async def _bounded(step: Any, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await step
        except TimeoutError:
            pass
        except (Exception, asyncio.CancelledError) as error:  # the end goes on; the broker has what it was given
            if asked_for(error):
                raise
            log.warning("intake_flush_failed", **log.describe(error))

    async def _log_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS)
            stats = self.peek()
            log.info(
                "intake_draining",
                consumer=self.name,
                buffered=stats.buffered,
                waiting=stats.waiting,
                in_flight=stats.in_flight,
                left=round(max(0.0, self._deadline - self._loop.time()), 1),
            )

    def _make_report(self, elapsed: float, abandoned: int) -> IntakeReport:
        counts = self._counts
        return IntakeReport(
            acked=counts.acked,
            retried=counts.retried,
            dead_lettered=counts.dead_lettered,
            released=counts.released,
            stale=counts.stale,
            abandoned=abandoned,
            elapsed=elapsed,
        )


def _key(message: Message) -> Any:
    return message.key
