"""What streaming queries do, counted: rows, batch durations and lag, fed by Spark's own progress reports."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from batchqueue_async._support import forks, log
from batchqueue_async.queue.stats import Distribution, Histogram
from batchqueue_async.spark.run_reports import total_of

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class QueryStats:
    """One streaming query so far.

    Attributes:
        name: the query's name, or its id.
        batches: micro-batches reported.
        rows: rows that went into them.
        rows_per_second: the rate of the last one that had rows.
        durations: seconds that each micro-batch took, its delivery included.
        lag: seconds from the start of each micro-batch to its delivery, as told by Spark's report.
        event_lag: seconds from the newest event of each micro-batch to its delivery; empty without event time.
        watermark: the query's watermark, in seconds since the epoch; None without one.
        active: whether it still runs.
        failed: whether it ended with an error.
        skipped: writes of its batches that were in already, and so had no effect, by sinks of this process or by
            executors.
        skipped_rows: rows in them.
        dead_rows: rows that executors gave to the dead letters; those of a `DriverSink` are in its `stats()`.
    """

    name: str
    batches: int
    rows: int
    rows_per_second: float
    durations: Distribution
    lag: Distribution
    event_lag: Distribution
    watermark: float | None
    active: bool
    failed: bool
    skipped: int = 0
    skipped_rows: int = 0
    dead_rows: int = 0


class SkippedWrites:
    """What sinks of this process skipped, by the query: Spark's own reports know batches, and not their writes.

    Example:
        >>> skipped = SkippedWrites()
        >>> skipped.add("query", 40)
        >>> skipped.of("query"), skipped.of("another")
        ((1, 40), (0, 0))
    """

    _KEPT = 1_000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[int, int]] = {}
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread may have held the lock."""
        self._lock = threading.Lock()

    def add(self, query: str | None, rows: int) -> None:
        """A write was skipped."""
        if query is None:
            return
        with self._lock:
            writes, before = self._counts.pop(query, (0, 0))
            while len(self._counts) >= self._KEPT:
                self._counts.pop(next(iter(self._counts)))
            self._counts[query] = (writes + 1, before + rows)

    def of(self, query: str) -> tuple[int, int]:
        """How many writes of a query were skipped, and their rows."""
        with self._lock:
            return self._counts.get(query, (0, 0))


skipped_writes = SkippedWrites()
"""That of this process."""


class _Tally:
    def __init__(self, query: str, name: str) -> None:
        self.query = query
        self.name = name
        self.batches = self.rows = 0
        self.rate = 0.0
        self.durations = Histogram()
        self.lag = Histogram()
        self.event_lag = Histogram()
        self.watermark: float | None = None
        self.active, self.failed = True, False
        self.runs: dict[str, None] = {}

    def stats(self) -> QueryStats:
        skipped, skipped_rows = skipped_writes.of(self.query)
        executors = total_of(self.runs)
        return QueryStats(
            name=self.name,
            batches=self.batches,
            rows=self.rows,
            rows_per_second=self.rate,
            durations=self.durations.summary(),
            lag=self.lag.summary(),
            event_lag=self.event_lag.summary(),
            watermark=self.watermark,
            active=self.active,
            failed=self.failed,
            skipped=skipped + executors.skipped,
            skipped_rows=skipped_rows + executors.skipped_rows,
            dead_rows=executors.dead_rows,
        )


def epoch(text: str | None) -> float | None:
    """Spark's time texts as seconds since the epoch.

    Example:
        >>> epoch("1970-01-01T00:01:00.500Z")
        60.5
    """
    return None if not text else datetime.fromisoformat(text).timestamp()


class QueryListener(StreamingQueryListener):
    """Counts what every query of a session does: `spark.streams.addListener(QueryListener())`.

    Spark calls it on a thread of its own; `stats` may be asked from any.
    """

    def __init__(self, now: Callable[[], float] = lambda: datetime.now(UTC).timestamp()) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._tallies: dict[str, _Tally] = {}

    def stats(self) -> dict[str, QueryStats]:
        """The queries seen, by their ids."""
        with self._lock:
            return {query: tally.stats() for query, tally in self._tallies.items()}

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Spark tells of a query that starts, maybe again."""
        with self._lock:
            tally = self._tallies.setdefault(str(event.id), _Tally(str(event.id), event.name or str(event.id)))
            tally.active, tally.failed = True, False
            tally.runs[str(event.runId)] = None

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Spark tells of a micro-batch that is done."""
        progress = event.progress
        seconds = progress.batchDuration / 1000
        times: dict[str, str] = dict(progress.eventTime or {})
        now = self._now()
        started, newest = epoch(progress.timestamp), epoch(times.get("max"))
        with self._lock:
            tally = self._tallies.setdefault(
                str(progress.id), _Tally(str(progress.id), progress.name or str(progress.id))
            )
            tally.runs[str(progress.runId)] = None
            tally.batches += 1
            tally.rows += progress.numInputRows
            tally.rate = progress.processedRowsPerSecond if progress.numInputRows else tally.rate
            tally.durations.record(max(seconds, 0.001))
            tally.lag.record(max(now - (started or now), 0.001))
            if newest is not None:
                tally.event_lag.record(max(now - newest, 0.001))
            tally.watermark = epoch(times.get("watermark"))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Spark tells of a query that has nothing to do."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Spark tells of a query that ended."""
        with self._lock:
            tally = self._tallies.setdefault(str(event.id), _Tally(str(event.id), str(event.id)))
            tally.active, tally.failed = False, event.exception is not None
        if event.exception is not None:
            log.warning("spark_query_failed", query=tally.name, batches=tally.batches)
