"""Order by key: a record waits while an earlier one with its key is leased, delayed or held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.durable.state.frame import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


class KeyGate:
    """Which keys are in use, and the records that wait for them. At most `lookahead` records are held."""

    def __init__(self, key: Callable[[bytes], Hashable], lookahead: int) -> None:
        self._key = key
        self._lookahead = lookahead
        self._busy: dict[Hashable, int] = {}
        self._held: dict[Hashable, list[Run]] = {}
        self.held = 0

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
                    _join(admitted, one)
        self._busy.update(mine)
        return admitted

    def release(self, runs: Iterable[Run]) -> list[Run]:
        """Records whose keys are no longer in use on their account; the held records that may go now."""
        freed: list[Run] = []
        for run in runs:
            for seq in range(run.seq, run.end):
                key = self._of(run.part(seq, seq + 1))
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]
                    held = self._held.pop(key, [])
                    self.held -= len(held)
                    freed += held
        return freed

    def _of(self, one: Run) -> Hashable:
        payloads = one.frame.payloads or []
        return self._key(payloads[one.low])


def _join(runs: list[Run], one: Run) -> None:
    last = runs[-1] if runs else None
    if last is not None and last.frame is one.frame and last.end == one.seq and last.attempts == one.attempts:
        runs[-1] = Run(last.seq, last.frame, last.low, one.high, last.attempts)
    else:
        runs.append(one)
