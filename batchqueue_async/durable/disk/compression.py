"""The codecs of a frame's body, by number; `cramjam` is imported when the first of them is used.

Decompression writes into a buffer of the size that the frame's checked header declares: a wrong or hostile body
can't make it grow.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from batchqueue_async.errors import ConfigError

NONE = 0
CODECS = {"none": 0, "lz4": 1, "snappy": 2, "zstd": 3}
_NAMES = {number: name for name, number in CODECS.items()}
_ZSTD_LEVEL = 1


def _cramjam(purpose: str) -> Any:
    try:
        return import_module("cramjam")
    except ImportError as error:
        raise ConfigError(
            f"durable queue: {purpose} needs the package 'cramjam', which is not installed; "
            "run: pip install 'batchqueue-async[durable]', or set compression='none'"
        ) from error


def known(codec: int) -> bool:
    """Whether format 1 has this codec."""
    return codec in _NAMES


def require(name: str) -> int:
    """The number of the codec `name`; raises now, not at the first frame, when its package is missing."""
    if name not in CODECS:
        raise ConfigError(f"durable queue: compression={name!r} is unknown; choose one of {', '.join(CODECS)}")
    if name != "none":
        _cramjam(f"compression={name!r}")
    return CODECS[name]


def compress(codec: int, data: bytes) -> bytes:
    """`data` as a block of this codec, without a length of its own."""
    if codec == CODECS["none"]:
        return data
    cramjam = _cramjam(f"writing {_NAMES[codec]}")
    if codec == CODECS["lz4"]:
        return bytes(cramjam.lz4.compress_block(data, store_size=False))
    if codec == CODECS["snappy"]:
        return bytes(cramjam.snappy.compress_raw(data))
    return bytes(cramjam.zstd.compress(data, level=_ZSTD_LEVEL))


def decompress(codec: int, data: memoryview, size: int) -> bytearray | None:
    """Exactly `size` bytes, or None when `data` does not unpack to that."""
    cramjam = _cramjam(f"reading {_NAMES[codec]}")
    room = bytearray(size)
    try:
        if codec == CODECS["lz4"]:
            written = cramjam.lz4.decompress_block_into(data, room)
        elif codec == CODECS["snappy"]:
            written = cramjam.snappy.decompress_raw_into(data, room)
        else:
            written = cramjam.zstd.decompress_into(data, room)
    except cramjam.DecompressionError:
        return None
    return room if written == size else None
