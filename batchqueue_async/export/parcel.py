"""A batch on its way: its records, and the leases that each of them is settled with.

A record is known by its place in the batch. Whole batches, by far the most, are settled without looking at records.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from batchqueue_async.durable.frame import Run
    from batchqueue_async.durable.lease import Lease


class Parcel:
    """Records and their leases.

    Attributes:
        records: what the sink is given, as far as it could be decoded.
        numbers: their sequence numbers, by place.
        attempts: how often the one that was tried most has been sent, this time included.
        enqueued_ns: when the oldest came in.
        broken: places of records that can't be decoded, and why.
    """

    __slots__ = ("_leases", "_payloads", "_runs", "attempts", "broken", "enqueued_ns", "numbers", "records")

    def __init__(self, leases: list[Lease]) -> None:
        runs: list[Run] = []
        for lease in leases:
            own = lease._all
            runs += reversed(own) if lease._newest_first else own
        self._leases = leases
        self._runs = runs
        first = runs[0]
        if len(runs) == 1:
            frame = first.frame
            payloads: list[Any] = frame.payloads or []
            self._payloads = payloads if len(payloads) == first.high - first.low else payloads[first.low : first.high]
            self.numbers: Sequence[int] = range(first.seq, first.end)
            self.attempts = first.attempts
            self.enqueued_ns = frame.enqueued_ns
        else:
            self._payloads = [record for run in runs for record in (run.frame.payloads or [])[run.low : run.high]]
            self.numbers = list(chain.from_iterable(range(run.seq, run.end) for run in runs))
            self.attempts = max(run.attempts for run in runs)
            self.enqueued_ns = min(run.frame.enqueued_ns for run in runs)
        self.records = self._payloads
        self.broken: dict[int, PermanentError] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"Parcel({len(self)} records, attempts={self.attempts})"

    def decode(self, decode: Callable[[Sequence[bytes]], list[Any]]) -> None:
        """Make records of the payloads; those that can't be are `broken`."""
        payloads = self._payloads
        try:
            self.records = decode(payloads)
        except PermanentError:
            self.records = []
            for place, payload in enumerate(payloads):
                try:
                    self.records += decode([payload])
                except PermanentError as error:
                    self.records.append(payload)
                    self.broken[place] = error

    def replace(self, records: Sequence[Any]) -> None:
        """Send these instead, place by place."""
        if len(records) != len(self):
            raise PermanentError(
                f"prepare made {len(records)} records of {len(self)}; it must make one of each, in their order"
            )
        self.records = list(records)

    def take(self, places: Sequence[int]) -> list[Any]:
        """The records at these places, in a list of its own."""
        if isinstance(places, range) and places.step == 1:
            return self.records[places.start : places.stop]
        return [self.records[place] for place in places]

    def keys(self, places: Sequence[int], queue_id: str) -> list[str]:
        """The idempotency keys of the records at these places."""
        numbers = self.numbers
        return [f"{queue_id}/{numbers[place]}" for place in places]

    def attempts_by_place(self) -> list[int]:
        """How often each record has been sent, this time included."""
        return [run.attempts for run in self._runs for _ in range(run.low, run.high)]

    def ages(self, now_ns: int) -> list[float]:
        """Seconds since each record came in."""
        return [(now_ns - run.frame.enqueued_ns) * 1e-9 for run in self._runs for _ in range(run.low, run.high)]

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
