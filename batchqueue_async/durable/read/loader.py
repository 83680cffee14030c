"""The reading half of the queue: frames that have left the memory, read again through descriptors of their own."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import segment
from batchqueue_async.durable.state.frame import Frame

if TYPE_CHECKING:
    from pathlib import Path

    from batchqueue_async.durable.disk.files import Files

_OPEN = 8


@dataclass(slots=True)
class Loaded:
    """What was read: frames in order, each with the places in it that are damaged, and where the reading stopped.

    Attributes:
        lost: records that were found to be lost, as far as the frames have been taken in.
    """

    stopped_at: int
    frames: list[tuple[Frame, list[int]]] = field(default_factory=list[tuple[Frame, list[int]]])
    gaps: list[segment.Gap] = field(default_factory=list[segment.Gap])
    unreadable: list[segment.Gap] = field(default_factory=list[segment.Gap])
    lost: int = 0


class Loader:
    """Reads pieces of segments. Used by one thread at a time."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._files = files
        self._directory = directory
        self._open: OrderedDict[int, int] = OrderedDict()

    def load(self, number: int, marker: bytes, place: tuple[int, int], least_seq: int, budget: int) -> Loaded:
        """Frames between two offsets, until their payloads come to `budget` bytes."""
        try:
            return self._load(number, marker, place, least_seq, budget)
        except OSError:
            # The next reading has a fresh descriptor: this one may be what fails.
            self.forget([number])
            raise

    def _load(self, number: int, marker: bytes, place: tuple[int, int], least_seq: int, budget: int) -> Loaded:
        walk = segment.Walk(
            self._files, self._descriptor(number), marker, start=place[0], end=place[1], next_seq=least_seq
        )
        found = Loaded(place[1])
        for item in walk:
            if isinstance(item, segment.Gap):
                found.gaps.append(item)
                continue
            header, decoded = item.header, item.decoded
            good = decoded.payloads if decoded is not None else [None] * header.records
            damaged = [at for at, payload in enumerate(good) if payload is None]
            if damaged:
                found.gaps.append(segment.Gap(item.offset, item.end))
            payloads = [payload or b"" for payload in good]
            raw = sum(map(len, payloads))
            frame = Frame(header.kind, payloads, raw, header.enqueued_ns)
            frame.first, frame.segment, frame.offset, frame.stored = header.first_seq, number, item.offset, header.size
            found.frames.append((frame, damaged))
            budget -= frame.cost
            if budget <= 0:
                found.stopped_at = walk.position
                break
        found.unreadable = walk.unreadable
        return found

    def index(
        self, number: int, marker: bytes, place: tuple[int, int], least_seq: int
    ) -> tuple[array[int], array[int]]:
        """The offsets of the frames between two offsets, and their first numbers."""
        offsets, firsts = array("Q"), array("Q")
        try:
            walk = segment.Walk(
                self._files,
                self._descriptor(number),
                marker,
                start=place[0],
                end=place[1],
                next_seq=least_seq,
                bodies=False,
            )
            for item in walk:
                if isinstance(item, segment.Found):
                    offsets.append(item.offset)
                    firsts.append(item.header.first_seq)
        except OSError:
            self.forget([number])
            raise
        return offsets, firsts

    def forget(self, numbers: list[int]) -> None:
        """Segments that are deleted: an open descriptor would keep their room on the disk."""
        for number in numbers:
            if number in self._open:
                self._open.move_to_end(number, last=False)
                self._drop()

    def close(self) -> None:
        """Let go of every descriptor."""
        while self._open:
            self._drop()

    def _descriptor(self, number: int) -> int:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        while len(self._open) >= _OPEN:
            self._drop()
        self._open[number] = self._files.open_read(self._directory / segment.segment_name(number))
        return self._open[number]

    def _drop(self) -> None:
        _, descriptor = self._open.popitem(last=False)
        with suppress(OSError, MemoryError):
            self._files.close(descriptor)
