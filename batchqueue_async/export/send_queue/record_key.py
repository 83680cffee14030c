"""The user's key function, made safe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from batchqueue_async.export.config import ExportConfig


def record_key(config: ExportConfig) -> Callable[[Any], Hashable] | None:
    """The user's key function, made safe: records for which it fails are in order among each other."""
    key = config.key
    if key is None:
        return None

    def key_of(record: Any) -> Hashable:
        try:
            found = key(record)
            hash(found)
        except Exception:  # noqa: BLE001 - a user's function; the record is no worse for it
            return None
        return found

    return key_of
