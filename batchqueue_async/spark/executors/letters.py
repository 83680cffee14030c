"""Bad rows on the executors: staged by each attempt, and published with its batch, so that each is there once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async.sinks.base import Attempt
from batchqueue_async.spark.bad_rows import as_letter, check_kept
from batchqueue_async.spark.record_keys import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.sinks.base import BatchKey, Sink, StagingSink

PUBLICATION = "publication"
"""The name of the attempt that stages the rows which a table refused only when they came into it."""


def letters_key(key: BatchKey) -> BatchKey:
    """The key of a batch's dead letters: what is staged for them is apart from what is staged of its rows.

    Example:
        >>> from batchqueue_async.sinks.base import BatchKey
        >>> str(letters_key(BatchKey("8f14", 7)))
        '8f14/dead-letters/7'
    """
    return key._replace(source=f"{key.source}/dead-letters")


def refused_key(key: BatchKey, letters: Sequence[dict[str, Any]]) -> BatchKey:
    """The key of the letters of a publication, by what they say.

    A table may refuse other rows when a publication is repeated, because others write into it meanwhile. The same
    letters have the same key, and are there once; others are not taken for them.

    Example:
        >>> from batchqueue_async.sinks.base import BatchKey
        >>> one, other = (refused_key(BatchKey("8f14", 7), [{"row": {"v": v}}]) for v in (1, 2))
        >>> one.source.startswith("8f14/dead-letters/refused-"), one == other
        (True, False)
    """
    return key._replace(source=f"{letters_key(key).source}/refused-{digest(sorted(map(digest, letters))).hex()}")


class StagedLetters:
    """Where the bad rows of one attempt go; nothing is staged where there are none."""

    def __init__(self, sink: StagingSink, attempt: Attempt) -> None:
        self._sink = sink
        self._attempt = attempt._replace(key=letters_key(attempt.key))
        self._part: Sink | None = None

    async def send(self, records: list[dict[str, Any]]) -> None:
        """Stage bad rows."""
        if self._part is None:
            part = self._sink.stage(self._attempt)
            await part.open()
            self._part = part
        check_kept(await self._part.send(records))

    async def close(self) -> None:
        """What was sent is staged when this returns."""
        part, self._part = self._part, None
        if part is not None:
            await part.close()


class LettersOfBatch:
    """Publishes the dead letters of one batch, before the batch itself: a crash between the two loses none.

    Attributes:
        count: how many rows were refused at the publication, beyond those that the tasks counted.
    """

    def __init__(self, sink: StagingSink, name: str, key: BatchKey, attempts: Sequence[Attempt]) -> None:
        self.count = 0
        self._sink = sink
        self._name = name
        self._batch = key
        self._attempts = [attempt._replace(key=letters_key(key)) for attempt in attempts]

    @property
    def some(self) -> bool:
        """Whether a task has staged any."""
        return bool(self._attempts)

    async def publish(self, refused: Sequence[tuple[dict[str, Any], str]]) -> None:
        """Publish what the tasks staged, and the rows that were refused since, each with its reason."""
        self.count = len(refused)
        if refused:
            await self._publish_refused(
                [as_letter(self._name, str(self._batch), row, reason) for row, reason in refused]
            )
        key = letters_key(self._batch)
        if self._attempts:
            await self._sink.publish(key, self._attempts)
        else:
            await self._sink.discard(key)  # of attempts that do not count

    async def _publish_refused(self, letters: list[dict[str, Any]]) -> None:
        attempt = Attempt(refused_key(self._batch, letters), 0, PUBLICATION)
        await self._sink.discard(attempt.key)  # of a publication that was cut off while it staged them
        staged = self._sink.stage(attempt)
        await staged.open()
        try:
            check_kept(await staged.send(letters))
        finally:
            await staged.close()
        await self._sink.publish(attempt.key, [attempt])
