"""What callers hand to a durable queue: as the queue takes it, or an error that says what to give instead."""

from __future__ import annotations

import re
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, cast

from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    import os

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def as_directory(path: str | os.PathLike[str], name: str | None) -> Path:
    """The directory `path`, or the one of this name below it; absolute, for a program may change its own later."""
    place = Path(path)
    if name is not None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"DurableQueue.open: name={name!r} can't be a directory below {str(place)!r}; "
                "use letters, digits, '.', '-' and '_', at most 100, not starting with '.' or '-'"
            )
        place /= name
    if "\0" in str(place):
        raise ConfigError(f"DurableQueue.open: path={str(place)!r} has a NUL character; give a directory's path")
    return place.absolute()


def as_bytes(payload: object) -> bytes:
    """A payload that can't change any more."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(cast("bytes", payload))
    raise ConfigError(f"DurableQueue: a payload is bytes, not {type(payload).__name__}; encode it first")


def as_count(name: str, value: object) -> int:
    """A whole number of at least 1."""
    try:
        number = index(cast("int", value))
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"DurableQueue.lease: {name}={value!r} is not a whole number of at least 1; give 1 or more")
    return number
