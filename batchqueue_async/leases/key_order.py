"""Order by key: a record waits while an earlier one with its key is leased, delayed or held."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heappop, heappush
from sys import getsizeof
from typing import TYPE_CHECKING

from batchqueue_async.leases.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable

_SPARE = 64
# What the key of a record that is out takes besides itself: its places, its number, and how often it is in use.
_KEY_COST = 200
# So many records may be out in any case: a small window doesn't make consumers take turns.
_LEAST = 1_000
# No record's key.
_NOBODY = object()


class KeyOrder:
    """Which keys are in use, and the records that wait for them.

    At most `lookahead` records are held, and the keys of those that are leased or delayed take about `memory` bytes:
    then no more are looked at until some are settled. `hold` says as what a record is kept that has to wait: with its
    payload, or without.

    A key that is no longer in use keeps its records here, and they are taken out as they are wanted, the oldest first:
    so what a settled record costs does not depend on how many wait for its key.
    """

    # Invariants: `_waiting` has the key of each held record, by its number; those of a key are in `_held`, in the order
    # of their numbers; `_by_age` has the number of each held record, and others that are gone; `_free` has that of the
    # oldest record of each key that is not in use, and others. `_used` is what the keys in `_keys` weigh.
    def __init__(
        self, key: Callable[[bytes], Hashable], lookahead: int, memory: int, hold: Callable[[Run], Run]
    ) -> None:
        self._key = key
        self._lookahead = lookahead
        self._memory = max(memory, _KEY_COST * _LEAST)
        self._used = 0
        self._hold = hold
        self._busy: dict[Hashable, int] = {}
        self._held: dict[Hashable, deque[Run]] = {}
        self._waiting: dict[int, Hashable] = {}
        self._by_age: list[int] = []
        self._free: list[int] = []
        # The keys of the records that are out, by their numbers: asked for once, and known when the payload is not.
        self._keys: dict[int, Hashable] = {}
        self.blocked = 0
        """How many of the held records wait for a key that is in use; the others can be leased now."""
        self.failures = 0

    @property
    def held(self) -> int:
        """How many records had to wait for their keys."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether so many records are held, or out, that no more may be looked at."""
        return self.held >= self._lookahead or self._used >= self._memory

    @property
    def room(self) -> int:
        """How many records may be looked at: 1 at least, for those that come back."""
        return max(1, min(self._lookahead - self.held, self.key_room))

    @property
    def key_room(self) -> int:
        """For how many records more there is room for their keys: 1 at least."""
        return max(1, (self._memory - self._used) // _KEY_COST)

    def admit(self, runs: Iterable[Run], mine: set[Hashable]) -> list[Run]:
        """The records of `runs` that may be leased now; the others are held until their key is free.

        `mine` are the keys that the same lease has already: it may have more records of these.
        """
        admitted: list[Run] = []
        for run in runs:
            for seq in range(run.seq, run.end):
                one = run.part(seq, seq + 1)
                key = self._of(one, mine)
                held = self._held.get(key)
                # Older than those that wait it is if it has come back, or has waited here until now.
                if (key in self._busy and key not in mine) or (held is not None and held[0].seq < seq):
                    self._wait(key, one)
                else:
                    mine.add(key)
                    if key not in self._busy and held is not None:
                        self.blocked += len(held)
                    self._busy[key] = self._busy.get(key, 0) + 1
                    self._keys[seq] = key
                    self._used += _weight(key)
                    _join(admitted, one)
        return admitted

    def _wait(self, key: Hashable, one: Run) -> None:
        held = self._held.setdefault(key, deque())
        if held and held[-1].seq > one.seq:
            held.insert(bisect_left(held, one.seq, key=_seq_of), self._hold(one))
        else:
            held.append(self._hold(one))
        self._waiting[one.seq] = key
        self.blocked += key in self._busy
        heappush(self._by_age, one.seq)
        if len(self._by_age) > 2 * len(self._waiting) + _SPARE:
            self._by_age = sorted(self._waiting)

    def release(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Records are no longer out: their keys are not in use on their account, and may be free."""
        for low, high in ranges:
            for seq in range(low, high):
                key = self._keys.pop(seq)
                self._used -= _weight(key)
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]
                    self.blocked -= len(self._held.get(key, ()))
                    self._note_free(key)
        if not self._keys:
            self._used = 0  # what a class says of its size may change

    def _note_free(self, key: Hashable) -> None:
        """The oldest record of a key, if it has any, may be the next to go."""
        if held := self._held.get(key):
            heappush(self._free, held[0].seq)
            if len(self._free) > 2 * len(self._held) + _SPARE:
                self._free = sorted(runs[0].seq for runs in self._held.values())

    def next_free(self, mine: Collection[Hashable] = ()) -> Run | None:
        """The oldest of the held records whose keys are free, or `mine` as far as they are known to be free."""
        while self._free:
            seq = self._free[0]
            key = self._waiting.get(seq, _NOBODY)
            if key is not _NOBODY and self._held[key][0].seq == seq and (key not in self._busy or key in mine):
                return self._held[key][0]
            heappop(self._free)
        return None

    def take_free(self, mine: Collection[Hashable] = ()) -> Run:
        """Take that one out; there has to be one."""
        self.next_free(mine)
        seq = heappop(self._free)
        key = self._waiting.pop(seq)
        held = self._held[key]
        run = held.popleft()
        self._left(key, held, 1)
        return run

    def _left(self, key: Hashable, held: deque[Run], count: int) -> None:
        """So many records of this key were taken out, and these are left."""
        if key in self._busy:
            self.blocked -= count
        if held:
            self._note_free(key)
        else:
            del self._held[key]

    def oldest_held(self) -> int | None:
        """The number of the oldest record that waits for its key."""
        while self._by_age and self._by_age[0] not in self._waiting:
            heappop(self._by_age)
        return self._by_age[0] if self._by_age else None

    def drop_oldest(self) -> Run:
        """Take that one out; there has to be one."""
        self.oldest_held()
        seq = heappop(self._by_age)
        key = self._waiting.pop(seq)
        held = self._held[key]
        run = held.popleft()  # the oldest of all is the oldest of its key
        self._left(key, held, 1)
        return run

    def drop_held(self, wanted: Callable[[Run], bool]) -> list[Run]:
        """Take out the held records that `wanted` says."""
        dropped: list[Run] = []
        for key, runs in list(self._held.items()):
            gone = [run for run in runs if wanted(run)]
            if not gone:
                continue
            dropped += gone
            self._held[key] = left = deque(run for run in runs if not wanted(run))
            self._left(key, left, len(gone))
        for run in dropped:
            del self._waiting[run.seq]
        return dropped

    def _of(self, one: Run, mine: set[Hashable]) -> Hashable:
        payloads = one.frame.payloads or []
        try:
            key = self._key(payloads[one.low])
            # It is hashed here, and compared with every key that it will be compared with.
            for keys in (self._busy, self._held, mine):
                _ = key in keys
        except Exception:  # noqa: BLE001 - the user's function; the record is as good as any, and so are its neighbours
            # Those whose key can't be told are in order among each other.
            self.failures += 1
            return None
        return key


def _seq_of(run: Run) -> int:
    return run.seq


def _weight(key: Hashable) -> int:
    try:
        return _KEY_COST + getsizeof(key, 0)
    except Exception:  # noqa: BLE001 - the user's class; its records are as good as any
        return _KEY_COST


def _join(runs: list[Run], one: Run) -> None:
    last = runs[-1] if runs else None
    if last is not None and last.frame is one.frame and last.end == one.seq and last.attempts == one.attempts:
        runs[-1] = Run(last.seq, last.frame, last.low, one.high, last.attempts)
    else:
        runs.append(one)
