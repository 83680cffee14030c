"""Which records were being sent when the process ended: so that a record whose send kills the process is found.

One line is appended before a send and one after it. They are not synced: what has been written to a file survives the
end of the process, and the end of the machine is nobody's record's doing. What the last run left open counts as an
attempt that ended with the process; the counts of those records are carried on until the records are settled.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from batchqueue_async._support import log
from batchqueue_async._support.log import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

NAME = "sending.log"
_MOST_BYTES = 256 << 10
_MOST_CARRIED = 100_000


class AttemptLog:
    """The sends of one exporter with a directory.

    Attributes:
        crashes: by number of a record, how many of its sends the process did not survive.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._descriptor: int | None = None
        self._open: dict[int, str] = {}
        self._next = 0
        self._size = 0
        self.crashes: dict[int, int] = {}
        with suppress(OSError):
            if directory.is_dir():
                self._read()
                self._rewrite()

    def started(self, numbers: Sequence[int]) -> int:
        """Records are about to be sent; the name of this send."""
        self._next += 1
        if self._descriptor is not None:
            self._open[self._next] = text = _text_of(numbers)
            self._append(f"S {self._next} {text}\n")
        return self._next

    def ended(self, send: int) -> None:
        """A send has come to an end, whatever came of it."""
        if self._open.pop(send, None) is None:
            return
        self._append(f"E {send}\n")
        if self._size > _MOST_BYTES:
            self._rewrite()

    def settled(self, numbers: Iterable[int]) -> None:
        """Records are done with: what was counted for them is of no use any more."""
        if self.crashes:
            for number in numbers:
                self.crashes.pop(number, None)

    def close(self) -> None:
        """The process is well: nothing is being sent any more."""
        self._open.clear()
        self._rewrite()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self) -> None:
        under_way: dict[str, str] = {}
        for line in self._path.read_text(errors="replace").splitlines() if self._path.exists() else ():
            # The last line may be cut off: then its send had not begun.
            match line.split(" "):
                case ["S", send, text]:
                    under_way[send] = text
                case ["E", send]:
                    under_way.pop(send, None)
                case ["C", count, text] if count.isdecimal():
                    for number in _numbers_of(text):
                        self.crashes[number] = int(count)
                case _:
                    pass
        for text in under_way.values():
            for number in _numbers_of(text):
                self.crashes[number] = self.crashes.get(number, 0) + 1

    def _rewrite(self) -> None:
        by_count: dict[int, list[int]] = {}
        for number, count in self.crashes.items():
            by_count.setdefault(count, []).append(number)
        lines = [f"C {count} {_text_of(sorted(numbers))}\n" for count, numbers in by_count.items()]
        lines += [f"S {send} {text}\n" for send, text in self._open.items()]
        data = "".join(lines).encode()
        try:
            # In a file beside it first: a process that ends here must leave one of the two.
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.replace(self._path)
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))
            self._size = len(data)
        except OSError as error:
            log.warning("attempt_log_failed", path=str(self._path), **describe(error))

    def _append(self, line: str) -> None:
        if self._descriptor is None:
            return
        try:
            self._size += os.write(self._descriptor, line.encode())
        except OSError as error:
            log.warning("attempt_log_failed", path=str(self._path), **describe(error))
            os.close(self._descriptor)
            self._descriptor = None  # a full disk: the sends go on, uncounted


def _text_of(numbers: Sequence[int]) -> str:
    """Numbers as ranges: 1-3,7."""
    if isinstance(numbers, range) and numbers.step == 1:
        return f"{numbers.start}-{numbers.stop - 1}"
    parts: list[str] = []
    low = high = -2
    for number in [*numbers, -9]:
        if number != high + 1:
            if low >= 0:
                parts.append(f"{low}-{high}")
            low = number
        high = number
    return ",".join(parts)


def _numbers_of(text: str) -> Iterable[int]:
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdecimal() and high.isdecimal():
            found += range(int(low), min(int(high) + 1, int(low) + _MOST_CARRIED))
    return found[:_MOST_CARRIED]
