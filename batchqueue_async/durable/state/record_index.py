"""Where each record is: its segment, and, for those that only the disk has, whether they are delayed or ready again.

What is known of a record is in its segment, as ranges of sequence numbers: settled, delayed, given back, and how often
it was leased. So a backlog that was leased and given back, record by record, takes some bytes for each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.durable.state.delays import Delays
from batchqueue_async.durable.state.ranges import RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchqueue_async.durable.state.table import Segment

_AT_ONCE = 1_000
# Records that are closer on the disk than this are read together, with what is between them.
_GAP = 16 << 10
_RANGES = 256


class Stretch(NamedTuple):
    """A piece of a segment to read: records of [low, high), in frames between `start` and `end`.

    `least` is the number that the frame at `start` may begin with.
    """

    number: int
    start: int
    end: int
    least: int
    low: int
    high: int


class RecordIndex:
    """The segments of one queue by the numbers of their records, and the records that wait on the disk."""

    # Invariants: `_order` is in the order of `_firsts`; `_delayed_in` and `_returned_in` have the numbers of the
    # segments whose sets are not empty, rising.
    def __init__(self, segments: Iterable[Segment]) -> None:
        self._order = sorted(segments, key=lambda entry: (entry.first, entry.number))
        self._firsts = [entry.first for entry in self._order]
        self._by_number = {entry.number: entry for entry in self._order}
        self._delayed_in: list[int] = []
        self._returned_in: list[int] = []
        self._delays = Delays()
        self.delayed = 0
        """Records that wait for the delay of their nack."""

    # Segments

    def add(self, entry: Segment) -> None:
        """A segment was opened."""
        place = bisect_right(self._firsts, entry.first)
        self._firsts.insert(place, entry.first)
        self._order.insert(place, entry)
        self._by_number[entry.number] = entry

    def forget(self, entry: Segment) -> None:
        """A segment is gone, with all that it held."""
        place = bisect_left(self._firsts, entry.first)
        while self._order[place] is not entry:
            place += 1
        del self._order[place]
        del self._firsts[place]
        del self._by_number[entry.number]
        self.discard(entry)

    def at(self, seq: int) -> Segment | None:
        """The segment that holds a record; of two, what was written last."""
        place = bisect_right(self._firsts, seq)
        while place:
            place -= 1
            if seq < self._order[place].end:
                return self._order[place]
        return None

    def parts(self, low: int, high: int) -> Iterator[tuple[Segment, int, int]]:
        """[low, high) by segments; what no segment holds is left out."""
        firsts = self._firsts
        while low < high:
            place = bisect_right(firsts, low)
            entry = self._order[place - 1] if place else None
            if entry is not None and high <= entry.end and (place == len(firsts) or high <= firsts[place]):
                yield entry, low, high  # the usual case: all of it is in one
                return
            entry = self.at(low)
            if entry is None:
                low = firsts[place] if place < len(firsts) else high
                continue
            stop = min(high, entry.end, *firsts[place : place + 1])
            yield entry, low, stop
            low = stop

    def moved(self, old: Segment, new: Segment, first_seq: int, shift: int) -> None:
        """The records of `old` from this number on are in `new` now, `shift` bytes further on."""
        new.delayed, new.returned = old.delayed.split(first_seq), old.returned.split(first_seq)
        new.take_places(old, first_seq, shift)
        for entry in (old, new):
            _note(self._delayed_in, entry.number, entry.delayed)
            _note(self._returned_in, entry.number, entry.returned)

    # Records that only the disk has

    def delay(self, due: float, low: int, high: int) -> None:
        """These wait for their time."""
        for entry, start, stop in self.parts(low, high):
            self.delayed += entry.delayed.add(start, stop)
            _note(self._delayed_in, entry.number, entry.delayed)
        self._delays.add(due, low, high)

    @property
    def next_due(self) -> float | None:
        """When the next of them are due."""
        return self._delays.next_due

    def wake(self, now: float) -> list[tuple[int, int]]:
        """The next ranges that are due by now: as many as one step of the loop should take. They are the caller's."""
        woken: list[tuple[int, int]] = []
        for low, high in self._delays.pop(now, _AT_ONCE):
            for entry, start, stop in self.parts(low, high):
                woken += entry.delayed.present(start, stop)
                self._take(entry.delayed, start, stop)
                _note(self._delayed_in, entry.number, entry.delayed)
        return woken

    def wake_all(self) -> None:
        """Everything that is delayed is ready now."""
        for number in self._delayed_in:
            entry = self._by_number[number]
            small, large = sorted((entry.delayed, entry.returned), key=len)
            for low, high in small:
                large.add(low, high)
            entry.delayed, entry.returned = RangeSet(), large
            _note(self._returned_in, number, large)
        self._delayed_in.clear()
        self._delays.clear()
        self.delayed = 0

    def _take(self, delayed: RangeSet, low: int, high: int) -> None:
        self.delayed -= delayed.remove(low, high)

    def give_back(self, low: int, high: int) -> None:
        """These are ready to be delivered again."""
        for entry, start, stop in self.parts(low, high):
            entry.returned.add(start, stop)
            _note(self._returned_in, entry.number, entry.returned)

    @staticmethod
    def cut(entry: Segment, low: int, high: int, most: int) -> tuple[int, bool]:
        """Where the first `most` ranges of [low, high) end that are to be read, and whether there are more of them."""
        ranges = list(islice(entry.returned.present(low, high), most + 1))
        return (ranges[most - 1][1], True) if len(ranges) > most else (high, False)

    def read(self, entry: Segment, low: int, high: int) -> list[tuple[int, int]]:
        """What of [low, high) was to be read: it is in memory now, or lost."""
        found = list(entry.returned.present(low, high))
        entry.returned.remove(low, high)
        _note(self._returned_in, entry.number, entry.returned)
        return found

    def drop(self, entry: Segment, low: int, high: int) -> list[tuple[int, int]]:
        """Take out what is delayed of [low, high), and what is given back; the parts that were delayed."""
        found = list(entry.delayed.present(low, high))
        self._take(entry.delayed, low, high)
        entry.returned.remove(low, high)
        _note(self._delayed_in, entry.number, entry.delayed)
        _note(self._returned_in, entry.number, entry.returned)
        return found

    def discard(self, entry: Segment) -> None:
        """Everything of a segment is settled."""
        self.drop(entry, entry.first, entry.end)

    @property
    def any_returned(self) -> bool:
        """Whether anything is to be read and delivered again."""
        return bool(self._returned_in)

    def first_returned(self) -> int | None:
        """The lowest number that is to be read and delivered again."""
        return self._by_number[self._returned_in[0]].returned.first if self._returned_in else None

    def last_returned(self) -> int | None:
        """One more than the highest such number."""
        return self._by_number[self._returned_in[-1]].returned.end if self._returned_in else None

    def oldest(self) -> tuple[Segment, int, int] | None:
        """The oldest records that wait on the disk, delayed or given back, as far as they are in one range."""
        found: list[tuple[int, int, Segment]] = []
        for numbers in (self._delayed_in, self._returned_in):
            for entry in (self._by_number[number] for number in numbers[:1]):
                waiting = entry.delayed if numbers is self._delayed_in else entry.returned
                low, high = next(iter(waiting))
                found.append((low, high, entry))
        if not found:
            return None
        low, high, entry = min(found, key=lambda each: each[0])
        return entry, low, high

    def aged(self, cutoff: int, oldest: int) -> list[Segment]:
        """Segments with records that wait on the disk and whose records were all put between these times."""
        numbers = {*self._delayed_in, *self._returned_in}
        entries = [self._by_number[number] for number in sorted(numbers)]
        return [entry for entry in entries if oldest < entry.newest_ns < cutoff]

    def stretch(self, size: int, *, newest_first: bool) -> Stretch | None:
        """What to read for the records that are to be delivered next, of about `size` bytes."""
        if not self._returned_in:
            return None
        entry = self._by_number[self._returned_in[-1 if newest_first else 0]]
        returned = entry.returned
        low, high = next(reversed(returned) if newest_first else iter(returned))
        low, high = entry.cut(low, high, size, newest_first=newest_first)
        start, end, least = entry.near(low, high)
        for _ in range(1, _RANGES):
            # Whatever else is between these offsets is read anyway.
            if newest_first:
                low = min(low, least)
                following = returned.last_before(low)
            else:
                high = max(high, entry.reach(high))
                following = next(returned.present(high, max(high, entry.end)), None)
            if following is None:
                break
            place = entry.near(*following)
            apart = start - place[1] if newest_first else place[0] - end
            total = end - place[0] if newest_first else place[1] - start
            if apart > _GAP or total > size:
                break
            if newest_first:
                low, start, least = following[0], place[0], place[2]
            else:
                high, end = following[1], place[1]
        return Stretch(entry.number, start, end, least, low, high)


def _note(numbers: list[int], number: int, waiting: RangeSet) -> None:
    """Keep `numbers` as the segments in which anything waits."""
    place = bisect_left(numbers, number)
    there = place < len(numbers) and numbers[place] == number
    if waiting.count and not there:
        insort(numbers, number)
    elif there and not waiting.count:
        del numbers[place]
