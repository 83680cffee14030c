"""Which delivery tags go out in which acknowledgement: a range to the first unfinished one, single ones beyond it."""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

_ACK = struct.Struct(">BHIHHQBB")
_METHOD, _END = 1, 0xCE
_BASIC, _BASIC_ACK, _BASIC_NACK = 60, 80, 120
_PAYLOAD = 13
_REQUEUE = 2  # the bits of basic.nack: multiple, requeue


class Settlement(NamedTuple):
    """What to write now, in this order.

    Attributes:
        returned: tags that the broker shall deliver again; before the range, which would cover them.
        upto: everything up to this tag that is not settled yet is done; 0 for no range.
        alone: tags beyond the range that are done, ascending: a broker searches for each from the oldest.
    """

    returned: list[int]
    upto: int
    alone: list[int]

    def frames(self, channel: int) -> bytes:
        """The settlement as AMQP frames.

        Example:
            >>> Settlement([], 3, []).frames(1).hex()
            '0100010000000d003c0050000000000000000301ce'
        """
        out = [_frame(channel, _BASIC_NACK, tag, _REQUEUE) for tag in self.returned]
        if self.upto:
            out.append(_frame(channel, _BASIC_ACK, self.upto, 1))
        out += [_frame(channel, _BASIC_ACK, tag, 0) for tag in self.alone]
        return b"".join(out)


class AckWindow:
    """The tags of a channel that the broker waits for.

    A tag is open, done (finished and not told to the broker), or settled alone (told, with an older one still open).
    One slow message therefore costs its own place in the prefetch, not those behind it. A tag that was settled alone
    never ends a range: the broker closes the channel for a tag that it no longer knows.

    Example:
        >>> window = AckWindow()
        >>> for tag in (1, 2, 3, 4):
        ...     window.received(tag)
        >>> window.done(3); window.take()
        Settlement(returned=[], upto=0, alone=[3])
        >>> window.done(1); window.done(2); window.take()
        Settlement(returned=[], upto=2, alone=[])
        >>> len(window)
        1
    """

    __slots__ = ("_alone", "_done", "_pending", "_returned")

    def __init__(self) -> None:
        self._pending: deque[int] = deque()  # open, done and settled alone, ascending, from the oldest open one
        self._done: set[int] = set()
        self._returned: set[int] = set()
        self._alone: set[int] = set()

    def __len__(self) -> int:
        """How many tags the broker still waits for."""
        return len(self._pending) - len(self._alone)

    def received(self, tag: int) -> None:
        """A delivery has come in; the broker counts tags upward."""
        self._pending.append(tag)

    def done(self, tag: int) -> None:
        """Its message is finished."""
        self._done.add(tag)

    def give_back(self, tag: int) -> None:
        """Its message is to be delivered again."""
        self._returned.add(tag)

    def take(self) -> Settlement:
        """What there is to tell the broker; it counts as told."""
        returned = sorted(self._returned)
        settled = self._alone
        settled.update(self._returned)
        self._returned.clear()
        pending, done, upto = self._pending, self._done, 0
        while pending:
            tag = pending[0]
            if tag in done:
                done.remove(tag)
                upto = tag
            elif tag in settled:
                settled.remove(tag)
            else:
                break
            pending.popleft()
        alone = sorted(done)
        settled.update(alone)
        done.clear()
        return Settlement(returned, upto, alone)


def _frame(channel: int, method: int, tag: int, bits: int) -> bytes:
    return _ACK.pack(_METHOD, channel, _PAYLOAD, _BASIC, method, tag, bits, _END)
