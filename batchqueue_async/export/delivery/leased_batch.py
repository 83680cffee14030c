"""A batch on its way: its records, and the leases that each of them is settled with.

A record is known by its place in the batch. Whole batches, by far the most, are settled without looking at records.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async.errors import PermanentError
from batchqueue_async.export.delivery.part_lease import PartLease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable, Sequence

    from batchqueue_async.export.send_queue.protocol import QueueLease, Span

_Lease = TypeVar("_Lease")

STEP = 150
"""Records that one step of the loop settles: no more than a lease settles in one, so that none is settled uncounted."""


class Batch:
    """Records on their way, by place; what settles them is up to the kinds of batches.

    Attributes:
        records: what the sink is given, as far as it could be decoded.
        numbers: their sequence numbers, by place.
        attempts: how often the one that was tried most has been sent, this time included.
        enqueued_ns: when the oldest came in.
        broken: places of records that can't be decoded or prepared, and why.
        originals: the records before they were prepared; None if they were not.
        prepared: what the sink made of all of the records for `send_prepared`; None if it did not.
        kept: whether it waits for its repetition as it is.
        weight: its bytes, as the send queue counts them.
    """

    __slots__ = ("attempts", "broken", "enqueued_ns", "kept", "numbers", "originals", "prepared", "records", "weight")

    def __init__(
        self, records: list[Any], numbers: Sequence[int], *, attempts: int, enqueued_ns: int, weight: int
    ) -> None:
        self.records = records
        self.numbers = numbers
        self.attempts: int = attempts
        self.enqueued_ns = enqueued_ns
        self.weight = weight
        self.broken: dict[int, PermanentError] = {}
        self.originals: list[Any] | None = None
        self.prepared: Any = None
        self.kept = False

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} records, attempts={self.attempts})"

    def take(self, places: Sequence[int]) -> list[Any]:
        """The records at these places, in a list of its own."""
        if isinstance(places, range) and places.step == 1:
            return self.records[places.start : places.stop]
        return [self.records[place] for place in places]

    def take_originals(self, places: Sequence[int]) -> list[Any]:
        """The same, as they were handed over."""
        originals = self.originals
        return self.take(places) if originals is None else [originals[place] for place in places]

    def numbers_at(self, places: Sequence[int]) -> Sequence[int]:
        """The sequence numbers of the records at these places."""
        if len(places) == len(self):
            return self.numbers
        numbers = self.numbers
        return [numbers[place] for place in places]

    def waves(self, key: Callable[[Any], Hashable]) -> list[Sequence[int]]:
        """The places in sends that hold each key once, so that nothing of a key goes with what may be refused.

        The key is asked of the records as they were handed over: what was made of them for the sink may have none.
        """
        waves: list[list[int]] = []
        seen: dict[Hashable, int] = {}
        for place, record in enumerate(self.records if self.originals is None else self.originals):
            if place in self.broken:
                continue
            found = key(record)
            number = seen[found] = seen.get(found, -1) + 1
            if number == len(waves):
                waves.append([])
            waves[number].append(place)
        return list(waves)

    # -- what the kinds of batches do each in their way ----------------------------------------------------------

    def attempts_by_place(self) -> list[int]:
        """How often each record has been sent, this time included."""
        raise NotImplementedError

    def by_attempts(self, places: Sequence[int]) -> dict[int, Sequence[int]]:
        """The places by how often their records have been sent."""
        return {self.attempts: places}

    def ages(self, now_ns: int) -> list[float]:
        """Seconds since each record came in."""
        raise NotImplementedError

    @property
    def unsettled(self) -> int:
        """Records that are still to be settled."""
        raise NotImplementedError

    async def ack(self, places: Sequence[int] | None = None) -> int:
        """The records, all that are left or these, are done; how many."""
        raise NotImplementedError

    async def nack(
        self, delay: float, places: Sequence[int] | None = None, *, reason: str, counted: bool = True
    ) -> int:
        """The records, all that are left or these, are to be sent again; how many."""
        raise NotImplementedError

    async def dead_letter(self, reason: str, places: Sequence[int] | None = None) -> int:
        """The records, all that are left or these, are given up; how many."""
        raise NotImplementedError

    def extend(self) -> None:
        """Let the time that they may take begin anew."""

    def divide(self, places: Sequence[int]) -> None:
        """Where nothing is leased: these records are to be sent again as a batch of their own."""


class LeasedBatch(Batch):
    """A batch of the send queue, and the leases that its records are settled with.

    A batch that is kept together for its repetition is the same object each time it is sent; `repeats` counts how
    often it was sent before, since its lease was granted only once.

    Attributes:
        repeats: how often it was sent since its records were leased, this time not included.
        apart: whether it is never put together with other records again: a part of a batch that was refused as a whole,
            or a batch that was under way when the exporter was closed.
        made: whether its records have been decoded and prepared.
        note: the number of its last send in the attempt log; 0 where there is none.
    """

    __slots__ = ("_leases", "_payloads", "_starts", "apart", "made", "note", "repeats")

    def __init__(self, leases: list[QueueLease]) -> None:
        self._leases = leases
        first = leases[0]
        if len(leases) == 1:
            self._payloads = first.payloads
            numbers = first.numbers
        else:
            self._payloads = list(chain.from_iterable(lease.payloads for lease in leases))
            numbers = list(chain.from_iterable(lease.numbers for lease in leases))
        self._starts = [0, *accumulate(map(len, leases))]
        self.repeats = 0
        self.apart = self.made = False
        self.note = 0
        spans = self._spans()
        super().__init__(
            self._payloads,
            numbers,
            attempts=max([span.attempts for span in spans]),
            enqueued_ns=min([span.enqueued_ns for span in spans]),
            weight=sum([lease.weight for lease in leases]),
        )

    def _spans(self) -> list[Span]:
        leases = self._leases
        return leases[0].spans if len(leases) == 1 else [span for lease in leases for span in lease.spans]

    def repeat(self) -> None:
        """It is sent once more, as it is."""
        self.kept = False
        self.repeats += 1
        self.attempts += 1

    def unrepeat(self) -> None:
        """It was not sent after all."""
        self.repeats -= 1
        self.attempts -= 1

    def part(self, places: Sequence[int]) -> LeasedBatch:
        """Some of its records as a batch of their own, never put together with others; they are this one's no more."""
        places = sorted(places)
        owners = [each if isinstance(each, PartLease) else PartLease(each, range(len(each))) for each in self._leases]
        self._leases = list(owners)
        parts = [owner.split(indices) for owner, indices in self._by_lease(owners, places)]
        part = LeasedBatch(list(parts))
        part.records = self.take(places)
        part.originals = None if self.originals is None else self.take_originals(places)
        part.apart = True
        part.made = self.made
        part.repeats = self.repeats
        part.attempts += self.repeats
        return part

    def decode(self, decode: Callable[[Sequence[bytes]], list[Any]]) -> None:
        """Make the records of what the disk has; the places of those that can't be are in `broken`."""
        self.change(self._payloads, decode)

    def prepare(self, prepare: Callable[[list[Any]], Sequence[Any]]) -> None:
        """Let the user's function make what is sent; a record for which it fails goes to the dead letters."""

        def one_of_each(records: Sequence[Any]) -> list[Any]:
            try:
                made = list(prepare(list(records)))
            except Exception as error:
                raise PermanentError(f"prepare raised {type(error).__name__}") from error
            if len(made) != len(records):
                raise PermanentError(
                    f"prepare made {len(made)} records of {len(records)}; it must make one of each, in their order"
                )
            return made

        self.originals = self.records
        self.change(self.records, one_of_each)

    def change(self, source: Sequence[Any], change: Callable[[Sequence[Any]], list[Any]]) -> None:
        """Make other records, all at once or, where that fails, one by one."""
        try:
            self.records = change(source)
        except PermanentError:
            records: list[Any] = []
            for place, each in enumerate(source):
                try:
                    records += [each] if place in self.broken else change([each])
                except PermanentError as error:
                    records.append(each)
                    self.broken[place] = error
            self.records = records

    def attempts_by_place(self) -> list[int]:
        """How often each record has been sent, this time included."""
        return [span.attempts + self.repeats for span in self._spans() for _ in range(span.records)]

    def by_attempts(self, places: Sequence[int]) -> dict[int, Sequence[int]]:
        """The places by how often their records have been sent, this time included."""
        if all(span.attempts + self.repeats == self.attempts for span in self._spans()):
            return {self.attempts: places}
        attempts = self.attempts_by_place()
        found: dict[int, list[int]] = {}
        for place in places:
            found.setdefault(attempts[place], []).append(place)
        return dict(found)

    def ages(self, now_ns: int) -> list[float]:
        """Seconds since each record came in."""
        return [(now_ns - span.enqueued_ns) * 1e-9 for span in self._spans() for _ in range(span.records)]

    # -- settling ------------------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> int:
        """Records that are still to be settled."""
        return sum([lease.unsettled for lease in self._leases])

    async def ack(self, places: Sequence[int] | None = None) -> int:
        """The records, all that are left or these, are done; how many."""
        done = 0
        for lease, indices in self._shares(places):
            done += await lease.ack(indices)
        return done

    async def nack(
        self, delay: float, places: Sequence[int] | None = None, *, reason: str, counted: bool = True
    ) -> int:
        """The records, all that are left or these, are to be sent again; how many."""
        done = 0
        for lease, indices in self._shares(places):
            done += await lease.nack(delay, indices, reason=reason, counted=counted, more=self.repeats)
        return done

    async def dead_letter(self, reason: str, places: Sequence[int] | None = None) -> int:
        """The records, all that are left or these, are given up; how many."""
        done = 0
        for lease, indices in self._shares(places):
            done += await lease.dead_letter(reason, indices)
        return done

    def extend(self) -> None:
        """Let the leases' time begin anew."""
        for lease in self._leases:
            lease.extend()

    def _shares(self, places: Sequence[int] | None) -> list[tuple[QueueLease, Sequence[int] | None]]:
        """Each lease with its part of the places, as its own indices; None is all."""
        leases = self._leases
        if places is None or len(places) == len(self):
            return [(lease, None) for lease in leases]
        return list(self._by_lease(leases, places))

    def _by_lease(self, leases: Sequence[_Lease], places: Sequence[int]) -> list[tuple[_Lease, Sequence[int]]]:
        """Each lease that has some of the places, with those, as its own indices."""
        if len(leases) == 1:
            return [(leases[0], places)]
        shares: list[tuple[_Lease, Sequence[int]]] = []
        ordered, at = sorted(places), 0
        for lease, start, end in zip(leases, self._starts, self._starts[1:], strict=False):
            low = at
            while at < len(ordered) and ordered[at] < end:
                at += 1
            if at > low:
                shares.append((lease, [place - start for place in ordered[low:at]]))
        return shares


async def portions(batch: Batch, places: Sequence[int]) -> AsyncIterator[Sequence[int]]:
    """Places to settle, so many between two turns of the loop; a batch as a whole costs no more than a record."""
    if len(places) <= STEP or len(places) == len(batch) or isinstance(places, range):
        if places:
            yield places
        return
    for low in range(0, len(places), STEP):
        if low:
            await asyncio.sleep(0)
        yield places[low : low + STEP]
