"""Records of Kafka as messages: single ones, and runs of neighbours for batch handlers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, overload

from batchqueue_async.intake.ports import ATTEMPT, Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from batchqueue_async.intake.kafka.progress import Progress
    from batchqueue_async.intake.ports import Epoch

_NO_HEADERS: Mapping[str, str] = {}
_ATTEMPT = re.compile(r"[0-9]{1,9}")


class KafkaMessage(Delivery):
    """A record, as a handler sees it: what `Message` has, and its partition, offset and tombstone.

    Example:
        >>> # in a handler
        >>> def place(message: KafkaMessage) -> str:
        ...     return f"{message.source}/{message.partition}@{message.offset}"
    """

    __slots__ = ("_first", "_progress", "_record")

    def __init__(self, record: Any, progress: Progress, order: Hashable | None) -> None:
        # The base's fields are properties here, read from the record when they are asked for.
        self._record = record
        self._progress = progress
        self._first: int | None = None  # the first offset of its run, if it is part of one
        self.epoch = progress.epoch
        self.order = order
        self.size = size_of(record)
        self.taken = 0.0
        self.attempt = attempt_of(record) if record.headers else 1
        self.value = None

    @property
    def body(self) -> bytes:
        """The record's value; empty for a tombstone."""
        value: bytes | None = self._record.value
        return b"" if value is None else value

    @property
    def tombstone(self) -> bool:
        """Whether the record has no value: its key is deleted."""
        return self._record.value is None

    @property
    def key(self) -> bytes | None:
        """The record's key."""
        key: bytes | None = self._record.key
        return key

    @property
    def headers(self) -> Mapping[str, str]:
        """The record's headers as text; of headers with one name the last counts."""
        headers: Sequence[tuple[str, bytes]] = self._record.headers
        if not headers:
            return _NO_HEADERS
        return {name: (value or b"").decode(errors="replace") for name, value in headers}

    @property
    def id(self) -> str:
        """Topic, partition and offset."""
        record = self._record
        return f"{record.topic}/{record.partition}/{record.offset}"

    @property
    def published_at(self) -> float | None:
        """The record's timestamp, in seconds since 1970."""
        stamp: int = self._record.timestamp
        return None if stamp < 0 else stamp / 1000

    @property
    def source(self) -> str:
        """The topic."""
        topic: str = self._record.topic
        return topic

    @property
    def partition(self) -> int:
        """The partition of the topic."""
        partition: int = self._record.partition
        return partition

    @property
    def offset(self) -> int:
        """The offset in the partition."""
        offset: int = self._record.offset
        return offset

    # --- for the session

    @classmethod
    def of_run(cls, records: Sequence[Any], progress: Progress) -> list[KafkaMessage]:
        """The messages of a run, without a call for each, and with what a handler may ask for alone.

        What the pool needs of a message, `KafkaRun.split` adds.
        """
        first: int = records[0].offset
        new = object.__new__
        made: list[KafkaMessage] = []
        for record in records:
            message = new(cls)
            message._record = record  # noqa: SLF001 - of its own class
            message._progress = progress  # noqa: SLF001 - of its own class
            message._first = first  # noqa: SLF001 - of its own class
            message.attempt = attempt_of(record) if record.headers else 1
            message.value = None
            made.append(message)
        return made

    @property
    def raw(self) -> Any:
        """The client's record."""
        return self._record

    def finish(self) -> None:
        """Acked, or confirmed elsewhere: it holds back no commit any more."""
        progress = self._progress
        if self._first is None:
            progress.window.finished(self._record.offset)
        else:
            progress.window.finished_within(self._first, self._record.offset)
        progress.freed(1, self.size)

    def give_back(self) -> None:
        """Not handled: the commit point stays before it."""
        self._progress.freed(1, self.size)


class KafkaRun:
    """Neighbouring records of one partition as one delivery; its messages are made when they are asked for."""

    __slots__ = ("_messages", "_progress", "_records", "count", "epoch", "order", "size", "taken")

    attempt = 1
    """For the pool's counts, which don't look into runs."""

    def __init__(self, records: Sequence[Any], progress: Progress, order: Hashable | None, size: int) -> None:
        self._records = records
        self._progress = progress
        self._messages: list[KafkaMessage] | None = None
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
        return self._made()[place]

    def __iter__(self) -> Iterator[KafkaMessage]:
        return iter(self._made())

    def __repr__(self) -> str:
        return f"<{self.count} messages of {self.epoch.name} from offset {self._records[0].offset}>"

    def bodies(self) -> list[bytes]:
        """The bodies of its messages, without making those."""
        return [b"" if record.value is None else record.value for record in self._records]

    def _made(self) -> list[KafkaMessage]:
        if self._messages is None:
            self._messages = KafkaMessage.of_run(self._records, self._progress)
        return self._messages

    def split(self) -> list[KafkaMessage]:
        """Its messages, to be settled one by one from now on."""
        made = self._made()
        self._progress.window.split(self._records[0].offset, [record.offset for record in self._records])
        for message in made:
            message.epoch = self.epoch
            message.order = self.order
            message.taken = self.taken
            message.size = size_of(message.raw)
        return made

    # --- for the session

    def finish(self) -> None:
        """All of it is acked."""
        self._progress.window.finished(self._records[0].offset)
        self._progress.freed(self.count, self.size)

    def give_back(self) -> None:
        """None of it was handled."""
        self._progress.freed(self.count, self.size)


def size_of(record: Any) -> int:
    """What a record counts against the bound by bytes: its key, its value, and a byte for each."""
    value: int = record.serialized_value_size  # -1 where there is none
    key: int = record.serialized_key_size
    return value + key + 2


def size_of_all(records: Sequence[Any]) -> int:
    """The sum of the sizes of records, without a call for each."""
    size = 2 * len(records)
    for record in records:
        size += record.serialized_value_size + record.serialized_key_size
    return size


def attempt_of(record: Any) -> int:
    """The attempt that a record's header names, for what was published again to be tried again; else 1."""
    for name, value in record.headers:
        if name == ATTEMPT:
            text = (value or b"").decode(errors="replace")
            return max(1, int(text)) if _ATTEMPT.fullmatch(text) else 1
    return 1


def by_key(place: Hashable) -> Callable[[Any], Hashable | None]:
    """The lane of a record where order is by key: of its topic and partition; keyless records have none."""

    def order(record: Any) -> Hashable | None:
        key = record.key
        return None if key is None else (place, key)

    return order
