"""Which records were being sent when the process ended, and in which batches.

| line | says |
|---|---|
| `S send numbers repeats` | these records are being sent, for the `repeats`-th time since they were leased |
| `K send` | that send has ended; its batch waits for its repetition as it is |
| `E send` | nothing is to be remembered of it any more |
| `G send numbers repeats` | what `S` and `K` say, in one |
| `C count numbers` | so many sends of these records ended with the process |
| `A count numbers` | so many of those were sends of one record by itself, because it was suspected |

One line is appended before a send and one after it. They are not synced: what has been written to a file survives the
end of the process, and the end of the machine is nobody's record's doing. What the last run left under way counts as an
attempt that ended with the process; the counts of those records are carried on until the records are settled, or until
a send of them has ended in any other way. A process may be killed for reasons of its own, time and again, and whatever
is first in the queue is under way each time: so that a record is given up only for the sends that it was alone in.
Batches that were under way, or waited for their repetition, are sent again
as they were: a destination that took one of them knows it by its key.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async._support import log
from batchqueue_async._support.log import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

NAME = "sending.log"
SUSPECT = 2
"""Sends that the process did not survive, after which a record is sent by itself."""
_MOST_BYTES = 256 << 10
_MOST_CARRIED = 100_000
# Sends after which a log that could not be written is tried again: a full disk has room again some time.
_TRY_AGAIN = 100


class Interrupted(NamedTuple):
    """A batch of an earlier life that may have reached the destination.

    Attributes:
        note: its number in the log.
        numbers: its records, in the order in which they were sent.
        repeats: how often it was sent since they were leased, besides the first time.
    """

    note: int
    numbers: Sequence[int]
    repeats: int


class AttemptLog:
    """The sends of one exporter with a directory.

    Attributes:
        crashes: by number of a record, how many of its sends, one after the other, the process did not survive.
        alone: how many of those were of the record by itself, because it was suspected; likewise.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._descriptor: int | None = None
        # By the number of a send: its records, as text, and how often they were sent before.
        self._open: dict[int, tuple[str, int]] = {}
        self._kept: dict[int, tuple[str, int]] = {}
        self._next = self._again = 0
        self._ended = False
        # Bytes of the file, and of what was left of it when it was written anew.
        self._size = self._written = 0
        self.crashes: dict[int, int] = {}
        self.alone: dict[int, int] = {}
        with suppress(OSError):
            if directory.is_dir():
                self._read()
                self._rewrite()

    @property
    def interrupted(self) -> list[Interrupted]:
        """The batches that the last run had under way, or kept for their repetition."""
        return [Interrupted(note, _numbers_of(text), repeats) for note, (text, repeats) in self._kept.items()]

    def started(self, numbers: Sequence[int], repeats: int = 0, after: int = 0) -> int:
        """Records are about to be sent, instead of what `after` says of them; the number of this send."""
        self._next += 1
        text = _text_of(numbers)
        self._open[self._next] = text, repeats
        if self._descriptor is not None:
            self._append(f"S {self._next} {text} {repeats}\n")
        elif self._next >= self._again and not self._ended:
            self._again = self._next + _TRY_AGAIN
            self._rewrite()
        if after:
            self.ended(after)
        return self._next

    def kept(self, send: int) -> None:
        """A send has come to an end, and its batch waits for its repetition as it is; or nobody knows how it ended."""
        found = self._open.pop(send, None)
        if found is not None:
            self._kept[send] = found
            self._append(f"K {send}\n")

    def ended(self, send: int) -> None:
        """A send has come to an end, and its records, if they are to be sent again, may be in other batches."""
        if self._open.pop(send, None) is None and self._kept.pop(send, None) is None:
            return
        self._append(f"E {send}\n")
        if self._size > _MOST_BYTES + 2 * self._written:
            self._rewrite()

    def survived(self, numbers: Sequence[int]) -> None:
        """A send of these records alone has ended, and the process has not: it was not for them that it did before."""
        known = [number for number in numbers if self.crashes.pop(number, 0)]
        if known:
            for number in known:
                self.alone.pop(number, None)
            self._append(f"C 0 {_text_of(known)}\n")

    def settled(self, numbers: Iterable[int]) -> None:
        """Records are done with: what was counted for them is of no use any more."""
        if self.crashes:
            for number in numbers:
                self.crashes.pop(number, None)
                self.alone.pop(number, None)

    def close(self) -> None:
        """The process is well; what is still being sent nobody waits for, nor knows what comes of it."""
        self._ended = True
        self._kept = dict(sorted((self._kept | self._open).items()))
        self._open.clear()
        self._rewrite()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self) -> None:
        under_way: dict[str, tuple[str, int]] = {}
        waiting: dict[str, tuple[str, int]] = {}
        text = self._path.read_text(errors="replace") if self._path.exists() else ""
        # The last line may be cut off: then its send had not begun.
        for line in text.rpartition("\n")[0].split("\n"):
            match line.split(" "):
                case ["S", send, text, *rest]:
                    under_way[send] = text, _count(rest)
                case ["G", send, text, *rest]:
                    waiting[send] = text, _count(rest)
                case ["K", send] if send in under_way:
                    waiting[send] = under_way.pop(send)
                case ["E", send]:
                    under_way.pop(send, None)
                    waiting.pop(send, None)
                case ["C", count, text] if count.isdecimal():
                    self._counted(_numbers_of(text), int(count))
                case ["A", count, text] if count.isdecimal():
                    self.alone |= dict.fromkeys(_numbers_of(text), int(count))
                case _:
                    pass
        for text, _ in under_way.values():
            self._crashed(_numbers_of(text))
        for self._next, found in enumerate([*waiting.values(), *under_way.values()], 1):
            self._kept[self._next] = found

    def _crashed(self, numbers: Sequence[int]) -> None:
        """The process ended during a send of these records."""
        if len(numbers) == 1 and self.crashes.get(numbers[0], 0) >= SUSPECT:
            self.alone[numbers[0]] = self.alone.get(numbers[0], 0) + 1
        for number in numbers:
            self.crashes[number] = self.crashes.get(number, 0) + 1

    def _counted(self, numbers: Iterable[int], count: int) -> None:
        """What an earlier life says of records: so many crashes, or none any more."""
        for number in numbers:
            if count:
                self.crashes[number] = count
            else:
                self.crashes.pop(number, None)
                self.alone.pop(number, None)

    def _rewrite(self) -> None:
        lines = [f"C {count} {text}\n" for count, text in _by_count(self.crashes)]
        lines += [f"A {count} {text}\n" for count, text in _by_count(self.alone)]
        lines += [f"G {send} {text} {repeats}\n" for send, (text, repeats) in self._kept.items()]
        lines += [f"S {send} {text} {repeats}\n" for send, (text, repeats) in self._open.items()]
        data = "".join(lines).encode()
        try:
            # In a file beside it first: a process that ends here must leave one of the two.
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.replace(self._path)
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))
            self._size = self._written = len(data)
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
            self._descriptor = None  # a full disk: the sends go on, uncounted for a while
            self._again = self._next + _TRY_AGAIN


def _by_count(counts: Mapping[int, int]) -> list[tuple[int, str]]:
    found: dict[int, list[int]] = {}
    for number, count in counts.items():
        found.setdefault(count, []).append(number)
    return [(count, _text_of(sorted(numbers))) for count, numbers in found.items()]


def _count(rest: list[str]) -> int:
    return int(rest[0]) if rest and rest[0].isdecimal() else 0


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


def _numbers_of(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdecimal() and high.isdecimal():
            found += range(int(low), min(int(high) + 1, int(low) + _MOST_CARRIED))
    return found[:_MOST_CARRIED]
