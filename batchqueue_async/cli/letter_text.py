"""A dead letter as text for a terminal, its payload as far as it can be read."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli.commands import plain
from batchqueue_async.errors import PermanentError
from batchqueue_async.export.send_queue import codec

if TYPE_CHECKING:
    from batchqueue_async.durable.dead_letters import DeadLetter

MOST = 64 << 10
"""Characters of a payload that are shown."""
_WIDTH = 32


def shown(letter: DeadLetter) -> str:
    """Everything about a letter, in lines."""
    size = len(letter.payload)
    text = payload_text(letter.payload)
    lines = [
        f"seq {letter.seq}, number {letter.original_seq} of the send queue",
        f"  reason: {plain(letter.reason)}",
        f"  given up {_when(letter.died_at)} after {letter.attempts} attempts; accepted {_when(letter.enqueued_at)}",
        f"  payload, {size} bytes:",
        *(f"    {plain(each)}" for each in text[:MOST].splitlines()),
    ]
    if len(text) > MOST:
        lines.append(f"    and {len(text) - MOST} characters more; `export` and `--json` have all of it")
    return "\n".join(lines)


def payload_text(payload: bytes) -> str:
    """A payload as text: what an exporter wrote as the record, else UTF-8, else hexadecimal.

    Example:
        >>> payload_text(codec.encode({"id": 7}))
        '{"id": 7}'
        >>> payload_text(b"not an exporter's")
        "not an exporter's"
    """
    record: Any = payload
    with suppress(PermanentError):  # of a durable queue, or of an exporter with an encode of its own
        record = codec.decode(payload)
    if isinstance(record, str):
        return record
    if isinstance(record, bytes):
        try:
            return record.decode()
        except UnicodeDecodeError:
            return "\n".join(record[at : at + _WIDTH].hex(" ", 4) for at in range(0, min(len(record), MOST), _WIDTH))
    return json.dumps(record, ensure_ascii=False, default=repr)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
