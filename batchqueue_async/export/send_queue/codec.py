r"""How a record becomes bytes on a disk, and a record again: never by pickle, which runs what it reads.

The first byte says what the rest is:

| byte | record | the rest |
|---|---|---|
| 0 | bytes | as they are |
| 1 | str | UTF-8 |
| 2 | anything else that msgspec knows | MessagePack |
| 3 | the same, where MessagePack has no room for a number | JSON |

Mappings, lists, numbers, texts, bytes, None, times and what is made of them come back equal; a struct or dataclass
comes back as a mapping, a tuple as a list. An exporter with its own `encode` and `decode` writes what they say, alone.

>>> decode(encode({"id": 7, "raw": b"\0"}))
{'id': 7, 'raw': b'\x00'}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from batchqueue_async.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Sequence

_RAW = b"\x00"
_TEXT = b"\x01"
_PACK = b"\x02"
_JSON = b"\x03"
_BYTES: set[type] = {bytes}

_pack = msgspec.msgpack.Encoder()
_unpack = msgspec.msgpack.Decoder()
_to_json = msgspec.json.Encoder(decimal_format="string")
_of_json = msgspec.json.Decoder()


def encode(record: Any) -> bytes:
    """One record as bytes for the disk.

    Raises:
        PermanentError: it has no such form; the message names its type.
    """
    if isinstance(record, bytes | bytearray | memoryview):
        return _RAW + cast("bytes", record)
    if isinstance(record, str):
        return _TEXT + record.encode(errors="surrogatepass")
    try:
        return _PACK + _pack.encode(record)
    except OverflowError:
        return _JSON + _to_json.encode(record)
    except (TypeError, ValueError, RecursionError) as error:
        raise PermanentError(
            f"a record of type {type(record).__qualname__} has no form on disk ({type(error).__name__}); "
            "give ExportConfig encode= and decode=, or send mappings, structs, dataclasses, texts or bytes"
        ) from None


def decode(data: bytes) -> Any:
    """The record in bytes from the disk.

    Raises:
        PermanentError: these bytes hold none.
    """
    kind = data[:1]
    try:
        if kind == _RAW:
            return data[1:]
        if kind == _TEXT:
            return data[1:].decode(errors="surrogatepass")
        if kind == _PACK:
            return _unpack.decode(memoryview(data)[1:])
        if kind == _JSON:
            return _of_json.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PermanentError(f"a record on disk can't be decoded ({type(error).__name__})") from None
    raise PermanentError(
        f"a record on disk begins with {kind!r}, which no exporter writes without an encode of its own; "
        "give ExportConfig the encode and decode that it was written with"
    )


def encode_all(batch: Sequence[Any]) -> list[bytes]:
    """Records as bytes; as `encode` does it."""
    if set(map(type, batch)) == _BYTES:
        return [_RAW + record for record in batch]
    return [encode(record) for record in batch]


def decode_all(payloads: Sequence[bytes]) -> list[Any]:
    """Records of bytes; as `decode` does it."""
    return [data[1:] if data[:1] == _RAW else decode(data) for data in payloads]
