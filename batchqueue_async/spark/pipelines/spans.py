"""Spans of time that were written into targets which append: one that overlaps another would be in twice.

The notes are in the ledger of the pipeline's state, where `batchqueue spark ledger list` shows them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

from batchqueue_async.sinks.base import BatchKey
from batchqueue_async.spark.pipelines.frames import Span
from batchqueue_async.spark.writes.ledger import FileLedger, ledger_at

if TYPE_CHECKING:
    from pathlib import Path

_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def overlap(one: Span, other: Span) -> bool:
    """Whether two spans share a moment.

    Example:
        >>> days = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
        >>> first, second = Span(since=days[0], until=days[1]), Span(since=days[1], until=days[2])
        >>> overlap(first, second), overlap(first, Span(until=days[2])), overlap(Span(since=days[2]), second)
        (False, True, False)
    """
    return (one.since or _FIRST) < (other.until or _LAST) and (other.since or _FIRST) < (one.until or _LAST)


class WrittenSpans:
    """The spans that were begun for the outputs of a pipeline.

    A span is noted before its first row is written, because nobody knows how far a run came that was killed; the same
    span may be run again.
    """

    def __init__(self, path: Path, pipeline: str) -> None:
        self.path = path
        self._pipeline = pipeline

    def source(self, output: str, span: Span) -> str:
        """What a span is called in the ledger."""
        return f"{self._prefix(output)}{span}"

    def other(self, output: str, span: Span) -> Span | None:
        """A span of the output that overlaps this one, and is another."""
        if not self.path.exists():
            return None
        prefix = self._prefix(output)
        notes = [note.key.source for note in FileLedger(self.path).notes()]
        known = [_parsed(source.removeprefix(prefix)) for source in notes if source.startswith(prefix)]
        return next((each for each in known if str(each) != str(span) and overlap(each, span)), None)

    def note(self, output: str, span: Span) -> None:
        """The span is about to be written."""
        ledger_at(self.path).note(BatchKey(self.source(output, span), 0))

    def _prefix(self, output: str) -> str:
        return f"span/{quote(self._pipeline, safe='')}/{quote(output, safe='')}/"


def _parsed(text: str) -> Span:
    since, _, until = text.partition("..")
    return Span(
        since=datetime.fromisoformat(since) if since else None, until=datetime.fromisoformat(until) if until else None
    )
