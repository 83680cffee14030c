"""The streaming query in whose `foreachBatch` a call is made: its id, this start of it, its output mode, its end."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class QueryRun:
    """What is known of the query that is being written; nothing outside of one.

    Attributes:
        query: the query's id, which lives in its checkpoint: a new checkpoint has a new one. None where unknown.
        run: this start of the query; None where unknown.
        outside: whether the call is known to be made outside of a streaming query.
        mode: "Append", "Update" or "Complete"; empty where unknown.
    """

    query: str | None = None
    run: str | None = None
    outside: bool = False
    mode: str = ""
    _handle: Any = field(default=None, repr=False, compare=False)

    def is_stopped(self) -> bool:
        """Whether the query was asked to stop; it waits for its `foreachBatch` to return."""
        return self._handle is not None and not self._handle.isActive()


def current_run(frame: Any) -> QueryRun:
    """The query whose batch the DataFrame is, as far as this Spark says.

    Spark Connect reports neither the query nor whether there is one; there each start of a query has a process of its
    own, which stands for the run.
    """
    try:
        context = frame.sparkSession.sparkContext
    except AttributeError:  # Spark Connect has no SparkContext, and says so by PySparkAttributeError
        return QueryRun(run=f"process-{os.getpid()}")
    query = context.getLocalProperty("sql.streaming.queryId")
    if not query:
        return QueryRun(outside=True)
    group = context.getLocalProperty("spark.jobGroup.id")  # Spark gives a run's jobs its name
    known = _known.get((str(query), str(group)))
    if known is not None:
        return known
    handle = _active_query(frame, context, str(query))
    if handle is None:
        return QueryRun(str(query), None if group is None else str(group))
    found = QueryRun(str(query), str(handle.runId().toString()), mode=str(handle.outputMode()), _handle=handle)
    if found.run == str(group):  # else the program has named the group itself, maybe alike for all runs
        _remember(found)
    return found


_KEPT = 16
_known: dict[tuple[str, str], QueryRun] = {}
"""The last runs seen, by query and run: to ask the JVM for one takes a dozen calls, in each batch."""


def _remember(run: QueryRun) -> None:
    for old in list(_known)[: 1 - _KEPT]:
        _known.pop(old, None)
    _known[str(run.query), str(run.run)] = run


def _active_query(frame: Any, context: Any, query: str) -> Any:
    """The JVM's object of the query, from the registry that all sessions share; None where this Spark has no such."""
    session = getattr(getattr(frame, "_jdf", None), "sparkSession", None)
    if session is None:
        return None
    try:
        key = context._jvm.java.util.UUID.fromString(query)  # noqa: SLF001 - PySpark's own
        return session().sharedState().activeStreamingQueries().get(key)
    except Exception:  # noqa: BLE001 - an inner part of Spark, of any version: without it less is known, no more
        return None
