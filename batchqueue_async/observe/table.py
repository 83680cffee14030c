"""The one table of metrics: Prometheus, OpenTelemetry and the reference page are made from it.

A new component adds a `Component` and its rows here, and its views to the snapshot; nothing else knows the names. There
is no label for a partition, a type or a key: their number has no bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from batchqueue_async.observe.metric import Component, Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchqueue_async.durable.stats import DurableStats
    from batchqueue_async.observe.snapshot import (
        BridgeView,
        ConsumerView,
        DiskView,
        ExporterView,
        LoopView,
        ProcessSnapshot,
        QueueView,
        SparkQueryView,
    )
    from batchqueue_async.queue.stats import HandlerStats


View_co = TypeVar("View_co", covariant=True)

QUEUE = Component(name="queue", views=lambda each: each.queues, labels=(("queue", lambda view: view.name),))
EXPORTER = Component(
    name="exporter",
    views=lambda each: each.exporters,
    labels=(("exporter", lambda view: view.name), ("sink", lambda view: view.sink)),
)
DISK = Component(name="disk", views=lambda each: each.disks, labels=(("exporter", lambda view: view.name),))
BRIDGE = Component(name="bridge", views=lambda each: each.bridges, labels=(("bridge", lambda view: view.name),))
LOOP = Component(name="loop", views=lambda each: each.loops, labels=(("loop", lambda view: view.name),))
SPARK = Component(
    name="Spark query",
    views=lambda each: each.queries,
    labels=(("pipeline", lambda view: view.pipeline), ("query", lambda view: view.name)),
)
CONSUMER = Component(
    name="consumer",
    views=lambda each: each.consumers,
    labels=(("consumer", lambda view: view.name), ("kind", lambda view: view.kind)),
)
PROCESS = Component(name="process", views=lambda each: (each,), labels=())

BREAKER_STATES = ("closed", "open", "half_open")
FAILURES = (
    *("throttled", "timeout", "refused", "network", "server", "auth"),
    *("config", "too_large", "permanent", "retryable", "unexpected"),
)
"""The kinds of failed sends that the library names."""


class _Row(Protocol[View_co]):
    """Makes a metric of the views of one kind."""

    def __call__(
        self,
        kind: Kind,
        what: str,
        unit: str,
        text: str,
        read: Callable[[View_co], Any],
        *,
        by: str | None = None,
        first: int = -14,
        last: int = 9,
    ) -> Metric: ...


def _rows(component: Component, area: str) -> _Row[Any]:
    def row(
        kind: Kind,
        what: str,
        unit: str,
        text: str,
        read: Callable[[Any], Any],
        *,
        by: str | None = None,
        first: int = -14,
        last: int = 9,
    ) -> Metric:
        return Metric(
            area=area,
            what=what,
            unit=unit,
            kind=kind,
            of=component,
            help=text,
            read=read,
            by=by,
            first=first,
            last=last,
        )

    return row


def _outcomes(view: QueueView) -> dict[str, int]:
    stats = view.stats
    return {
        "handled": stats.handled,
        "failed": stats.failed,
        "unhandled": stats.unhandled,
        "dropped": stats.dropped_after,
        "undelivered": stats.undelivered,
    }


def _rejected(view: QueueView) -> dict[str, int]:
    return {"refused": view.stats.refused, "dropped": view.stats.dropped_before}


def _fullest(view: QueueView) -> float:
    return max((each.used_ratio for each in view.stats.partitions), default=0.0)


def _handlers(read: Callable[[HandlerStats], Any]) -> Callable[[QueueView], Mapping[str, Any]]:
    """By handler; two of one name, as of types that are called alike, count as one where that can be."""

    def by_handler(view: QueueView) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for each in view.stats.handlers:
            value = read(each)
            if each.name not in found:
                found[each.name] = value
            elif isinstance(value, int):
                found[each.name] += value
        return found

    return by_handler


def _dropped(view: ExporterView) -> dict[str, int]:
    stats = view.stats
    return dict.fromkeys(("oldest", "newest", "max_age", "too_large"), 0) | {
        **stats.dropped,
        "refused": stats.refused,
        "failover": stats.failover_evicted,
    }


def _dead(view: ExporterView) -> dict[str, int]:
    """By kind, and what an earlier count does not explain, as "other", so that the kinds add up to the whole."""
    # A series has to begin at 0: Prometheus does not see the value that it begins with as an increase.
    kinds = dict.fromkeys(("PermanentError", "TooLargeError", "exhausted"), 0) | dict(view.stats.dead_kinds)
    if other := view.stats.dead_lettered - sum(kinds.values()):
        kinds["other"] = max(0, other)
    return kinds


def _sends(view: ExporterView) -> dict[str, int]:
    stats = view.stats
    return {"delivered": stats.delivered_batches, **dict.fromkeys(FAILURES, 0), **dict(stats.failures)}


def _retries(view: ExporterView) -> dict[str, int]:
    stats = view.stats
    return {"delivered": stats.retry_successes, **dict(stats.retry_failures)}


def _eta(view: ExporterView) -> float | None:
    return None if view.rates is None else view.rates.empty_in(view.stats.records)


def _breaker(view: ExporterView) -> dict[str, int]:
    return {state: int(state == view.stats.breaker) for state in BREAKER_STATES}


def _settled(view: ConsumerView) -> dict[str, int]:
    stats = view.stats
    return {name: getattr(stats, name) for name in ("acked", "retried", "dead_lettered", "released", "stale")}


def _disk(read: Callable[[DurableStats], Any]) -> Callable[[DiskView], Any]:
    return lambda view: read(view.stats)


_queue: _Row[QueueView] = _rows(QUEUE, "queue")
_handler: _Row[QueueView] = _rows(QUEUE, "handler")
_exporter: _Row[ExporterView] = _rows(EXPORTER, "exporter")
_on_disk: _Row[DiskView] = _rows(DISK, "disk")
_bridge: _Row[BridgeView] = _rows(BRIDGE, "bridge")
_loop: _Row[LoopView] = _rows(LOOP, "loop")
_spark: _Row[SparkQueryView] = _rows(SPARK, "spark")
_intake: _Row[ConsumerView] = _rows(CONSUMER, "intake")
_process: _Row[ProcessSnapshot] = _rows(PROCESS, "")

METRICS: tuple[Metric, ...] = (
    _queue("counter", "accepted", "items", "Items taken in.", lambda q: q.stats.accepted),
    _queue("counter", "finished", "items", "Items that were taken in and have an outcome.", _outcomes, by="outcome"),
    _queue("counter", "rejected", "items", "Items that were not taken in.", _rejected, by="reason"),
    _queue("gauge", "waiting", "items", "Items waiting in partitions.", lambda q: q.stats.used),
    _queue("gauge", "capacity", "items", "Items that all partitions can hold.", lambda q: q.stats.capacity),
    _queue(
        "gauge",
        "waiting",
        "bytes",
        "Bytes of the waiting items, where they are bounded.",
        lambda q: q.stats.used_bytes if q.stats.capacity_bytes is not None else None,
    ),
    _queue(
        "gauge",
        "capacity",
        "bytes",
        "Bytes that all partitions can hold, where they are bounded.",
        lambda q: q.stats.capacity_bytes,
    ),
    _queue("gauge", "in_flight", "items", "Items whose handler call has not ended.", lambda q: q.stats.in_flight),
    _queue(
        "gauge", "oldest_item_age", "seconds", "Age of the oldest waiting item, at most.", lambda q: q.stats.oldest_age
    ),
    _queue("gauge", "fullest_partition", "ratio", "Fill of the fullest partition, 0 to 1.", _fullest),
    _queue(
        "gauge",
        "waiting_producers",
        "",
        "Producers waiting for room.",
        lambda q: sum(each.waiting for each in q.stats.partitions),
    ),
    _queue(
        "gauge",
        "workers_busy",
        "",
        "Workers with items in a handler call.",
        lambda q: sum(each.in_flight > 0 for each in q.stats.workers),
    ),
    _queue("gauge", "workers", "", "Workers.", lambda q: len(q.stats.workers)),
    _queue(
        "counter",
        "bridge_wake_ups",
        "",
        "Times that threads woke the loop for what they had put in.",
        lambda q: q.stats.wake_ups,
    ),
    _queue(
        "histogram",
        "wait",
        "seconds",
        "Time from produce to the handler call, of the oldest item per round.",
        lambda q: q.stats.queue_latency,
    ),
    _queue("histogram", "batch", "items", "Items per handler call.", lambda q: q.stats.batch_sizes, first=0, last=14),
    _handler("histogram", "", "seconds", "Time of one handler call.", _handlers(lambda h: h.durations), by="handler"),
    _handler(
        "counter",
        "failed",
        "items",
        "Items of calls that failed or timed out.",
        _handlers(lambda h: h.failed),
        by="handler",
    ),
    _loop("gauge", "lag", "seconds", "Seconds by which the event loop is late.", lambda loop: loop.lag),
    _exporter("counter", "accepted", "records", "Records that the send queue took in.", lambda e: e.stats.accepted),
    _exporter(
        "counter",
        "recovered",
        "records",
        "Records that were on disk when the exporter was opened.",
        lambda e: e.stats.recovered,
    ),
    _exporter("counter", "delivered", "records", "Records that the sink took.", lambda e: e.stats.delivered),
    _exporter("counter", "delivered", "bytes", "Their bytes.", lambda e: e.stats.delivered_bytes),
    _exporter(
        "counter",
        "skipped",
        "records",
        "Delivered records that the destination had already.",
        lambda e: e.stats.skipped,
    ),
    _exporter(
        "counter", "dropped", "records", "Records that were dropped or refused, by reason.", _dropped, by="reason"
    ),
    _exporter(
        "counter", "dead_letter", "records", "Records that were given up, by the class of the error.", _dead, by="kind"
    ),
    _exporter("gauge", "undelivered", "records", "Records in the report of a shutdown.", lambda e: e.stats.undelivered),
    _exporter("counter", "sends", "", "Sends, by result: delivered, or the kind of error.", _sends, by="result"),
    _exporter("counter", "retries", "", "Batches that were sent again and answered, by result.", _retries, by="result"),
    _exporter(
        "counter", "splits", "", "Batches that were halved because they were too large.", lambda e: e.stats.splits
    ),
    _exporter(
        "counter", "isolations", "", "Batches that were divided to find what is refused.", lambda e: e.stats.isolations
    ),
    _exporter("histogram", "send", "seconds", "Time until the sink had answered.", lambda e: e.stats.send_seconds),
    _exporter(
        "gauge",
        "send_queue",
        "records",
        "Records in the send queue, those under way included.",
        lambda e: e.stats.records,
    ),
    _exporter(
        "gauge", "send_queue", "bytes", "Their bytes; on disk those of the whole directory.", lambda e: e.stats.bytes
    ),
    _exporter(
        "gauge", "send_queue_limit", "bytes", "The bound on the bytes of the send queue.", lambda e: e.stats.max_bytes
    ),
    _exporter(
        "gauge",
        "send_queue_limit",
        "records",
        "The bound on the records of the send queue, where there is one.",
        lambda e: e.stats.max_records,
    ),
    _exporter(
        "gauge",
        "send_queue_fill",
        "ratio",
        "Fill of the send queue, 0 to 1, by the fuller bound.",
        lambda e: e.stats.utilization,
    ),
    _exporter("gauge", "failover", "records", "Records in the failover queue.", lambda e: e.stats.failover_records),
    _exporter(
        "gauge",
        "oldest_record_age",
        "seconds",
        "Age of the oldest record in the send queue, at most.",
        lambda e: e.stats.oldest_age,
    ),
    _exporter(
        "gauge",
        "last_success",
        "timestamp_seconds",
        "When the sink last answered a send.",
        lambda e: e.stats.last_success_at,
    ),
    _exporter(
        "gauge", "last_error", "timestamp_seconds", "When the last send failed.", lambda e: e.stats.last_error_at
    ),
    _exporter(
        "gauge", "breaker_state", "", "1 for the state of the circuit breaker, 0 for the others.", _breaker, by="state"
    ),
    _exporter("counter", "breaker_opens", "", "Times that the breaker opened.", lambda e: e.stats.breaker_opens),
    _exporter(
        "counter", "breaker_rejections", "", "Sends that the breaker kept back.", lambda e: e.stats.breaker_rejected
    ),
    _exporter(
        "gauge",
        "paused",
        "",
        "1 while the destination refuses the credentials or they can't be read.",
        lambda e: int(e.stats.paused),
    ),
    _exporter("counter", "pauses", "", "Times that it was paused.", lambda e: e.stats.pauses),
    _exporter(
        "gauge",
        "stuck_records",
        "",
        "Records that fail again and again with errors of unknown classes.",
        lambda e: e.stats.stuck,
    ),
    _exporter(
        "gauge", "backoff", "seconds", "How long the batch that failed last is put off.", lambda e: e.stats.backoff
    ),
    _exporter(
        "gauge",
        "next_send",
        "seconds",
        "Seconds until anything may be sent again; 0 while nothing keeps it.",
        lambda e: e.stats.next_send_in,
    ),
    _exporter("gauge", "preparers_active", "", "Batches that are being prepared.", lambda e: e.stats.preparers_active),
    _exporter("gauge", "workers_active", "", "Batches under way.", lambda e: e.stats.workers_active),
    _exporter("gauge", "workers", "", "Batches that may be under way.", lambda e: e.stats.workers_total),
    _exporter(
        "gauge", "sends_in_flight", "", "Sends that the sink has not answered.", lambda e: e.stats.sends_in_flight
    ),
    _exporter(
        "gauge",
        "learned_rate",
        "",
        "Sends per second that the destination seems to take, where it refused some.",
        lambda e: e.stats.learned_rate,
    ),
    _exporter(
        "gauge",
        "drain_eta",
        "seconds",
        "Seconds until the send queue is empty at present rates; infinite when it grows.",
        _eta,
    ),
    _exporter("counter", "disk_full", "", "Calls that met a full disk or quota.", lambda e: e.stats.disk_full),
    _on_disk("gauge", "", "bytes", "Bytes of everything in the directory.", _disk(lambda d: d.disk_bytes)),
    _on_disk("gauge", "limit", "bytes", "The quota, where there is one.", _disk(lambda d: d.max_bytes)),
    _on_disk("gauge", "free", "bytes", "Bytes that the file system has left.", _disk(lambda d: d.free_bytes)),
    _on_disk("gauge", "", "records", "Records that are written and not settled.", _disk(lambda d: d.records)),
    _on_disk("gauge", "segments", "", "Segment files.", _disk(lambda d: d.segments)),
    _on_disk("histogram", "sync", "seconds", "Time of one sync.", _disk(lambda d: d.sync_seconds)),
    _on_disk("counter", "put", "records", "Records written.", _disk(lambda d: d.put)),
    _on_disk("counter", "put", "bytes", "Their payload bytes.", _disk(lambda d: d.put_bytes)),
    _on_disk("counter", "acked", "records", "Records acknowledged.", _disk(lambda d: d.acked)),
    _on_disk(
        "counter",
        "dropped",
        "records",
        "Records dropped, by reason.",
        _disk(lambda d: dict.fromkeys(("oldest", "newest", "max_age"), 0) | dict(d.dropped)),
        by="reason",
    ),
    _on_disk("counter", "damaged", "records", "Records whose bytes are wrong.", _disk(lambda d: d.damaged)),
    _on_disk(
        "gauge", "unreadable", "records", "Records that could not be read in this run.", _disk(lambda d: d.unreadable)
    ),
    _on_disk(
        "counter", "dead_letter", "records", "Records moved to the dead letters.", _disk(lambda d: d.dead_lettered)
    ),
    _on_disk(
        "counter",
        "errors",
        "",
        "Failed writes and syncs, and writes that met a full disk, by kind.",
        _disk(lambda d: {"write": d.write_errors, "sync": d.sync_errors, "full": d.disk_full}),
        by="kind",
    ),
    _on_disk(
        "counter", "compacted", "bytes", "Room that was given back by compaction.", _disk(lambda d: d.compacted_bytes)
    ),
    _bridge("gauge", "running", "", "1 while the bridge's loop runs.", lambda b: int(b.stats.running)),
    _bridge("gauge", "queues", "", "Queues of the bridge's manager.", lambda b: len(b.stats.queues)),
    _intake(
        "counter",
        "received",
        "messages",
        "Messages taken from the broker, repetitions included.",
        lambda c: c.stats.received,
    ),
    _intake("counter", "settled", "messages", "Messages that have an outcome.", _settled, by="outcome"),
    _intake(
        "gauge",
        "waiting",
        "messages",
        "Messages that wait for a handler or for their next attempt.",
        lambda c: c.stats.buffered + c.stats.waiting,
    ),
    _intake(
        "gauge",
        "in_flight",
        "messages",
        "Messages with a handler, or not yet acknowledged.",
        lambda c: c.stats.in_flight,
    ),
    _intake("gauge", "held", "bytes", "Bytes of all messages that are held.", lambda c: c.stats.held_bytes),
    _intake("gauge", "lag", "messages", "Messages that wait at the broker, if that is known.", lambda c: c.stats.lag),
    _intake("gauge", "workers", "", "Handlers that may run at once.", lambda c: c.stats.workers),
    _intake("gauge", "prefetch", "messages", "Messages that may be held.", lambda c: c.stats.prefetch),
    _intake(
        "gauge",
        "oldest_in_flight",
        "seconds",
        "Time that the longest handler call has taken so far.",
        lambda c: c.stats.oldest_in_flight,
    ),
    _intake(
        "counter",
        "failures",
        "",
        "Calls of the handler, or messages of a batch, that failed.",
        lambda c: c.stats.failures,
    ),
    _intake(
        "counter",
        "errors",
        "",
        "Acknowledgements and forwards that failed.",
        lambda c: {"settle": c.stats.settle_errors, "forward": c.stats.forward_errors},
        by="error",
    ),
    _intake("counter", "lost", "messages", "Messages that the broker has no longer.", lambda c: c.stats.lost),
    _intake(
        "counter",
        "redelivered",
        "messages",
        "Messages received that came again, as far as the broker says.",
        lambda c: c.stats.redelivered,
    ),
    _intake("counter", "reconnects", "", "Sessions after the first.", lambda c: c.stats.reconnects),
    _intake(
        "counter",
        "rebalances",
        "",
        "Times that a group took partitions away, to share them out anew.",
        lambda c: c.stats.rebalances,
    ),
    _intake("counter", "commits", "", "Commits of offsets that the broker took.", lambda c: c.stats.commits),
    _intake(
        "gauge",
        "running",
        "",
        "1 while messages are taken and handled.",
        lambda c: int(c.stats.state == "running" and not c.stats.paused_for),
    ),
    _spark("counter", "batches", "", "Micro-batches with rows.", lambda s: s.progress.batches),
    _spark("counter", "rows", "", "Rows read.", lambda s: s.progress.rows),
    _spark("counter", "written", "rows", "Rows that sinks in the driver delivered.", lambda s: s.progress.written),
    _spark("counter", "dead", "rows", "Rows given to the dead letters.", lambda s: s.progress.dead),
    _spark("counter", "late", "rows", "Rows behind the watermark, dropped by Spark.", lambda s: s.progress.late),
    _spark("counter", "restarts", "", "Times that the query was started again.", lambda s: s.progress.restarts),
    _spark(
        "gauge", "batch", "seconds", "What the last micro-batch with rows took.", lambda s: s.progress.batch_seconds
    ),
    _spark(
        "gauge",
        "lag",
        "seconds",
        "Time from the start of the last micro-batch to its report.",
        lambda s: s.progress.lag,
    ),
    _spark(
        "gauge",
        "behind",
        "messages",
        "Messages that the source has and the query has not read.",
        lambda s: s.progress.behind,
    ),
    _process(
        "gauge",
        "build_info",
        "",
        "1; the versions of this library and of Python.",
        lambda p: {p.version: 1},
        by="version",
    ),
    _process("gauge", "start_time", "timestamp_seconds", "When the process began to be watched.", lambda p: p.started),
    _process(
        "gauge",
        "config_last_reload_success",
        "",
        "1 where the service's file was taken when it was last read, 0 where it was refused.",
        lambda p: None if p.reload is None else int(p.reload.ok),
    ),
    _process(
        "gauge",
        "config_last_reload_success_timestamp",
        "seconds",
        "When the service's file was last read and taken.",
        lambda p: None if p.reload_taken is None else p.reload_taken.at,
    ),
)
"""Every metric, in the order of the reference page."""
