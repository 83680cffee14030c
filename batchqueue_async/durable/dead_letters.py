"""Dead letters: a second queue inside the first, whose records say where they come from and why they are there."""

from __future__ import annotations

import struct

import msgspec

_NS = 1e-9
_HEAD = struct.Struct("<BQIQQH")
_VERSION = 1
_REASON_BYTES = 4096


class DeadLetter(msgspec.Struct, frozen=True, gc=False):
    """One dead letter.

    Attributes:
        seq: its number among the dead letters.
        payload: what was put.
        reason: what `dead_letter` was called with, cut to 4 KiB.
        attempts: how often the record had been leased.
        original_seq: its sequence number in the queue.
        enqueued_at: when it was put, in seconds since 1970.
        died_at: when it was given up, likewise.

    Example:
        >>> letter = DeadLetter(1, b"payload", "not wanted", 3, 17, 0.0, 9.5)
        >>> letter  # the payload does not show
        DeadLetter(seq=1, original_seq=17, reason='not wanted', size=7)
    """

    seq: int
    payload: bytes
    reason: str
    attempts: int
    original_seq: int
    enqueued_at: float
    died_at: float

    def __repr__(self) -> str:
        """Without the payload: it has no place in logs."""
        about = f"seq={self.seq}, original_seq={self.original_seq}, reason={self.reason!r}"
        return f"DeadLetter({about}, size={len(self.payload)})"


def encode(payload: bytes, *, reason: str, attempts: int, seq: int, enqueued_ns: int, died_ns: int) -> bytes:
    """A dead letter as a record of its own queue."""
    # A reason is often an error's text, and that may quote a file name that is no UTF-8.
    text = reason.encode(errors="backslashreplace")[:_REASON_BYTES]
    return _HEAD.pack(_VERSION, seq, min(attempts, 0xFFFFFFFF), enqueued_ns, died_ns, len(text)) + text + payload


def decode(seq: int, data: bytes) -> DeadLetter | None:
    """The dead letter in a record of the dead letters' queue; None when it is of another version."""
    if len(data) < _HEAD.size:
        return None
    version, original, attempts, enqueued_ns, died_ns, size = _HEAD.unpack_from(data)
    if version != _VERSION or len(data) < _HEAD.size + size:
        return None
    end = _HEAD.size + size
    reason = data[_HEAD.size : end].decode(errors="replace")
    return DeadLetter(seq, data[end:], reason, attempts, original, enqueued_ns * _NS, died_ns * _NS)
