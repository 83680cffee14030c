"""Where damaged bytes are kept for people to look at; nothing reads them again."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import segment

if TYPE_CHECKING:
    from pathlib import Path

    from batchqueue_async.durable.disk.files import Files

NAME = "quarantine"
LIMIT = 64 << 20
_COPY = 1 << 20


def copy_aside(files: Files, directory: Path, number: int, gap: segment.Gap) -> None:
    """Keep a damaged byte range in the quarantine, as far as that has room."""
    quarantine = directory / NAME
    files.make_directory(quarantine)
    used = sum(files.size(quarantine / name) for name in files.names(quarantine))
    end = min(gap.end, gap.offset + max(0, LIMIT - used))
    if end <= gap.offset:
        return
    source = files.open_read(directory / segment.segment_name(number))
    try:
        target = files.create(quarantine / f"seg-{number:012d}-{gap.offset}-{gap.end}.{uuid.uuid4().hex[:8]}.bytes")
        try:
            for start in range(gap.offset, end, _COPY):
                data = files.read(source, min(_COPY, end - start), start)
                while data:
                    data = data[files.write(target, data) :]
        finally:
            files.close(target)
    finally:
        files.close(source)
