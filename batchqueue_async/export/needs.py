"""What a sink needs and what was configured, put together: kept, or refused before anything starts. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks.base import KeyedSink, is_concurrent, needs_of

if TYPE_CHECKING:
    from batchqueue_async.export.config import ExportConfig
    from batchqueue_async.sinks.base import Sink


def with_needs(sink: Sink, config: ExportConfig, name: str) -> ExportConfig:
    """The configuration with what the sink needs in it.

    Raises:
        ConfigError: the sink needs what the configuration rules out, or what only the user can say.
    """
    needs = needs_of(sink)
    changes: dict[str, Any] = {}
    batch = config.batch
    records = min(batch.max_records, needs.max_records or batch.max_records)
    size = min(batch.max_bytes, needs.max_bytes or batch.max_bytes)
    if (records, size) != (batch.max_records, batch.max_bytes):
        changes["batch"] = replace(batch, max_records=records, max_bytes=size)
    if needs.ordering == "order" and config.ordering != "order":
        if config.ordering == "key":
            raise _refused(sink, name, "all records in their order", "set ordering='order', without key")
        changes["ordering"] = "order"
    if needs.ordering == "key" and config.ordering == "any":
        if needs.key is None:
            raise _refused(
                sink, name, "the records of a key in their order", "set ordering='key' and key=..., or ordering='order'"
            )
        changes["ordering"], changes["key"] = "key", needs.key
    if "ordering" in changes and config.failover is not None:
        raise _refused(sink, name, f"ordering={changes['ordering']!r}", "leave out failover")
    return replace(config, **changes) if changes else config


def _refused(sink: Sink, name: str, what: str, way_out: str) -> ConfigError:
    return ConfigError(f"exporter {name!r}: {type(sink).__name__} needs {what}; {way_out}")


def sends_at_once(sink: Sink, config: ExportConfig, name: str) -> int:
    """The most sends under way; a sink that does not say whether they may overlap is warned of."""
    most = config.send_limit
    if not is_concurrent(sink):
        if most > 1 and not hasattr(sink, "concurrent"):
            log.warning(
                "sink_sends_one_at_a_time",
                exporter=name,
                sink=type(sink).__name__,
                way_out="set its class attribute concurrent to True if its sends may overlap, else to False",
            )
        return 1
    if config.ordering == "order":
        return 1
    return min(most, needs_of(sink).concurrency or most)


def is_kept_together(sink: Sink) -> tuple[bool, bool]:
    """Whether a batch that failed is sent again as it is; and whether the sink asks for that in so many words.

    A sink that was given keys may have made one of them for the whole batch, unless it says that it does not.
    """
    strict = needs_of(sink).same_bytes
    silent = getattr(sink, "needs", None) is None
    return strict or (silent and isinstance(sink, KeyedSink)), strict
