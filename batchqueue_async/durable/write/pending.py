"""What waits for the writer: puts, gathered into frames. On the loop, and without an await: it hands out futures."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.state.frame import Frame

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

_GROUP_RECORDS = 1 << 12


class WriteBuffer:
    """The frames of no round yet, first come first served, and the room that all frames on their way will take.

    Puts join the open group as long as it is the last frame, of their durability, and not full. Its records are
    counted from the group itself, everything else in `_records` and `_bytes`: a put then changes as little as it can.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], int],
        deadline: Callable[[], float | None],
        future: Callable[[], asyncio.Future[int]],
        buffer: int,
    ) -> None:
        self._clock = clock
        self._deadline = deadline
        self._future = future
        # A group is one frame, with its table.
        self._buffer = min(buffer, fmt.FRAME_BYTES - fmt.frame_size(_GROUP_RECORDS, 0))
        self.frames: deque[Frame] = deque()
        self.group: Frame | None = None
        self.on_frame: Callable[[], None] = _nothing
        self._records = self._bytes = 0
        self._cancelled = False

    @property
    def records(self) -> int:
        """Records that wait to be written, those with the writer included."""
        return self._records + (self.group.count if self.group is not None else 0)

    @property
    def disk_bytes(self) -> int:
        """What they will take on the disk, at most."""
        return self._bytes + (_size(self.group) if self.group is not None else 0)

    # In

    def append(self, payload: bytes, size: int, rank: int) -> asyncio.Future[int]:
        """One record: it joins the group that the next round will write."""
        group = self.group
        if group is None or group.raw + size > self._buffer or group.rank != rank or group.count >= _GROUP_RECORDS:
            group = self._open_group(rank)
        group.gathered.append(payload)
        group.count += 1
        group.raw += size
        future = self._future()
        group.waiters.append(future)
        return future

    def _open_group(self, rank: int) -> Frame:
        self.close_group()
        group = self.group = Frame(fmt.GROUP, [], 0, self._clock(), rank)
        self._enter(group)
        return group

    def append_frame(self, payloads: list[bytes], raw: int, rank: int) -> asyncio.Future[int]:
        """Records that are written together or not at all."""
        self.close_group()
        frame = Frame(fmt.ATOMIC, payloads, raw, self._clock(), rank)
        self._count(frame)
        self._enter(frame)
        future = self._future()
        frame.waiters.append(future)
        return future

    def _enter(self, frame: Frame) -> None:
        frame.deadline = self._deadline()
        self.frames.append(frame)
        self.on_frame()

    def close_group(self) -> None:
        """No further put joins the open group."""
        if self.group is not None:
            self._count(self.group)
            self.group = None

    def _count(self, frame: Frame) -> None:
        self._records += frame.count
        self._bytes += _size(frame)

    def reserve(self, records: int, size: int) -> None:
        """Room is kept for a put that is to come in another step of the loop, until `release`."""
        self._records += records
        self._bytes += size

    def release(self, records: int, size: int) -> None:
        """That put comes now, or never."""
        self._records -= records
        self._bytes -= size

    # Out

    def take(self, most: int) -> list[Frame]:
        """The next frames, of about so many bytes and one at least."""
        self.purge()
        self.close_group()
        taken: list[Frame] = []
        while self.frames and (most > 0 or not taken):
            frame = self.frames.popleft()
            most -= frame.raw
            taken.append(frame)
        return taken

    def put_back(self, frames: Iterable[Frame]) -> None:
        """Frames that could not be written are the next again, but for those that nobody waits for any longer."""
        self.close_group()
        wanted: list[Frame] = []
        for frame in frames:
            if all(waiter.done() for waiter in frame.waiters) and not frame.kept:
                self.settled(frame)
            else:
                wanted.append(frame)
        self.frames.extendleft(reversed(wanted))

    def settled(self, frame: Frame) -> None:
        """A frame is written, refused or withdrawn: it no longer counts."""
        self._records -= frame.count
        self._bytes -= _size(frame)

    def empty(self) -> list[Frame]:
        """Take out everything that no round has taken."""
        return self.take(1 << 62)

    def withdraw(self, future: asyncio.Future[int]) -> bool:
        """The caller of a put was cancelled: `purge` takes its record out, unless a round has it already."""
        if not future.cancelled():
            future.cancel()
        self._cancelled = bool(self.frames)
        return self._cancelled

    def purge(self) -> None:
        """Take out every record that no round has yet and whose caller was cancelled, all in one pass."""
        if not self._cancelled:
            return
        self._cancelled = False
        kept: deque[Frame] = deque()
        for frame in self.frames:
            counted = frame is not self.group
            if frame.kept or not any(waiter.cancelled() for waiter in frame.waiters):
                # Of what is on the disk already nothing is taken back: it is put, as if the writer had it still.
                kept.append(frame)
                continue
            if counted:
                self.settled(frame)
            if frame.kind == fmt.GROUP:
                _take_out_cancelled(frame)
                if frame.count:
                    kept.append(frame)
                    if counted:
                        self._count(frame)
                    continue
            self.group = self.group if counted else None
        self.frames = kept


def _take_out_cancelled(frame: Frame) -> None:
    pairs = [pair for pair in zip(frame.gathered, frame.waiters, strict=True) if not pair[1].cancelled()]
    # In place: `payloads` is the same list.
    frame.gathered[:] = [payload for payload, _ in pairs]
    frame.waiters = [waiter for _, waiter in pairs]
    frame.count = len(pairs)
    frame.raw = sum(map(len, frame.gathered))


def _size(frame: Frame) -> int:
    return fmt.frame_size(frame.count, frame.raw)


def _nothing() -> None:
    """Until there is a pump, nothing has to be sent."""
