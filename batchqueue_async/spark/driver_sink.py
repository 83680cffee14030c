"""Rows of a DataFrame through a queue in the driver: `DriverSink`."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from batchqueue_async._support import log
from batchqueue_async._support.checks import HandlerRule, require
from batchqueue_async.config import QueueConfig
from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks.base import BatchKey, Sink
from batchqueue_async.spark import process_bridge
from batchqueue_async.spark.collect import Collector
from batchqueue_async.spark.exporting import route_to
from batchqueue_async.spark.feed import feed
from batchqueue_async.spark.ledger import Ledger, ledger_at
from batchqueue_async.spark.route import Route, check_order
from batchqueue_async.spark.rows import check_rows, converter

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from types import TracebackType

    from batchqueue_async.bridge.sync_queue import SyncQueue
    from batchqueue_async.config import Handler
    from batchqueue_async.queue.stats import QueueStats
    from batchqueue_async.spark.rows import Rows

_ITEM_TYPES: dict[object, type] = {"dict": dict, "tuple": tuple}
COLLECT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DriverStats:
    """What a `DriverSink` has done so far.

    Attributes:
        batches: batches that were delivered.
        rows: rows in them.
        skipped: batches that had been delivered before, as one is after a crash.
        failed: batches that failed.
        seconds: time spent in all of them, Spark's work on them included.
        path: how the last batch came to the driver: "collect" or "stream"; empty before the first.
        queue: the queue's own numbers; None before the first batch.
    """

    batches: int = 0
    rows: int = 0
    skipped: int = 0
    failed: int = 0
    seconds: float = 0.0
    path: str = ""
    queue: QueueStats | None = None


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
        rows: Rows = "dict",
        rows_in_flight: int = 100_000,
        ledger: str | os.PathLike[str] | None = None,
        source: str | None = None,
        collect_bytes: int = COLLECT_BYTES,
    ) -> None:
        """Say where rows go, and how; exactly one of `consumer`, `handlers` and `sink` is given.

        Args:
            name: the queue's name. Sinks with `handlers` share the queue of that name, the others have their own.
            config: the queue's configuration; sizes above what `rows_in_flight` allows are lowered.
            consumer: takes all rows.
            handlers: a handler or sink for each type of item; the one for the type of `rows` is used.
            sink: takes all rows, in a transaction for each batch where it has them.
            rows: what an item is: "dict", "tuple", "batch" (an Arrow record batch), or a struct or dataclass type.
            rows_in_flight: the most rows that are in this process and not yet handled.
            ledger: a file that remembers which batches were delivered, for where a transaction can't.
            source: names what the batches are of; the streaming query's id where None.
            collect_bytes: up to this size a batch is collected in one job, above it partition by partition.
        """
        check_rows(rows)
        if [consumer, handlers, sink].count(None) != 2:  # noqa: PLR2004 - three ways, one of them given
            raise ConfigError(f"DriverSink {name!r}: give exactly one of consumer, handlers and sink")
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
            raise ConfigError(f"DriverSink {name!r}: config.consumer is given; give it as DriverSink(..., consumer=)")
        if self._kind is None:  # with handlers, those of one type come one after the other anyway
            check_order(f"DriverSink {name!r}", self._target, base)
        self._config, self._unit = process_bridge.sized(name, base, rows_in_flight, whole=rows == "batch")
        self._ledger_path = ledger
        self._source = source
        self._collect_bytes = collect_bytes
        self._clear()

    def _clear(self) -> None:
        self._turn = threading.Lock()
        self._started = False
        self._stats = DriverStats()
        self._convert = converter(self.rows)
        self._route: Route
        self._queue: SyncQueue[Any]
        self._ledger: Ledger
        self._collector = Collector(self.name, self._collect_bytes)

    def _handler_for(self, handlers: Mapping[type, Any]) -> tuple[type, Any]:
        kind = self.rows if isinstance(self.rows, type) else _ITEM_TYPES.get(self.rows, object)
        for base in kind.__mro__:
            if base in handlers:
                return base, handlers[base]
        raise ConfigError(
            f"DriverSink {self.name!r}: handlers={[each.__qualname__ for each in handlers]} has none for the items "
            f"that rows={self.rows!r} makes; add one for {kind.__qualname__}, or for object"
        )

    def _check_target(self, consumer: object, sink: object) -> None:
        if sink is not None and not isinstance(sink, Sink):
            raise ConfigError(f"DriverSink {self.name!r}: sink={sink!r} is none: it needs async open, send and close")
        require(f"DriverSink {self.name!r}", "consumer", consumer, HandlerRule(optional=True))

    # -- one batch -----------------------------------------------------------------------------------------------

    def __call__(self, frame: Any, batch_id: int | None = None) -> None:
        """Deliver a DataFrame; one with a `batch_id`, as `foreachBatch` gives it, may be a repetition and be skipped.

        Raises:
            DeliveryError: a handler or sink failed; nothing of the batch is in a transactional sink.
            ConfigError: exactly once was asked for, and nothing names the query.
        """
        with self._turn:  # a query that was stopped may still be in here when its successor comes
            self._start()
            key = self._key(frame, batch_id)
            started = time.perf_counter()
            if batch_id is not None and key is not None and self._ledger.is_delivered(key):
                # State and watermark of the query go on only if the batch is computed.
                frame.write.format("noop").mode("append").save()
                self._count(rows=0, fresh=False, started=started)
                return
            try:
                rows, fresh = self._deliver(frame, key)
            except BaseException:
                self._stats = replace(self._stats, failed=self._stats.failed + 1)
                raise
            if batch_id is not None and key is not None and not self._route.exactly_once:
                self._ledger.note(key)
            self._count(rows, fresh=fresh, started=started)

    def _deliver(self, frame: Any, key: BatchKey | None) -> tuple[int, bool]:
        """Take all rows through the queue; how many there were, and whether they were not in before."""
        route, bridge = self._route, process_bridge.bridge()
        bridge.call(route.begin, key)
        try:
            fed = feed(
                f"DriverSink {self.name!r}: batch {key}",
                self._collector.batches(frame, ordered=route.wants_order),
                queue=self._queue,
                route=route,
                bridge=bridge,
                convert=self._convert,
                unit=self._unit,
            )
            return fed.rows, bridge.call(route.commit)
        except BaseException:
            bridge.call(route.rollback)
            raise

    def _key(self, frame: Any, batch_id: int | None) -> BatchKey | None:
        if batch_id is None:  # a batch job: each call is a batch of its own
            return BatchKey(uuid.uuid4().hex, 0)
        source = self._source or query_id(frame)
        if source is not None:
            return BatchKey(source, batch_id)
        if self._route.exactly_once or self._ledger_path is not None:
            raise ConfigError(
                f"DriverSink {self.name!r}: nothing names the query (Spark Connect does not tell its id), so a "
                "repeated batch could not be known; give DriverSink(..., source='a name of the query')"
            )
        return None

    def _count(self, rows: int, *, fresh: bool, started: float) -> None:
        stats, seconds = self._stats, time.perf_counter() - started
        self._stats = replace(
            stats,
            batches=stats.batches + fresh,
            rows=stats.rows + rows * fresh,
            skipped=stats.skipped + (not fresh),
            seconds=stats.seconds + seconds,
            path=self._collector.path,
        )
        log.debug("spark_batch_done", sink=self.name, rows=rows, skipped=not fresh, seconds=round(seconds, 3))

    # -- beginning and end ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._started:
            return
        self._ledger = ledger_at(self._ledger_path)
        self._route = route_to(self._target)
        process_bridge.bridge().call(self._route.open)
        if self._kind is None:
            self._queue = process_bridge.free_queue(self.name, replace(self._config, consumer=self._route))
        else:
            self._queue = process_bridge.shared_queue(self.name, self._config)
            self._queue.add_handler(self._kind, self._route)
        self._started = True

    def stats(self) -> DriverStats:
        """What was done so far; may be asked from any thread, while a batch is under way too."""
        return replace(self._stats, queue=self._queue.stats()) if self._started else self._stats

    def close(self) -> None:
        """Close the sink, and the queue unless others share it; a later call starts anew."""
        with self._turn:
            if self._started:
                self._started = False
                process_bridge.leave_queue(self._queue.name)
                process_bridge.bridge().call(self._route.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "rows", "rows_in_flight", "_target", "_kind", "_config", "_unit", "_ledger_path", "_source")
        return {each: getattr(self, each) for each in (*kept, "_collect_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()

    def __repr__(self) -> str:
        return f"<DriverSink {self.name!r}, rows={getattr(self.rows, '__qualname__', self.rows)!r}>"


def query_id(frame: Any) -> str | None:
    """The id of the streaming query whose batch this is; None outside of one, and under Spark Connect."""
    with suppress(AttributeError):  # Spark Connect has no SparkContext, and says so by PySparkAttributeError
        found = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        return str(found) if found else None
    return None
