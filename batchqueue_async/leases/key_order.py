"""Order by key: a record waits while an earlier one with its key is leased, delayed or held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.leases.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


class KeyOrder:
    """Which keys are in use, and the records that wait for them. At most `lookahead` records are held."""

    def __init__(self, key: Callable[[bytes], Hashable], lookahead: int) -> None:
        self._key = key
        self._lookahead = lookahead
        self._busy: dict[Hashable, int] = {}
        self._held: dict[Hashable, list[Run]] = {}
        # The keys of the records that are out, by their numbers: asked for once, and known when the payload is not.
        self._keys: dict[int, Hashable] = {}
        self.held = 0
        self.failures = 0

    @property
    def full(self) -> bool:
        """Whether so many records are held that no more may be looked at."""
        return self.held >= self._lookahead

    @property
    def room(self) -> int:
        """How many records may be looked at: 1 at least, for those that come back."""
        return max(1, self._lookahead - self.held)

    def admit(self, runs: Iterable[Run]) -> list[Run]:
        """The records of `runs` that may be leased now; the others are held until their key is free."""
        admitted: list[Run] = []
        mine: dict[Hashable, int] = {}
        for run in runs:
            for seq in range(run.seq, run.end):
                one = run.part(seq, seq + 1)
                key = self._of(one)
                if key in self._busy or key in self._held:
                    self._held.setdefault(key, []).append(one)
                    self.held += 1
                else:
                    mine[key] = mine.get(key, 0) + 1
                    self._keys[seq] = key
                    _join(admitted, one)
        self._busy.update(mine)
        return admitted

    def release(self, runs: Iterable[Run]) -> list[Run]:
        """Records whose keys are no longer in use on their account; the held records that may go now."""
        freed: list[Run] = []
        for run in runs:
            for seq in range(run.seq, run.end):
                key = self._keys.pop(seq)
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]
                    held = self._held.pop(key, [])
                    self.held -= len(held)
                    freed += held
        return freed

    def oldest_held(self) -> Run | None:
        """The oldest record that waits for its key."""
        return min((runs[0] for runs in self._held.values()), default=None, key=lambda run: run.seq)

    def drop_held(self, wanted: Callable[[Run], bool]) -> list[Run]:
        """Take out the held records that `wanted` says."""
        dropped: list[Run] = []
        for key, runs in list(self._held.items()):
            gone = [run for run in runs if wanted(run)]
            if not gone:
                continue
            dropped += gone
            left = [run for run in runs if not wanted(run)]
            if left:
                self._held[key] = left
            else:
                del self._held[key]
        self.held -= len(dropped)
        return dropped

    def _of(self, one: Run) -> Hashable:
        payloads = one.frame.payloads or []
        try:
            key = self._key(payloads[one.low])
            hash(key)
        except Exception:  # noqa: BLE001 - the user's function; the record is as good as any, and so are its neighbours
            # Those whose key can't be told are in order among each other.
            self.failures += 1
            return None
        return key


def _join(runs: list[Run], one: Run) -> None:
    last = runs[-1] if runs else None
    if last is not None and last.frame is one.frame and last.end == one.seq and last.attempts == one.attempts:
        runs[-1] = Run(last.seq, last.frame, last.low, one.high, last.attempts)
    else:
        runs.append(one)
