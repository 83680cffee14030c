"""Records of Kafka as messages: single ones, and runs of neighbours for batch handlers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, overload

from batchqueue_async.intake.ports import ATTEMPT, Delivery

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from batchqueue_async.intake.kafka.progress import Progress
    from batchqueue_async.intake.ports import Epoch

_NO_HEADERS: Mapping[str, str] = {}
_ATTEMPT = re.compile(r"[0-9]{1,9}")


class KafkaMessage(Delivery):
    """A record, as a handler sees it: what `Message` has, and its partition, offset and tombstone.

    It has all that is needed of the client's record, which goes as soon as its message is there: with both at once, a
    batch of some hundreds has the garbage collector look through it, again and again.

    Example:
        >>> # in a handler
        >>> def place(message: KafkaMessage) -> str:
        ...     return f"{message.source}/{message.partition}@{message.offset}"

    Attributes:
        body: the record's value; empty for a tombstone.
        key: the record's key.
        offset: its offset in the partition.
        tombstone: whether it has no value: its key is deleted.
        raw_headers: its headers as they came, several of one name included.
    """

    # Body and key are plain attributes, where the base has properties: a batch handler reads the body of each message.
    __slots__ = ("_first", "_progress", "_stamp", "body", "key", "offset", "raw_headers", "tombstone")  # pyright: ignore[reportIncompatibleMethodOverride]

    body: bytes
    key: bytes | None
    offset: int
    tombstone: bool
    raw_headers: Sequence[tuple[str, bytes]]
    _stamp: int
    _progress: Progress
    _first: int | None  # of its run; None outside one

    @property
    def headers(self) -> Mapping[str, str]:
        """The record's headers as text; of headers with one name the last counts."""
        if not self.raw_headers:
            return _NO_HEADERS
        return {name: (value or b"").decode(errors="replace") for name, value in self.raw_headers}

    @property
    def id(self) -> str:
        """Topic, partition and offset."""
        place = self._progress.place
        return f"{place.topic}/{place.partition}/{self.offset}"

    @property
    def published_at(self) -> float | None:
        """The record's timestamp, in seconds since 1970."""
        return None if self._stamp < 0 else self._stamp / 1000

    @property
    def source(self) -> str:
        """The topic."""
        return self._progress.place.topic

    @property
    def partition(self) -> int:
        """The partition of the topic."""
        return self._progress.place.partition

    # --- for the session

    @classmethod
    def replace(cls, records: list[Any], progress: Progress) -> list[KafkaMessage]:
        """Put a message in the place of each record, without a call for each; goes on where it was interrupted.

        They have what a handler may ask for. What the pool and the session need, `deliveries` adds.
        """
        new = object.__new__
        done = sum(type(each) is cls for each in records) if type(records[0]) is cls else 0
        for at in range(done, len(records)):
            record = records[at]
            message = new(cls)
            value = record.value
            message.tombstone = value is None
            message.body = b"" if value is None else value
            message.key = record.key
            message.offset = record.offset
            message._stamp = record.timestamp  # noqa: SLF001 - of its own class
            message._progress = progress  # noqa: SLF001 - of its own class
            message.raw_headers = headers = record.headers
            message.attempt = attempt_of(headers) if headers else 1
            message.value = None
            records[at] = message
        return records

    @classmethod
    def deliveries(
        cls, records: list[Any], progress: Progress, order: Hashable | None, *, by_key: bool = False, run: bool = False
    ) -> list[KafkaMessage]:
        """Messages in the place of records, each to be settled by itself.

        Args:
            records: records, or messages that were made of them.
            progress: where the lane notes what is finished.
            order: the lane's key for all of them; None has no order.
            by_key: whether the records of each key have a lane; those without a key have no order.
            run: whether they were received as one run.
        """
        messages = cls.replace(records, progress)
        epoch, place, first = progress.epoch, progress.place, messages[0].offset if run else None
        for message in messages:
            key = message.key
            message.epoch = epoch
            message.order = order if not by_key else None if key is None else (place, key)
            message.size = len(message.body) + (1 if key is None else len(key) + 2) - message.tombstone
            message.taken = 0.0
            message._first = first  # noqa: SLF001 - of its own class
        return messages

    def finish(self) -> None:
        """Acked, or confirmed elsewhere: it holds back no commit any more."""
        progress = self._progress
        if self._first is None:
            progress.window.finished(self.offset)
        else:
            progress.window.finished_within(self._first, self.offset)
        progress.freed(1, self.size)

    def give_back(self) -> None:
        """Not handled: the commit point stays before it."""
        self._progress.freed(1, self.size)


class KafkaRun:
    """Neighbouring records of one partition as one delivery; its messages are made when they are asked for."""

    __slots__ = ("_first", "_progress", "_records", "count", "epoch", "order", "size", "taken")

    attempt = 1
    """For the pool's counts, which don't look into runs."""

    def __init__(self, records: list[Any], progress: Progress, order: Hashable | None, size: int) -> None:
        self._records = records  # or the messages that were made of them
        self._progress = progress
        self._first: int = records[0].offset
        self.count = len(records)
        self.epoch: Epoch = progress.epoch
        self.order = order
        self.size = size
        self.taken = 0.0

    def __len__(self) -> int:
        return self.count

    @overload
    def __getitem__(self, place: int) -> KafkaMessage: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[KafkaMessage]: ...
    def __getitem__(self, place: int | slice) -> KafkaMessage | Sequence[KafkaMessage]:
        return self._messages()[place]

    def __iter__(self) -> Iterator[KafkaMessage]:
        return iter(self._messages())

    def __repr__(self) -> str:
        return f"<{self.count} messages of {self.epoch.name} from offset {self._first}>"

    def bodies(self) -> list[bytes]:
        """The bodies of its messages, without making those."""
        if type(self._records[0]) is KafkaMessage:
            return [message.body for message in self._messages()]
        return [b"" if record.value is None else record.value for record in self._records]

    def _messages(self) -> list[KafkaMessage]:
        records = self._records
        return records if type(records[-1]) is KafkaMessage else KafkaMessage.replace(records, self._progress)

    def split(self) -> list[KafkaMessage]:
        """Its messages, to be settled one by one from now on."""
        messages = KafkaMessage.deliveries(self._records, self._progress, self.order, run=True)
        self._progress.window.split(self._first, [message.offset for message in messages])
        for message in messages:
            message.taken = self.taken
        return messages

    # --- for the session

    def finish(self) -> None:
        """All of it is acked."""
        self._progress.window.finished(self._first)
        self._progress.freed(self.count, self.size)

    def give_back(self) -> None:
        """None of it was handled."""
        self._progress.freed(self.count, self.size)


def size_of_all(records: Sequence[Any]) -> int:
    """What records count against the bound by bytes: their keys and values, and a byte for each of those."""
    size = 2 * len(records)
    for record in records:
        size += record.serialized_value_size + record.serialized_key_size  # -1 where there is none
    return size


def attempt_of(headers: Sequence[tuple[str, bytes]]) -> int:
    """The attempt that a record's header names, for what was published again to be tried again; else 1."""
    for name, value in headers:
        if name == ATTEMPT:
            text = (value or b"").decode(errors="replace")
            return max(1, int(text)) if _ATTEMPT.fullmatch(text) else 1
    return 1
