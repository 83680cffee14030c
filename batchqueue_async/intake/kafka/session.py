"""One member of a consumer group: reads what there is room for, commits what is handled, and lives through rebalances.

What is decided, `Assignment` and `StallWatch` decide; this is the shell around a client.

- `take` asks the client for records of the partitions that have room. The client is never paused: it would throw away
  what it has fetched, and fetch it again. It keeps a megabyte of each partition that is not read.
- Commits go out one at a time, in the background, at most every `commit_interval`, and at a revocation and at the end.
- The client calls `_revoked` in its own task and joins the group when that returns. It never waits for `take`, and it
  never raises. After its fence the client hands out nothing of the old assignment; records that come before `_assigned`
  is called belong to the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support import log
from batchqueue_async.errors import AuthError, RetryableError
from batchqueue_async.intake.cancelling import asked_for
from batchqueue_async.intake.kafka.records import KafkaMessage, KafkaRun, size_of_all
from batchqueue_async.intake.kafka.stalls import Sight, StallWatch
from batchqueue_async.intake.ports import DeadLetter, SessionLostError
from batchqueue_async.sinks.kafka import client

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchqueue_async.intake.kafka.assignment import Assignment
    from batchqueue_async.intake.kafka.lane import KafkaOptions
    from batchqueue_async.intake.kafka.letters import Letters
    from batchqueue_async.intake.kafka.progress import Place, Progress
    from batchqueue_async.intake.ports import Delivery, Outcomes, Plan, Retry, Room, Taken
    from batchqueue_async.intake.stats import Counters

# How long the client waits for records in one call. A change of room, a stop and a rebalance end the wait at once.
_POLL = 0.2
_NOWHERE = ("", -1)
# How long a revocation waits for the next outcome while there is something to finish that was not begun.
_PATIENCE = 2.0
# How long a session that ends waits for its last commit.
_LAST_COMMIT = 2.0


class KafkaSession:
    """A consumer of aiokafka that has found its brokers, as a session of the pool."""

    hand_over = False

    def __init__(
        self,
        consumer: client.Consumer,
        assignment: Assignment,
        options: KafkaOptions,
        *,
        plan: Plan,
        letters: Letters,
        counts: Counters,
    ) -> None:
        self.consumer = consumer
        self.assignment = assignment
        self._counts = counts
        self._options = options
        self._plan = plan
        self._letters = letters
        self._loop = asyncio.get_running_loop()
        self._nowhere = client.partition_of(*_NOWHERE)
        self._stopped = False
        self._ended = False
        self._lost: BaseException | None = None
        # The wait of `take`, which others end early; None while it does not wait.
        self._wait: asyncio.Timeout | None = None
        self._dirty = asyncio.Event()
        self._settled = asyncio.Event()
        self._commit_turn = asyncio.Lock()
        self._committer: asyncio.Task[None] | None = None
        self._looker: asyncio.Task[None] | None = None
        self._first = asyncio.Event()
        self._ends: dict[Place, int] = {}
        self._watch = StallWatch(options.stall_timeout, now=self._loop.time())
        self._has_room = True

    # --- the start

    async def join(self, patience: float) -> None:
        """Join the group, and wait for what it assigns, be it nothing.

        Raises:
            AuthError: the group or a topic is refused.
        """
        self.consumer.subscribe(self._options.topics, listener=client.listener(self._revoked, self._assigned))
        self._committer = self._loop.create_task(self._commit_now_and_then(), name=f"{self._plan.name}-commits")
        self._looker = self._loop.create_task(self._look_now_and_then(), name=f"{self._plan.name}-ends")
        with contextlib.suppress(TimeoutError):  # a group can take its time; the watch looks at what it does
            async with asyncio.timeout(patience):
                while not self._first.is_set():
                    await self._poll_nowhere()

    async def _poll_nowhere(self) -> None:
        """Wait for the group, and raise what it refuses; takes no record of any partition."""
        try:
            async with asyncio.timeout(_POLL):
                await self.consumer.getmany(self._nowhere, timeout_ms=0)
                await self._first.wait()
        except TimeoutError:
            pass
        except Exception as error:  # noqa: BLE001 - it goes on, by the library's class
            raise self._translated(error) from None

    # --- rebalances, in the client's task

    def _assigned(self, places: Sequence[Any]) -> None:
        self.assignment.assign(places)
        self._watch.progressed(self._loop.time())
        self._first.set()
        self._wake()
        if not self._ended:
            log.info("partitions_assigned", consumer=self._plan.name, partitions=len(places))

    async def _revoked(self, _: Sequence[Any]) -> None:
        started = self._loop.time()
        deadline = started + self._options.revoke_timeout
        if self._plan.order != "partition":
            await self._finish_taken(started + self._options.revoke_timeout / 2)
        parts = self.assignment.revoke()
        if not parts:
            return
        self._counts.rebalances += 1
        try:
            for part in parts:
                await part.epoch.drain(max(0.0, deadline - self._loop.time()))
            await self._commit(self._options.commit_timeout)
        except Exception as error:  # noqa: BLE001 - the client would log it and go on; so do we, with the fence up
            log.error("revocation_failed", consumer=self._plan.name, **log.describe(error))
        finally:
            unfinished = sum(part.epoch.running for part in parts)
            self.assignment.fence(parts)
            self._watch.progressed(self._loop.time())
            self._wake()
            log.info(
                "partitions_revoked",
                consumer=self._plan.name,
                partitions=len(parts),
                unfinished=unfinished,
                seconds=round(self._loop.time() - started, 3),
            )

    async def _finish_taken(self, deadline: float) -> None:
        """Let what was taken be handled before anything is forgotten.

        Without order by partition, records behind the first unbegun one are finished already: if it were forgotten, the
        commit would stay before it, and the next owner would repeat them. It ends early when nothing finishes any more:
        the consumer is paused, or what is left waits for another attempt.
        """
        while any(part.held for part in self.assignment.parts):
            left = min(deadline - self._loop.time(), _PATIENCE)
            if left <= 0 or self._ended:
                return
            self._settled.clear()
            try:
                async with asyncio.timeout(left):
                    await self._settled.wait()
            except TimeoutError:
                return

    # --- taking

    async def take(self, room: Room) -> Sequence[Taken]:
        """Wait for records of partitions that have room."""
        self._has_room = True
        try:
            while not self._stopped:
                if self._lost is not None:
                    raise self._lost
                found = await self._poll(room)
                if found:
                    taken = self._taken(found)
                    if taken:
                        self._watch.progressed(self._loop.time())
                        return taken
        finally:
            self._has_room = False
        return []

    async def _poll(self, room: Room) -> Mapping[Any, list[Any]]:
        """Records from partitions with room; nothing when the wait ended, for whichever reason."""
        assignment = self.assignment
        offered = assignment.offered()
        if not offered and assignment.places:
            await self._idle(asyncio.Event().wait())
            return {}
        every = len(offered) == len(assignment.places)
        places = () if every else tuple(client.partition_of(*place) for place in offered)
        lot = assignment.lot(offered, room.messages, room.bytes)
        try:
            found = await self._idle(
                self.consumer.getmany(*places, timeout_ms=int(_POLL * 1000), max_records=lot)
                if assignment.assigned
                else self.consumer.getmany(self._nowhere, timeout_ms=int(_POLL * 1000))
            )
        except Exception as error:  # noqa: BLE001 - it goes on, by the library's class
            await self._commit(1.0)  # what is handled need not come again, if the group still listens
            raise self._ends_by(error) from None
        if not found:
            self._dirty.set()  # a transaction's marker moves the position, and no record says so
        return found or {}

    async def _idle(self, waiting: Any) -> Any:
        """Wait for something, at most a poll's time, until somebody wakes us; None when nothing came of it.

        The client loses nothing by this: it hands out records in the step in which its call returns.
        """
        try:
            async with asyncio.timeout(_POLL * 2) as self._wait:
                return await waiting
        except TimeoutError:
            return None
        finally:
            self._wait = None

    def _wake(self) -> None:
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(self._loop.time())
            self._wait = None

    def _taken(self, found: Mapping[Any, list[Any]]) -> list[Taken]:
        taken: list[Taken] = []
        plan = self._plan
        for place, records in found.items():
            part = self.assignment.part(place)
            if not part.epoch.open:
                continue  # lost, and not yet revoked: whoever has it now reads them from the commit point
            if plan.run:
                self._take_runs(part, records, taken)
            else:
                self._take_each(part, records, taken)
        return taken

    def _take_runs(self, part: Progress, records: list[Any], taken: list[Taken]) -> None:
        order = part.place if self._plan.order == "partition" else None
        most = self._plan.run
        for start in range(0, len(records), most):
            run = records if len(records) <= most else records[start : start + most]
            size = size_of_all(run)
            part.received(run[0].offset, len(run), size)
            self.assignment.took(len(run), size)
            taken.append(KafkaRun(run, part, order, size))

    def _take_each(self, part: Progress, records: list[Any], taken: list[Taken]) -> None:
        lane = part.place if self._plan.order == "partition" else None
        before = part.bytes
        for message in KafkaMessage.deliveries(records, part, lane, by_key=self._plan.order == "key"):
            part.received(message.offset, 1, message.size)
            taken.append(message)
        self.assignment.took(len(records), part.bytes - before)

    def _ends_by(self, error: Exception) -> BaseException:
        """The client's error, and the end of the session."""
        self._lost = self._translated(error)
        for part in self.assignment.parts:
            part.epoch.end()
        return self._lost

    def _translated(self, error: Exception) -> BaseException:
        meant = client.translate_error(f"Kafka consumer {self._plan.name!r}", error)
        if isinstance(meant, AuthError | SessionLostError):
            return meant
        if isinstance(meant, RetryableError):
            return SessionLostError(str(meant))
        return meant

    # --- settling

    async def settle(self, outcomes: Outcomes) -> None:
        """Note what is handled; the commit follows in the background."""
        # The pool hands back what it took here.
        for delivery in cast("list[KafkaMessage | KafkaRun]", outcomes.acked):
            if not delivery.epoch.over:
                delivery.finish()
        for delivery in cast("list[KafkaMessage | KafkaRun]", outcomes.released):
            if not delivery.epoch.over:
                delivery.give_back()
        self._changed()

    async def forward(self, delivery: Delivery, outcome: Retry | DeadLetter) -> None:
        """Produce a message to the dead letters; when all replicas have it, it is handled."""
        if not isinstance(outcome, DeadLetter) or not isinstance(delivery, KafkaMessage):
            raise TypeError(f"a retry of {delivery!r} is the pool's: the lane keeps what is tried again")
        await self._letters.send(delivery, outcome)
        if not delivery.epoch.over:
            delivery.finish()
            self._changed()

    def _changed(self) -> None:
        self._dirty.set()
        self._settled.set()
        # What was finished may have made room in a partition that the wait of `take` leaves out.
        if self._wait is not None and any(part.full for part in self.assignment.parts):
            self._wake()

    # --- commits

    async def _commit_now_and_then(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            await self._commit(self._options.commit_timeout)
            await asyncio.sleep(self._options.commit_interval)

    async def _commit(self, timeout: float) -> bool:
        """Commit what differs from the last commit; whether the broker has all of it."""
        try:
            async with asyncio.timeout(timeout), self._commit_turn:
                return await self._commit_due()
        except TimeoutError:
            self._counts.settle_errors += 1
            log.warning("commit_failed", consumer=self._plan.name, error_type="TimeoutError", seconds=timeout)
            self._dirty.set()
            return False

    async def _commit_due(self) -> bool:
        mine = self.consumer.assignment()
        parts = {part.place: part for part in self.assignment.parts if part.place in mine}
        positions = {place: await self._position(place) for place in parts}
        points = {place: point for place, point in self.assignment.due(positions).items() if place in mine}
        if not points:
            return True
        if await self._commit_these(points, parts):
            return True
        # The client raises one error for all, and does not say whose it is. One at a time, so that none fails for
        # another's sake.
        done = len(points) > 1
        for place, point in points.items() if done else ():
            done = await self._commit_these({place: point}, parts) and done
        if not done:
            self._dirty.set()
        return done

    async def _commit_these(self, points: dict[Place, int], parts: Mapping[Place, Progress]) -> bool:
        try:
            await self.consumer.commit({client.partition_of(*place): point for place, point in points.items()})
        except (Exception, asyncio.CancelledError) as error:  # a commit that fails is counted, and the work goes on
            if asked_for(error):
                raise
            self._counts.settle_errors += 1
            log.warning(
                "commit_failed", consumer=self._plan.name, error_type=type(error).__name__, partitions=len(points)
            )
            if client.is_left_behind(error) and len(points) == 1:
                (place,) = points
                parts[place].epoch.end()
            return False
        self._counts.commits += 1
        self.assignment.committed(points, parts)
        return True

    async def _position(self, place: Place) -> int | None:
        """The client's position, if it has one now: it would wait for one else."""
        try:
            async with asyncio.timeout(0):
                return await self.consumer.position(client.partition_of(*place))
        except Exception:  # noqa: BLE001 - no position, no commit of one
            return None

    async def flush(self) -> None:
        """Return when all that is handled is committed, or can't be."""
        while not self._ended:
            if await self._commit(self._options.commit_timeout):
                return
            await asyncio.sleep(self._options.commit_interval)

    # --- stuck clients

    async def _look_now_and_then(self) -> None:
        """Ask for the ends of the partitions now and then; give the session up when it is stuck."""
        pause = self._options.stall_timeout / 5
        while self._lost is None:
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))  # noqa: S311 - spreads the requests of many
            reason = self._watch.verdict(await self._sight(pause), self._loop.time())
            if reason is not None:
                log.error("consumer_stuck", consumer=self._plan.name, reason=reason)
                self._ends_by(SessionLostError(f"Kafka consumer {self._plan.name!r}: {reason}; it is made anew"))
                self._wake()

    async def _sight(self, timeout: float) -> Sight:
        places = [client.partition_of(*place) for place in self.assignment.places]
        behind: bool | None = None
        try:
            async with asyncio.timeout(timeout):
                self._ends = {} if not places else await self.consumer.end_offsets(places)
        except Exception:  # noqa: BLE001 - by any error, the broker did not answer
            behind = None
        else:
            behind = False
            for place, end in self._ends.items():
                position = await self._position(place)
                behind = behind or position is None or position < end
        full = not self.assignment.offered() and bool(places)
        return Sight(assigned=self.assignment.assigned, room=self._has_room and not full, behind=behind)

    def lag(self) -> int | None:
        """Offsets between the commit points and the ends that the client knows of; None while some are not known."""
        total = 0
        for part in self.assignment.parts:
            end = self._ends.get(part.place)
            with contextlib.suppress(Exception):  # no longer assigned
                seen = self.consumer.highwater(client.partition_of(*part.place))
                end = end if seen is None else max(seen, end or 0)
            if end is None or part.committed is None:
                return None
            total += max(0, end - part.committed)
        return total if self.assignment.assigned else None

    # --- the end

    async def stop(self) -> None:
        """Take nothing more; the membership stays until the end."""
        self._stopped = True
        self._wake()

    async def end(self) -> None:
        """Leave the group and close; a static member stays in it, for its successor."""
        if self._ended:
            return
        self._ended = self._stopped = True
        self._wake()
        if self._lost is None:
            await self._commit(_LAST_COMMIT)  # what is handled need not come again
        for part in self.assignment.parts:
            part.epoch.end()
        for task in (self._committer, self._looker):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,), timeout=1.0)
        await client.stop_consumer(self.consumer, self._options.close_timeout)
        await self._letters.close()
