"""The options of `format("batchqueue")`: texts from Spark, checked where the write is planned."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchqueue_async.config import QueueConfig, is_handler
from batchqueue_async.errors import ConfigError
from batchqueue_async.export import BatchPolicy, BreakerPolicy, ExportConfig, RetryPolicy
from batchqueue_async.policies import PartitionPolicy, WorkerPolicy
from batchqueue_async.sinks.base import Sink, StagingSink
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.sqlite.sink import SqliteSink
from batchqueue_async.spark import process_bridge
from batchqueue_async.spark.route import check_order
from batchqueue_async.spark.rows import check_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchqueue_async.spark.rows import Rows

Options = tuple[tuple[str, str], ...]
"""Options as pairs of lower-case name and text, sorted: hashable, and the same in every process."""

_QUEUE: dict[str, Callable[[str], Any]] = {
    "workers": lambda text: WorkerPolicy.fixed(int(text)),
    "partitions": lambda text: PartitionPolicy.fixed(int(text)),
    "buffer_size": int,
    "max_batch": int,
    "linger": float,
    "handler_timeout": float,
    "drain_timeout": float,
}


_EXPORT: dict[str, Callable[[str], Any]] = {
    "path": str,
    "max_records": int,
    "max_bytes": int,
    "overflow": str,
    "block_timeout": float,
    "workers": lambda text: WorkerPolicy.fixed(int(text)),
    "send_timeout": float,
    "auth_pause": float,
    "drain_timeout": float,
    "batch.max_records": int,
    "batch.max_bytes": int,
    "batch.linger": float,
    "retry.initial": float,
    "retry.multiplier": float,
    "retry.max_delay": float,
    "retry.max_attempts": int,
    "retry.max_age": float,
    "breaker.threshold": int,
    "breaker.reset_timeout": float,
}
_POLICIES: dict[str, Callable[..., Any]] = {"batch": BatchPolicy, "retry": RetryPolicy, "breaker": BreakerPolicy}


def as_options(given: Mapping[str, str]) -> Options:
    """The options that Spark gives, in one form."""
    return tuple(sorted((str(name).lower(), str(text)) for name, text in given.items()))


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What the options say.

    Attributes:
        sink: "sqlite", "jsonl", or "package.module:factory".
        rows: what an item is, as in `DriverSink`.
        rows_in_flight: the most rows in a worker that are not handled yet.
        queue: the queue's configuration.
        export: the configuration of an exporter between the queue and the sink; None without one.
        rest: all options, for the sink's factory.
    """

    sink: str
    rows: Rows
    rows_in_flight: int
    queue: QueueConfig[Any]
    export: ExportConfig | None
    rest: dict[str, str]

    def make(self) -> Any:
        """The sink or handler, not opened."""
        if self.sink == "sqlite":
            return SqliteSink(self._need("path"), self.rest.get("table", "rows"))
        if self.sink == "jsonl":
            return JsonLinesSink(self._need("path"))
        made = load(self.sink, "sink")(self.rest)
        if not isinstance(made, Sink) and not is_handler(made):
            raise _error(
                "sink", self.sink, "made neither a sink nor a handler", "return an object with open, send, close"
            )
        if self.export is not None and not isinstance(made, Sink):
            raise _error("sink", self.sink, "made a handler, which export.* is not for", "return a sink")
        if self.export is None and not isinstance(made, StagingSink):  # each task of those sends to its own attempt
            check_order("format batchqueue", made, self.queue)
        return made

    def _need(self, name: str) -> str:
        if name not in self.rest:
            raise ConfigError(f"format batchqueue: sink={self.sink!r} needs a {name}; give .option({name!r}, ...)")
        return self.rest[name]


def _error(name: str, text: str, rule: str, way_out: str) -> ConfigError:
    return ConfigError(f"format batchqueue: option {name}={text!r} {rule}; {way_out}")


def read_options(given: Options) -> WriteOptions:
    """Parse and check the options.

    Example:
        >>> read_options((("queue.max_batch", "500"), ("sink", "jsonl"))).queue.max_batch
        500
    """
    options = dict(given)
    if "sink" not in options:
        raise ConfigError(
            "format batchqueue: there is no option 'sink'; give .option('sink', 'sqlite'), 'jsonl', "
            "or 'package.module:factory'"
        )
    queue, export = _group(options, "queue", _QUEUE), _export(_group(options, "export", _EXPORT))
    sink = options["sink"]
    # An exporter counts records, and its disk takes no Arrow data.
    default = "batch" if sink in {"sqlite", "jsonl"} and export is None else "dict"
    rows_in_flight = _number("rows_in_flight", options.get("rows_in_flight", "100000"), int)
    config = QueueConfig[Any](**queue)
    config.validate("batchqueue")
    rows = _rows(options.get("rows", default))
    process_bridge.sized("batchqueue", config, rows_in_flight, whole=rows == "batch")
    return WriteOptions(sink, rows, rows_in_flight, config, export, options)


def _group(options: dict[str, str], group: str, known: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """The options `group.name`, by their names."""
    found: dict[str, Any] = {}
    for option, text in options.items():
        if not option.startswith(f"{group}."):
            continue
        name = option.removeprefix(f"{group}.")
        if name not in known:
            raise _error(option, text, "is unknown", f"there are {group}.{f', {group}.'.join(known)}")
        found[name] = _number(option, text, known[name])
    return found


def _export(given: dict[str, Any]) -> ExportConfig | None:
    if not given:
        return None
    policies: dict[str, Any] = {
        policy: make(**{name.partition(".")[2]: given[name] for name in given if name.startswith(f"{policy}.")})
        for policy, make in _POLICIES.items()
    }
    plain = {name: value for name, value in given.items() if "." not in name}
    fields: dict[str, Any] = {"overflow": "block", **plain, **policies}
    return ExportConfig(**fields)


def _number(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ConfigError:
        raise
    except ValueError:
        raise _error(name, text, "is no number", "give one") from None


def _rows(text: str) -> Rows:
    rows: Rows = load(text, "rows") if ":" in text else text
    check_rows(rows)
    return rows


def load(text: str, option: str) -> Any:
    """What "package.module:name" names; it must be importable on the driver and on every executor."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise _error(option, text, "is unknown", "give 'sqlite', 'jsonl' or 'package.module:factory'")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise _error(option, text, f"can't be imported ({error})", "ship the module with --py-files") from error
    except AttributeError:
        raise _error(option, text, f"names no {name!r} of {module!r}", "correct the name") from None
