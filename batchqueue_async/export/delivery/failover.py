"""A last place in memory for batches that ran out of attempts: bounded by count and bytes, the oldest makes room."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from batchqueue_async.export.delivery.leased_batch import Batch
from batchqueue_async.export.send_queue.sorted_items import SortedItems
from batchqueue_async.export.send_queue.weight import weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.export.policies import FailoverPolicy


class FailoverEntry(Batch):
    """A batch in the failover queue. What is not settled of it stays there."""

    __slots__ = ("_parts", "delivered", "left", "lowest")

    def __init__(self, records: list[Any], numbers: list[int], enqueued_ns: int) -> None:
        super().__init__(records, numbers, attempts=2, enqueued_ns=enqueued_ns, weight=sum(weights(records)))
        self.left = dict.fromkeys(range(len(records)))
        self._parts: list[list[int]] = []
        self.delivered = 0
        self.lowest = min(numbers)

    @classmethod
    def of(cls, batch: Batch, places: Sequence[int]) -> FailoverEntry:
        """Records of another batch; those that were prepared are known as they were handed over, too."""
        entry = cls(batch.take(places), [batch.numbers[place] for place in places], batch.enqueued_ns)
        if batch.originals is not None:
            entry.originals = batch.take_originals(places)
        return entry

    def attempts_by_place(self) -> list[int]:
        """None: its attempts are over, and here nothing counts them."""
        return [0] * len(self)

    def ages(self, now_ns: int) -> list[float]:  # noqa: ARG002 - a batch of the send queue goes by it
        """None, likewise."""
        return [0.0] * len(self)

    @property
    def unsettled(self) -> int:
        """Records that are still to be settled."""
        return len(self.left)

    async def ack(self, places: Sequence[int] | None = None) -> int:
        """Delivered."""
        done = self._settle(places)
        self.delivered += done
        return done

    async def nack(
        self,
        delay: float,  # noqa: ARG002 - the next look into the queue is when it is sent again
        places: Sequence[int] | None = None,  # noqa: ARG002
        *,
        reason: str,  # noqa: ARG002
        counted: bool = True,  # noqa: ARG002
    ) -> int:
        """They stay."""
        return 0

    async def dead_letter(self, reason: str, places: Sequence[int] | None = None) -> int:  # noqa: ARG002
        """Given up."""
        return self._settle(places)

    def _settle(self, places: Sequence[int] | None) -> int:
        gone = list(self.left) if places is None else [place for place in places if place in self.left]
        for place in gone:
            del self.left[place]
        return len(gone)

    def divide(self, places: Sequence[int]) -> None:
        """These were a part of it that the destination may take where it refused the whole."""
        self._parts.append([place for place in places if place in self.left])

    def rest(self) -> list[FailoverEntry]:
        """What is left of it, in the parts that it is to be sent in, each an entry of its own."""
        if len(self.left) == len(self) and not self._parts:
            return [self]
        parts: list[list[int]] = []
        for part in self._parts:
            parts.append([place for place in part if place in self.left])
            for place in parts[-1]:
                del self.left[place]
        parts.append(sorted(self.left))
        return [FailoverEntry.of(self, part) for part in parts if part]


class Failover:
    """The queue.

    Attributes:
        size: bytes in it.
        evicted: records that had to make room.
    """

    def __init__(self, policy: FailoverPolicy) -> None:
        self._policy = policy
        self._entries: deque[FailoverEntry] = deque()
        self._out: FailoverEntry | None = None
        # The lowest number of each entry, and of all of them how many records.
        self._lowest = SortedItems[int]()
        self._records = 0
        self.size = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries) + (self._out is not None)

    @property
    def records(self) -> int:
        """Records in it, those under way included."""
        return self._records + (self._out.unsettled if self._out is not None else 0)

    @property
    def oldest(self) -> int | None:
        """The lowest number of a record in it."""
        out = [] if self._out is None else [self._out.lowest]
        return min([*out, self._lowest.first] if self._lowest else out, default=None)

    def add(self, batch: Batch, places: Sequence[int]) -> list[int]:
        """Keep the records at these places of a batch; the numbers of those that had to make room."""
        self._enter(FailoverEntry.of(batch, places), last=True)
        gone: list[int] = []
        while len(self._entries) > self._policy.max_entries or self.size > self._policy.max_bytes:
            old = self._leave()
            self.size -= old.weight
            self.evicted += len(old)
            gone += old.numbers
        return gone

    def _enter(self, entry: FailoverEntry, *, last: bool) -> None:
        (self._entries.append if last else self._entries.appendleft)(entry)
        self._lowest.add(entry.lowest)
        self._records += len(entry)
        self.size += entry.weight

    def _leave(self) -> FailoverEntry:
        entry = self._entries.popleft()
        self._lowest.remove(entry.lowest)
        self._records -= len(entry)
        return entry

    def take(self) -> FailoverEntry | None:
        """The oldest entry, to be sent; `put_back` is to follow."""
        self._out = self._leave() if self._entries else None
        return self._out

    def put_back(self) -> bool:
        """The entry that was taken has been sent, as far as it went; whether nothing of it is left."""
        entry, self._out = self._out, None
        if entry is None:
            return True
        self.size -= entry.weight
        if not entry.left:
            return True
        for part in reversed(entry.rest()):
            self._enter(part, last=False)
        return False

    def take_all(self) -> list[Any]:
        """Empty it: for the report of a shutdown."""
        self.put_back()
        records = [record for entry in self._entries for record in entry.take_originals(range(len(entry)))]
        self._entries.clear()
        self._lowest.clear()
        self._records = self.size = 0
        return records
