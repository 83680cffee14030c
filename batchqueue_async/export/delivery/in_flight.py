"""A batch on its way: its records, and the leases that each of them is settled with.

A record is known by its place in the batch. Whole batches, by far the most, are settled without looking at records.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from batchqueue_async.leases.lease import Lease


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
    """

    __slots__ = ("attempts", "broken", "enqueued_ns", "numbers", "originals", "prepared", "records")

    def __init__(self, records: list[Any], numbers: Sequence[int], *, attempts: int, enqueued_ns: int) -> None:
        self.records = records
        self.numbers = numbers
        self.attempts = attempts
        self.enqueued_ns = enqueued_ns
        self.broken: dict[int, PermanentError] = {}
        self.originals: list[Any] | None = None
        self.prepared: Any = None

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

    def keys(self, places: Sequence[int], queue_id: str) -> list[str]:
        """The idempotency keys of the records at these places."""
        numbers = self.numbers
        return [f"{queue_id}/{numbers[place]}" for place in places]

    def waves(self, key: Callable[[Any], Hashable]) -> list[Sequence[int]]:
        """The places in sends that hold each key once, so that nothing of a key goes beside what may be refused."""
        waves: list[list[int]] = []
        seen: dict[Hashable, int] = {}
        for place, record in enumerate(self.records):
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


class Parcel(Batch):
    """A batch of the send queue, and the leases that its records are settled with."""

    __slots__ = ("_leases", "_payloads", "_runs")

    def __init__(self, leases: list[Lease]) -> None:
        runs = [run for lease in leases for run in lease._all]
        self._leases = leases
        self._runs = runs
        first = runs[0]
        numbers: Sequence[int]
        if len(runs) == 1 and not leases[0]._newest_first:
            payloads: list[Any] = first.frame.payloads or []
            whole = len(payloads) == first.high - first.low
            self._payloads = payloads if whole else payloads[first.low : first.high]
            numbers, attempts, enqueued_ns = range(first.seq, first.end), first.attempts, first.frame.enqueued_ns
        else:
            turn = -1 if leases[0]._newest_first else 1
            self._payloads = [
                record for run in runs for record in (run.frame.payloads or [])[run.low : run.high][::turn]
            ]
            numbers = list(chain.from_iterable(range(run.seq, run.end)[::turn] for run in runs))
            attempts = max(run.attempts for run in runs)
            enqueued_ns = min(run.frame.enqueued_ns for run in runs)
        super().__init__(self._payloads, numbers, attempts=attempts, enqueued_ns=enqueued_ns)

    def decode(self, decode: Callable[[Sequence[bytes]], list[Any]]) -> None:
        """Make records of the payloads; those that can't be are `broken`."""
        self.change(self._payloads, decode)

    def prepare(self, prepare: Callable[[list[Any]], Sequence[Any]]) -> None:
        """Make of the records what is sent, one of each; where that fails they are `broken`."""

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
        return [run.attempts for run in self._runs for _ in range(run.low, run.high)]

    def by_attempts(self, places: Sequence[int]) -> dict[int, Sequence[int]]:
        """The places by how often their records have been sent, this time included."""
        if all(run.attempts == self.attempts for run in self._runs):
            return {self.attempts: places}
        attempts = self.attempts_by_place()
        found: dict[int, list[int]] = {}
        for place in places:
            found.setdefault(attempts[place], []).append(place)
        return dict(found)

    def ages(self, now_ns: int) -> list[float]:
        """Seconds since each record came in."""
        return [(now_ns - run.frame.enqueued_ns) * 1e-9 for run in self._runs for _ in range(run.low, run.high)]

    # -- settling ------------------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> int:
        """Records that are still to be settled."""
        return sum(lease.unsettled for lease in self._leases)

    async def ack(self, places: Sequence[int] | None = None) -> int:
        """The records, all that are left or these, are done; how many."""
        done = 0
        for lease, seqs in self._shares(places):
            done += await lease.ack(seqs)
        return done

    async def nack(
        self, delay: float, places: Sequence[int] | None = None, *, reason: str, counted: bool = True
    ) -> int:
        """The records, all that are left or these, are to be sent again; how many."""
        done = 0
        for lease, seqs in self._shares(places):
            done += await lease.nack(delay, seqs, reason=reason, counted=counted)
        return done

    async def dead_letter(self, reason: str, places: Sequence[int] | None = None) -> int:
        """The records, all that are left or these, are given up; how many."""
        done = 0
        for lease, seqs in self._shares(places):
            done += await lease.dead_letter(reason, seqs)
        return done

    def extend(self) -> None:
        """Let the leases' time begin anew."""
        for lease in self._leases:
            lease.extend()

    def _shares(self, places: Sequence[int] | None) -> Iterable[tuple[Lease, list[int] | None]]:
        """Each lease with its part of the places, as sequence numbers; None is all."""
        if places is None or len(places) == len(self):
            return [(lease, None) for lease in self._leases]
        numbers = [self.numbers[place] for place in places]
        if len(self._leases) == 1:
            return [(self._leases[0], numbers)]
        owners = {seq: lease for lease in self._leases for run in lease._all for seq in range(run.seq, run.end)}
        shares: dict[int, tuple[Lease, list[int]]] = {}
        for seq in numbers:
            lease = owners[seq]
            shares.setdefault(id(lease), (lease, []))[1].append(seq)
        return list(shares.values())
