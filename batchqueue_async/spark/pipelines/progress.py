"""What the queries of a pipeline do, as Spark's listener reports it: totals for tables and samples for pictures."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from batchqueue_async._support import log
from batchqueue_async.spark.listener import epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KEPT = 5_000
_RECENT = 20
_REPORTS = 200
"""How many reports of a query are known; Spark keeps the last hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One micro-batch.

    Attributes:
        at: seconds since the pipeline's start, when it was reported.
        query: the query's name.
        rows: rows that it read.
        seconds: what it took.
        lag: seconds from its start to its report.
        behind: messages that the source had and the query not, for Kafka; None where Spark does not say it.
    """

    at: float
    query: str
    rows: int
    seconds: float
    lag: float
    behind: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryProgress:
    """One query of a pipeline so far.

    Attributes:
        name: the output's name, or the stored view's.
        state: "starting", "running", "waiting" for its next start, "done", "stopped" or "failed".
        batches: micro-batches with rows.
        rows: rows read.
        rate: rows a second, read in the last batches.
        batch_seconds: what the last micro-batch with rows took.
        lag: seconds from the start of the last micro-batch to its report.
        behind: messages that the source has and the query has not read; None where Spark does not say it.
        late: rows that came behind the watermark and were dropped by Spark.
        watermark: in seconds since the epoch; None without one.
        written: rows that sinks in the driver delivered, or executors published.
        skipped: rows of batches that were in already.
        dead: rows given to the dead letters.
        restarts: how often it was started again.
        error: the class of the error that it died with last; empty if it never did.
    """

    name: str
    state: str = "starting"
    batches: int = 0
    rows: int = 0
    rate: float = 0.0
    batch_seconds: float = 0.0
    lag: float = 0.0
    behind: float | None = None
    late: int = 0
    watermark: float | None = None
    written: int = 0
    skipped: int = 0
    dead: int = 0
    restarts: int = 0
    error: str = ""


class ProgressListener(StreamingQueryListener):
    """Takes Spark's reports, on a thread of Spark's; what it has counted may be asked from any."""

    def __init__(
        self,
        names: list[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = lambda: datetime.now(UTC).timestamp(),
    ) -> None:
        self._clock = clock
        self._now = now
        self._began = clock()
        self._lock = threading.Lock()
        self._queries = {name: QueryProgress(name=name) for name in names}
        self._recent: dict[str, deque[tuple[float, int]]] = {name: deque(maxlen=_RECENT) for name in names}
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._taken: deque[tuple[str, int, str]] = deque(maxlen=_REPORTS * max(len(names), 1))

    def queries(self) -> dict[str, QueryProgress]:
        """The queries by name."""
        with self._lock:
            return dict(self._queries)

    def samples(self) -> list[Sample]:
        """The last micro-batches, in the order of their reports."""
        with self._lock:
            return list(self._samples)

    def set(self, name: str, **changes: Any) -> None:
        """Note what others know of a query: its state, what its sinks delivered."""
        with self._lock:
            self._queries[name] = replace(self._queries[name], **changes)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Spark reports a query that starts, maybe again; who started it knows."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Spark reports a micro-batch that is done."""
        self.take(event.progress)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Spark reports a query that has nothing to do: it is not behind any more."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Spark reports a query that ended; who started it sees to that."""

    def take(self, progress: Any) -> None:
        """Count one micro-batch, once: it may be reported, and be among the last ones of its query."""
        name = progress.name
        if name not in self._queries or not self._is_new(progress):
            return
        rows, seconds = int(progress.numInputRows), progress.batchDuration / 1000
        started = epoch(progress.timestamp)
        lag = max(self._now() - started, 0.0) if started is not None else seconds
        times: Mapping[str, str] = dict(progress.eventTime or {})
        behind = _behind(progress)
        late = sum(int(each.numRowsDroppedByWatermark) for each in progress.stateOperators or ())
        at = self._clock() - self._began
        with self._lock:
            before = self._queries[name]
            changes: dict[str, Any] = {"late": before.late + late, "behind": behind}
            if times.get("watermark"):
                changes["watermark"] = epoch(times["watermark"])
            if rows:
                recent = self._recent[name]
                recent.append((at, rows))
                changes |= {
                    "batches": before.batches + 1,
                    "rows": before.rows + rows,
                    "rate": _rate(recent, seconds),
                    "batch_seconds": seconds,
                    "lag": lag,
                }
            self._queries[name] = replace(before, **changes)
            self._samples.append(Sample(at=at, query=name, rows=rows, seconds=seconds, lag=lag, behind=behind))
        if rows:
            log.info(
                "spark_query_progress",
                query=name,
                rows=rows,
                seconds=round(seconds, 3),
                lag=round(lag, 3),
                behind=behind,
                late=late,
            )

    def _is_new(self, progress: Any) -> bool:
        report = (str(progress.runId), int(progress.batchId), str(progress.timestamp))
        with self._lock:
            is_new = report not in self._taken
            if is_new:
                self._taken.append(report)
        return is_new


def _rate(recent: deque[tuple[float, int]], seconds: float) -> float:
    """Rows a second over the last batches; the first one counts by what it took."""
    (first, rows), (last, _) = recent[0], recent[-1]
    span = last - first
    if span <= 0:
        return rows / max(seconds, 0.001)
    return (sum(each for _, each in recent) - rows) / span


def _behind(progress: Any) -> float | None:
    """How many messages the sources have that were not read, as Kafka's source says it."""
    found: list[float] = []
    for source in progress.sources or ():
        metrics = dict(source.metrics or {})
        if "avgOffsetsBehindLatest" in metrics:
            partitions = _partitions(source.endOffset)
            found.append(float(metrics["avgOffsetsBehindLatest"]) * partitions)
    return sum(found) if found else None


def _partitions(offsets: Any) -> int:
    """How many partitions an offset of Kafka names.

    Example:
        >>> _partitions('{"events":{"0":7,"1":9}}')
        2
    """
    try:
        topics = msgspec.json.decode(str(offsets), type=dict[str, dict[str, int]])
    except msgspec.DecodeError:  # of another version of Spark
        return 1
    return sum(len(each) for each in topics.values())
