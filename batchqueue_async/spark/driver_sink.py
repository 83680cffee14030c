"""Rows of a DataFrame through a queue in the driver: `DriverSink`."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async._support import forks, log
from batchqueue_async._support.checks import HandlerRule, require
from batchqueue_async.config import QueueConfig
from batchqueue_async.errors import ConfigError, DeliveryError, QueueClosedError, RetryableError
from batchqueue_async.sinks.base import BatchKey, Sink, replaces
from batchqueue_async.sinks.sqlite.sink import SqliteSink
from batchqueue_async.spark.arrow_types import arrow_schema
from batchqueue_async.spark.bad_rows import BadRows, DeadLetters, dead_letters_at
from batchqueue_async.spark.collect import COLLECT_BYTES, Collector
from batchqueue_async.spark.exporting import route_to
from batchqueue_async.spark.feed import Feeder
from batchqueue_async.spark.listener import skipped_writes
from batchqueue_async.spark.micro_batch import (
    RETRY,
    Chunk,
    MicroBatch,
    Patience,
    RepeatBatchError,
    Retries,
    chunk_of,
    handle_chunks,
)
from batchqueue_async.spark.process_bridge import Sizes, host
from batchqueue_async.spark.record_keys import RecordKeys, check_key_by
from batchqueue_async.spark.route import Route, check_order
from batchqueue_async.spark.rows import (
    Converter,
    check_columns,
    check_non_finite,
    check_rows,
    default_non_finite,
    default_rows,
    is_postgres,
    table_schema,
)
from batchqueue_async.spark.writes.ledger import Ledger, ledger_at
from batchqueue_async.spark.writes.streaming_query import QueryRun, current_run
from batchqueue_async.spark.writes.write_notes import (
    IS_IN,
    LedgerNotes,
    Notes,
    TransactionNotes,
    WriteSource,
    check_repetition,
    claim_source,
    source_of,
    write_key,
)
from batchqueue_async.spark.writes.write_place import Place, places

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from batchqueue_async.bridge.sync_bridge import SyncBridge
    from batchqueue_async.bridge.sync_queue import SyncQueue
    from batchqueue_async.config import Handler
    from batchqueue_async.export.policies import RetryPolicy
    from batchqueue_async.queue.stats import QueueStats
    from batchqueue_async.spark.feed import Fed
    from batchqueue_async.spark.record_keys import KeyBy
    from batchqueue_async.spark.rows import NonFinite, Rows

_ITEM_TYPES: dict[object, type] = {"dict": dict, "tuple": tuple}
BYTES_IN_FLIGHT = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DriverStats:
    """What a `DriverSink` has done so far.

    Attributes:
        batches: batches that were delivered.
        rows: rows in them.
        skipped: writes of a batch that had been delivered before, as one is after a crash.
        skipped_rows: rows in them.
        failed: batches that failed.
        retried: attempts that were made again, because the destination was away for a moment.
        dead_rows: rows that were given to the dead letters.
        seconds: time spent in all of them, Spark's work on them included.
        path: how the last batch came to the driver: "collect" or "stream"; empty before the first.
        queue: the queue's own numbers; None before the first batch.
    """

    batches: int = 0
    rows: int = 0
    skipped: int = 0
    skipped_rows: int = 0
    failed: int = 0
    retried: int = 0
    dead_rows: int = 0
    seconds: float = 0.0
    path: str = ""
    queue: QueueStats | None = None


class _AtExit:
    """What a sink leaves open when nobody closes it; without the sink, which may be gone by the end."""

    def __init__(self, route: Route, letters: DeadLetters | None, turn: threading.Lock) -> None:
        self._route = route
        self._letters = letters
        self._turn = turn

    def is_busy(self) -> bool:
        return self._turn.locked()

    async def close(self) -> None:
        await self._route.close()
        if self._letters is not None:
            await self._letters.close()


class DriverSink:
    """Takes each micro-batch of a streaming query, or a whole DataFrame, through a queue to a handler or sink.

    A call returns when all rows are handled, and raises if one was not, with the handler's own error in the message.
    Into a sink with transactions (`SqliteSink`) each micro-batch goes exactly once, whatever is killed when; elsewhere
    at least once. It may be pickled before its first call, as Spark Connect does.

    Example:
        >>> async def handle(rows: list[dict[str, int]]) -> None: ...
        >>> DriverSink("rows", consumer=handle, rows_in_flight=1_000)
        <DriverSink 'rows', rows='dict'>

    Use it so::

        to_sqlite = DriverSink("rows", sink=SqliteSink("out.db"))
        stream.writeStream.foreachBatch(to_sqlite).option("checkpointLocation", "checkpoint").start()
        DriverSink("rows", consumer=handle)(frame)
    """

    def __init__(
        self,
        name: str,
        config: QueueConfig[Any] | None = None,
        *,
        consumer: Handler[Any] | None = None,
        handlers: Mapping[type, Handler[Any] | Sink] | None = None,
        sink: Sink | None = None,
        rows: Rows | None = None,
        rows_in_flight: int = 100_000,
        bytes_in_flight: int = BYTES_IN_FLIGHT,
        ledger: str | os.PathLike[str] | None = None,
        source: str | None = None,
        key: str | list[str] | tuple[str, ...] | None = None,
        collect_bytes: int = COLLECT_BYTES,
        retry: RetryPolicy | None = RETRY,
        on_bad_row: str = "fail",
        dead_letters: str | os.PathLike[str] | Sink | None = None,
        non_finite: NonFinite | None = None,
        append_any_mode: bool = False,
    ) -> None:
        """Say where rows go, and how; exactly one of `consumer`, `handlers` and `sink` is given.

        Args:
            name: the queue's name. Sinks with `handlers` share the queue of that name, the others have their own.
            config: the queue's configuration; sizes above what `rows_in_flight` allows are lowered.
            consumer: takes all rows.
            handlers: a handler or sink for each type of item; the one for the type of `rows` is used.
            sink: takes all rows, in a transaction for each batch where it has them.
            rows: what an item is: "dict", "tuple", "batch" (an Arrow record batch), or a struct or dataclass type.
                None takes record batches for the SQLite, JSON lines and PostgreSQL sinks, and dicts for others.
            rows_in_flight: the most rows that are in this process and not yet handled.
            bytes_in_flight: the most bytes of Arrow data that they are made from.
            ledger: a file that remembers which batches were delivered, for where a transaction can't.
            source: names what the batches are of, where Spark Connect does not say it; it belongs to one checkpoint.
            key: what the key of each record is made of, for sinks that take keys: names of columns; None for the
                content of the row; "position" for its place, where the query sorts its rows.
            collect_bytes: up to this size a batch is collected in one job, above it a few partitions at a time.
            retry: when a batch whose destination is away is sent again; None fails it at once.
            on_bad_row: "fail" fails the batch; "dead_letter" gives rows that can't be delivered to `dead_letters`.
            dead_letters: a sink, or a path for JSON lines, of records with `sink`, `batch`, `reason` and `row`.
            non_finite: what becomes of NaN and infinity: "keep", "null" or "fail"; None keeps them, but for the SQLite
                and JSON lines sinks, which have no form for them: there they become null, and are counted in the log.
            append_any_mode: append the results of queries in Update and Complete mode too, each time they change. Else
                a result in Complete mode takes the place of the one before, and in Update mode rows are upserted.
        """
        owner = f"DriverSink {name!r}"
        rows = default_rows(sink) if rows is None else rows
        check_rows(rows)
        if [consumer, handlers, sink].count(None) != 2:  # noqa: PLR2004 - three ways, one of them given
            raise ConfigError(f"{owner}: give exactly one of consumer, handlers and sink")
        self.name = name
        self.rows: Rows = rows
        self.rows_in_flight = rows_in_flight
        self._target: Any = consumer if consumer is not None else sink
        self._kind: type | None = None
        if handlers is not None:
            self._kind, self._target = self._handler_for(handlers)
        self._check_target(consumer, sink)
        base = config or QueueConfig[Any]()
        if base.consumer is not None:
            raise ConfigError(f"{owner}: config.consumer is given; give it as DriverSink(..., consumer=)")
        self._key_by: KeyBy = check_key_by(owner, key)
        if self._key_by == "position" and self._kind is None:  # with handlers, a type's calls never overlap
            check_order(owner, self._target, base)
        self._config = base
        self._bytes_in_flight = bytes_in_flight
        self._make_sizes()
        self._ledger_path = ledger
        self._source = source
        self._collect_bytes = collect_bytes
        self._retry = retry
        self._letters = dead_letters_at(owner, on_bad_row, dead_letters, self._target)
        self._non_finite: NonFinite = default_non_finite(self._target) if non_finite is None else non_finite
        check_non_finite(owner, self._non_finite)
        self._append_any_mode = append_any_mode
        self._clear()

    def _make_sizes(self) -> Sizes:
        whole = self.rows == "batch"
        return Sizes(self.name, self._config, self.rows_in_flight, whole=whole, bytes_in_flight=self._bytes_in_flight)

    def _clear(self) -> None:
        self._turn = threading.Lock()
        self._process_bridge: SyncBridge | None = None
        self._stats = DriverStats()
        self._sizes = self._make_sizes()
        self._chunk: type[Chunk] = Chunk if self._kind is None else chunk_of(self._item_type)
        self._converter = Converter(self.rows, target=self._target, non_finite=self._non_finite)
        self._convert: Callable[..., list[Any]] = self._converter
        self._route: Route = route_to(self._target)
        self._queue: SyncQueue[Any]
        self._ledger: Ledger
        self._notes: Notes
        self._collector = Collector(self.name, self._collect_bytes)
        self._claimed: set[WriteSource] = set()
        self._at_exit = _AtExit(self._route, self._letters, self._turn)
        self._last: MicroBatch | None = None
        self._replaced: tuple[tuple[str | None, int], BatchKey] | None = None
        self._jobs = 0
        self._job_source = f"job-{uuid.uuid4().hex}"
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread may be writing, which stayed in the parent with all that is open there."""
        self._turn = threading.Lock()
        self._at_exit = _AtExit(self._route, self._letters, self._turn)
        self._process_bridge = self._last = None
        self._job_source = f"job-{uuid.uuid4().hex}"

    @property
    def _owner(self) -> str:
        return f"DriverSink {self.name!r}"

    @property
    def _has_own_notes(self) -> bool:
        """Whether the notes of what is in are the target's own, and no other sink's: those of a table."""
        return isinstance(self._target, SqliteSink) or is_postgres(self._target)

    @property
    def _destination(self) -> str:
        """What the places of writes are counted by: sinks that share notes and keys share places too."""
        if not self._has_own_notes:
            return f"sink {self.name}"
        path = self._target.path.resolve() if isinstance(self._target, SqliteSink) else ""
        return f"table {self._target.table} {path}"

    @property
    def _item_type(self) -> type:
        return self.rows if isinstance(self.rows, type) else _ITEM_TYPES.get(self.rows, object)

    def _handler_for(self, handlers: Mapping[type, Any]) -> tuple[type, Any]:
        kind = self._item_type
        for base in kind.__mro__:
            if base in handlers:
                return base, handlers[base]
        raise ConfigError(
            f"{self._owner}: handlers={[each.__qualname__ for each in handlers]} has none for the items "
            f"that rows={self.rows!r} makes; add one for {kind.__qualname__}, or for object"
        )

    def _check_target(self, consumer: object, sink: object) -> None:
        if sink is not None and not isinstance(sink, Sink):
            raise ConfigError(f"{self._owner}: sink={sink!r} is not a sink; it needs async open, send and close")
        require(self._owner, "consumer", consumer, HandlerRule(optional=True))

    # -- one batch -----------------------------------------------------------------------------------------------

    def __call__(self, frame: Any, batch_id: int | None = None, *, part: str | None = None) -> None:
        """Deliver a DataFrame; one with a `batch_id`, as `foreachBatch` gives it, may be a repetition and be skipped.

        A function for `foreachBatch` may make several calls, of one sink or many; each is a write of its own, known by
        its place among those into the same destination. `part` names it instead, for calls that are made at once or not
        in each batch.

        Raises:
            DeliveryError: a handler or sink failed; nothing of the batch is in a transactional sink.
            ConfigError: exactly once was asked for, and nothing names the query, or another one has the name.
        """
        run = QueryRun(outside=True) if batch_id is None else current_run(frame)
        self._check_mode(run)
        source = source_of(run.query, self._source)
        place = None
        if batch_id is not None and part is None:
            query = run.query or self._source or ""
            place = places.take(run, query, batch_id, self, self.name, into=self._destination)
        written = False
        try:
            with self._turn:  # a query that was stopped may still be in here when its successor comes
                self._start()
                self._write(
                    frame, run, source, self._key(source, batch_id, place, part), repeatable=batch_id is not None
                )
            written = True
        finally:
            if place is not None:
                place.release(written=written)

    def _check_mode(self, run: QueryRun) -> None:
        if run.mode not in {"Update", "Complete"} or not isinstance(self._target, Sink) or self._append_any_mode:
            return
        if self._replaces(run):
            return
        if run.mode == "Complete" or not getattr(self._target, "upsert_on", None):
            way_out = "outputMode('update') and a sink with" if run.mode == "Complete" else "a sink with"
            raise ConfigError(
                f"{self._owner}: the query's output mode is {run.mode}, and "
                f"{type(self._target).__qualname__} would append each result again whenever it changes; use "
                f"outputMode('append') with a watermark, {way_out} upsert_on=[...], a handler that replaces rows, or "
                "append_any_mode=True to append them nevertheless"
            )

    def _replaces(self, run: QueryRun) -> bool:
        """Whether each batch is the whole result, which takes the place of the one before."""
        return run.mode == "Complete" and not self._append_any_mode and replaces(self._target)

    def _check_once(self, run: QueryRun, key: BatchKey) -> None:
        """A batch that is the whole result has one write into a table."""
        batch = (run.query, key.number)
        before, self._replaced = self._replaced, (batch, key)
        if before is not None and before[0] == batch and before[1] != key:
            raise ConfigError(
                f"{self._owner}: the query's output mode is Complete, so that this call would remove what another one "
                f"wrote for batch {key.number}; write the batch by one call, as by unionByName, or into several tables"
            )

    def _key(
        self, source: WriteSource | None, batch_id: int | None, place: Place | None, part: str | None
    ) -> BatchKey | None:
        if batch_id is None:  # a batch job: each call is a batch of its own
            self._jobs += 1
            return BatchKey(self._job_source, self._jobs)
        certain = self._route.transactional or self._ledger_path is not None
        if source is None:
            if certain:
                raise ConfigError(
                    f"{self._owner}: nothing names the query (Spark Connect does not tell its id), so a "
                    "repeated batch could not be known; give DriverSink(..., source='a name of the query')"
                )
            return None
        number = 0 if place is None else place.number
        if number is None:
            if certain:
                raise ConfigError(
                    f"{self._owner}: batch {batch_id} is written by several calls at once, whose order is not the same "
                    "in a repetition; name each by sink(frame, batch_id, part='a name'), or make one after the other"
                )
            return None
        return write_key(source, batch_id, number, part, sink="" if self._has_own_notes else self.name)

    def _write(
        self, frame: Any, run: QueryRun, source: WriteSource | None, key: BatchKey | None, *, repeatable: bool
    ) -> None:
        started = time.perf_counter()
        check_columns(self._owner, getattr(frame, "columns", ("unknown",)), self.rows, self._target)
        noted = source if repeatable and key is not None else None
        try:
            if noted is not None and key is not None and self._is_in(noted, key):
                # State and watermark of the query go on only if the batch is computed.
                rows = sum(batch.num_rows for batch in self._collector.batches(frame, ordered=False))
                self._skipped(run, key, rows, started)
                return
            rows, fresh = self._deliver(frame, run, noted, key)
        except BaseException:
            self._stats = replace(self._stats, failed=self._stats.failed + 1)
            raise
        if noted is not None and key is not None and not self._route.transactional:
            self._ledger.note(key)
        if fresh:
            self._count(started, batches=1, rows=rows)
        elif key is not None:
            self._skipped(run, key, rows, started)

    def _is_in(self, source: WriteSource, key: BatchKey) -> bool:
        """Whether a ledger says that the write is in; a sink with transactions says so itself, later."""
        call = host.bridge().call
        if source not in self._claimed:
            call(claim_source, self._owner, self._notes, source)
            self._claimed.add(source)
        if self._route.transactional or not call(self._notes.has, key):
            return False
        call(check_repetition, self._owner, self._notes, source, key)
        return True

    def _deliver(self, frame: Any, run: QueryRun, source: WriteSource | None, key: BatchKey | None) -> tuple[int, bool]:
        """Take all rows through the queue; how many there were, and whether they were not in before."""
        # Without the sink's name in it, which is said already: a message is shortened where it is shown.
        shown = None if key is None else key._replace(source=key.source.partition("/to-")[0])
        what = f"{self._owner}: batch {shown}"
        retries = Retries(Patience(self._retry, run.is_stopped, self._config.handler_timeout))
        bad = None if self._letters is None else BadRows(self.name, str(key), self._letters)
        names = getattr(frame, "columns", None)
        schema = self._table_schema(frame)
        replace_all = key is not None and self._replaces(run)
        if replace_all and key is not None:
            self._check_once(run, key)
        while True:
            keys = RecordKeys(key, self._key_by, names) if self._route.keyed and key is not None else None
            options: dict[str, Any] = {"retries": retries, "bad": bad, "schema": schema, "replace": replace_all}
            batch = self._last = MicroBatch(what, self._route, key, keys=keys, **options)
            try:
                fed = self._feed(frame, batch, source, bad)
                fresh = host.bridge().call(batch.commit)
            except BaseException as error:
                self._end_last()
                if not isinstance(error, Exception) or not self._again(what, batch, error, retries):
                    raise
                continue
            finally:
                self._stats = replace(self._stats, retried=self._stats.retried + retries.take_count())
            self._last = None
            if bad is not None:
                self._stats = replace(self._stats, dead_rows=self._stats.dead_rows + bad.count)
            return fed.rows, fresh

    def _table_schema(self, frame: Any) -> Any:
        """What the destination is to make its table by; None where it makes none, or by values."""
        schema = getattr(frame, "schema", None)
        if schema is None:
            return None
        found = arrow_schema(self._owner, schema)
        return table_schema(found, self.rows, self._target) if self._route.declares else None

    def _feed(self, frame: Any, batch: MicroBatch, source: WriteSource | None, bad: BadRows | None) -> Fed:
        def check() -> None:
            if batch.repeated and source is not None and batch.key is not None:
                host.bridge().call(check_repetition, self._owner, self._notes, source, batch.key)

        before = self._converter.non_finite
        convert = self._convert
        if bad is not None:
            bad.begin_attempt()
            convert = partial(self._convert, refuse=bad.refuse)
        ordered = self._route.keyed and self._key_by == "position"
        found = self._collector.batches(frame, ordered=ordered)
        fed = Feeder(self._queue, host.bridge(), self._sizes, self._chunk).feed(batch, found, convert, check)
        if self._converter.non_finite > before:
            log.warning(
                "spark_values_not_finite", sink=self.name, batch=batch.what, nulls=self._converter.non_finite - before
            )
        return fed

    def _again(self, what: str, batch: MicroBatch, error: Exception, retries: Retries) -> bool:
        """Whether to take all rows once more, after a wait."""
        cause = batch.failure if isinstance(error, DeliveryError) else error
        if isinstance(cause, RepeatBatchError):
            return True
        if not self._route.transactional or not isinstance(error, DeliveryError | RetryableError):
            return False
        return (
            isinstance(cause, Exception)
            and self._route.may_pass(cause)
            and host.bridge().call(retries.wait_after, what, cause)
        )

    def _end_last(self) -> None:
        """Undo what a batch before left, if its own end was interrupted too."""
        if self._last is not None:
            with suppress(QueueClosedError):  # then its loop is gone, and with it the connection
                host.bridge().call(self._last.rollback)
            self._last = None

    def _skipped(self, run: QueryRun, key: BatchKey, rows: int, started: float) -> None:
        log.warning("spark_batch_skipped", sink=self.name, batch=str(key), rows=rows, reason=IS_IN)
        skipped_writes.add(run.query, rows)
        self._count(started, skipped=1, skipped_rows=rows)

    def _count(self, started: float, **counts: int) -> None:
        stats, seconds = self._stats, time.perf_counter() - started
        added = {name: getattr(stats, name) + count for name, count in counts.items()}
        self._stats = replace(stats, seconds=stats.seconds + seconds, path=self._collector.path, **added)
        log.debug("spark_batch_done", sink=self.name, seconds=round(seconds, 3), **counts)

    # -- beginning and end ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        bridge = host.bridge()
        if self._process_bridge is bridge:
            self._end_last()
            bridge.call(self._route.open)
            return
        self._last = None
        self._ledger = ledger_at(self._ledger_path)
        self._notes = TransactionNotes(self._route) if self._route.transactional else LedgerNotes(self._ledger)
        if self._kind is None:
            self._queue = host.free_queue(self.name, replace(self._sizes.queue, consumer=handle_chunks))
        else:
            self._queue = host.shared_queue(self.name, self._sizes.queue, self._item_type, self)
            self._queue.add_handler(self._chunk, handle_chunks)
        try:
            bridge.call(self._route.open)
        except BaseException:
            self._leave_queue()
            raise
        self._process_bridge = bridge
        host.close_at_exit(self._at_exit)

    def _leave_queue(self) -> None:
        host.leave_queue(self._queue.name, None if self._kind is None else self._item_type)

    def stats(self) -> DriverStats:
        """What was done so far; may be asked from any thread, while a batch is under way too."""
        if self._process_bridge is None:
            return self._stats
        return replace(self._stats, queue=self._queue.stats())

    def close(self) -> None:
        """Close the sink, and the queue unless others share it; a later call starts anew."""
        with self._turn:
            bridge, self._process_bridge = self._process_bridge, None
            host.closed(self._at_exit)
            if bridge is None:
                return
            if bridge is host.bridge():
                self._end_last()
                self._leave_queue()
            host.bridge().call(self._route.close)
            if self._letters is not None:
                host.bridge().call(self._letters.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ["name", "rows", "rows_in_flight", "_target", "_kind", "_config", "_key_by", "_bytes_in_flight"]
        kept += ["_ledger_path", "_source", "_collect_bytes", "_retry", "_letters", "_non_finite", "_append_any_mode"]
        return {each: getattr(self, each) for each in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()

    def __repr__(self) -> str:
        return f"<DriverSink {self.name!r}, rows={getattr(self.rows, '__qualname__', self.rows)!r}>"
