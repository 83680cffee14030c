"""Order by key: a record waits while an earlier one with its key is leased, delayed or held."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from sys import getsizeof
from typing import TYPE_CHECKING

from batchqueue_async.leases.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

_SPARE = 64
# What the key of a record that is out takes besides itself: its places, its number, and how often it is in use.
_KEY_COST = 200
# So many records may be out in any case: a small window doesn't make consumers take turns.
_LEAST = 1_000


class KeyOrder:
    """Which keys are in use, and the records that wait for them.

    At most `lookahead` records are held, and the keys of those that are leased or delayed take about `memory` bytes:
    then no more are looked at until some are settled. `hold` says as what a record is kept that has to wait: with its
    payload, or without.
    """

    # Invariants: `_waiting` has the key of each held record, by its number; `_by_age` has each of those numbers, and
    # others that are gone. `_used` is what the keys in `_keys` weigh.
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
        # The keys of the records that are out, by their numbers: asked for once, and known when the payload is not.
        self._keys: dict[int, Hashable] = {}
        self.failures = 0

    @property
    def held(self) -> int:
        """How many records wait for their keys."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether so many records are held, or out, that no more may be looked at."""
        return self.held >= self._lookahead or self._used >= self._memory

    @property
    def room(self) -> int:
        """How many records may be looked at: 1 at least, for those that come back."""
        return max(1, min(self._lookahead - self.held, (self._memory - self._used) // _KEY_COST))

    def admit(self, runs: Iterable[Run]) -> list[Run]:
        """The records of `runs` that may be leased now; the others are held until their key is free."""
        admitted: list[Run] = []
        mine: dict[Hashable, int] = {}
        for run in runs:
            for seq in range(run.seq, run.end):
                one = run.part(seq, seq + 1)
                key = self._of(one, mine)
                if key in self._busy or key in self._held:
                    self._held.setdefault(key, deque()).append(self._hold(one))
                    self._waiting[seq] = key
                    self._by_age_add(seq)
                else:
                    mine[key] = mine.get(key, 0) + 1
                    self._keys[seq] = key
                    self._used += _weight(key)
                    _join(admitted, one)
        self._busy.update(mine)
        return admitted

    def _by_age_add(self, seq: int) -> None:
        heappush(self._by_age, seq)
        if len(self._by_age) > 2 * len(self._waiting) + _SPARE:
            self._by_age = sorted(self._waiting)

    def release(self, ranges: Iterable[tuple[int, int]]) -> list[Run]:
        """Records whose keys are no longer in use on their account; the held records that may go now."""
        freed: list[Run] = []
        for low, high in ranges:
            for seq in range(low, high):
                key = self._keys.pop(seq)
                self._used -= _weight(key)
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]
                    held = self._held.pop(key, ())
                    for run in held:
                        del self._waiting[run.seq]
                    freed += held
        if not self._keys:
            self._used = 0  # what a class says of its size may change
        return freed

    def oldest_held(self) -> int | None:
        """The number of the oldest record that waits for its key."""
        while self._by_age and self._by_age[0] not in self._waiting:
            heappop(self._by_age)
        return self._by_age[0] if self._by_age else None

    def drop_oldest(self) -> Run:
        """Take that one out."""
        seq = heappop(self._by_age)
        held = self._held[key := self._waiting.pop(seq)]
        # The oldest of all is the oldest of its key, unless those of a key came in another order than their numbers'.
        run = held[0] if held[0].seq == seq else next(run for run in held if run.seq == seq)
        held.remove(run)
        if not held:
            del self._held[key]
        return run

    def drop_held(self, wanted: Callable[[Run], bool]) -> list[Run]:
        """Take out the held records that `wanted` says."""
        dropped: list[Run] = []
        for key, runs in list(self._held.items()):
            gone = [run for run in runs if wanted(run)]
            if not gone:
                continue
            dropped += gone
            left = deque(run for run in runs if not wanted(run))
            if left:
                self._held[key] = left
            else:
                del self._held[key]
        for run in dropped:
            del self._waiting[run.seq]
        return dropped

    def _of(self, one: Run, mine: dict[Hashable, int]) -> Hashable:
        payloads = one.frame.payloads or []
        try:
            key = self._key(payloads[one.low])
            # It is hashed here, and compared with every key that it will be compared with.
            for keys in (self._busy, self._held, mine):
                keys.get(key)
        except Exception:  # noqa: BLE001 - the user's function; the record is as good as any, and so are its neighbours
            # Those whose key can't be told are in order among each other.
            self.failures += 1
            return None
        return key


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
