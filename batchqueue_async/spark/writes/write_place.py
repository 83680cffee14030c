"""The place of a write among those of its micro-batch into one destination: part of its key, with query and batch.

One `foreachBatch` function may write several times: parts of the batch into one table, or the batch into several. Spark
repeats a batch as a whole, with the same calls in the same order; so the number of a call among those of its attempt
into the same destination says which write it is. Calls into others don't count, so that a program that was changed
between a crash and its restart may write to them in another order, to more or to fewer. Attempts are distinguished by
their run: a restart of the query is a new one.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING

from batchqueue_async._support import forks

if TYPE_CHECKING:
    from batchqueue_async.spark.writes.streaming_query import QueryRun

_KEPT = 1_000


class _Line:
    """The writes of one attempt into one destination.

    Invariants: `following` is the place of the next write; it goes back when a write fails, because the same write is
    what comes next. `under_way` counts the writes that hold a place.
    """

    def __init__(self) -> None:
        self.following = 0
        self.under_way = 0


class _Attempt:
    """One attempt at a micro-batch, with the writes into each destination."""

    def __init__(self, run: str | None, batch: int) -> None:
        self.run = run
        self.batch = batch
        self.lines: defaultdict[str, _Line] = defaultdict(_Line)
        self.writers: dict[str, weakref.ref[object]] = {}

    def is_over(self, run: str | None, batch: int, writer: object, name: str) -> bool:
        """Whether a write belongs to another attempt.

        Without a known run, another object of a known name is what a restart of the program makes.
        """
        if (self.run, self.batch) != (run, batch):
            return True
        known = self.writers.get(name)
        return self.run is None and known is not None and known() is not writer


class Place:
    """The place of one write, held until `release`.

    Attributes:
        number: how many writes of the attempt into the destination came before; None where others are under way, so
            that it has no meaning.
    """

    def __init__(self, line: _Line | None, number: int | None, lock: threading.Lock) -> None:
        self._line = line
        self._lock = lock
        self.number = number

    def release(self, *, written: bool) -> None:
        """The write has ended; one that failed leaves its place to its repetition."""
        line, self._line = self._line, None
        if line is not None:
            with self._lock:
                line.under_way -= 1
                if not written and self.number is not None:
                    line.following = min(line.following, self.number)


class WritePlaces:
    """The attempts that are under way in this process, one for each query.

    Example:
        >>> from batchqueue_async.spark.writes.streaming_query import QueryRun
        >>> places, writer = WritePlaces(), object.__new__(type("Writer", (), {}))
        >>> for batch in (0, 0, 1):
        ...     place = places.take(QueryRun("query", "run"), "query", batch, writer, "name", into="out.db rows")
        ...     place.release(written=True)
        ...     print(place.number)
        0
        1
        0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[str, _Attempt] = {}
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread may have held the lock, and its attempts are not ours."""
        self._lock = threading.Lock()
        self._attempts = {}

    def take(self, run: QueryRun, source: str, batch: int, writer: object, name: str, *, into: str) -> Place:
        """The place of a write that begins, among those `into` its destination."""
        if run.outside:  # the program counts its batches itself: the same number is the same write
            return Place(None, 0, self._lock)
        with self._lock:
            attempt = self._attempts.get(source)
            if attempt is None or attempt.is_over(run.run, batch, writer, name):
                attempt = self._begin(source, run, batch)
            attempt.writers[name] = weakref.ref(writer)
            line = attempt.lines[into]
            number = None if line.under_way else line.following
            line.under_way += 1
            line.following += 1
            return Place(line, number, self._lock)

    def _begin(self, source: str, run: QueryRun, batch: int) -> _Attempt:
        self._attempts.pop(source, None)
        while len(self._attempts) >= _KEPT:
            self._attempts.pop(next(iter(self._attempts)))
        made = self._attempts[source] = _Attempt(run.run, batch)
        return made


places = WritePlaces()
"""Those of this process: the writes of a batch may go through many sinks."""
