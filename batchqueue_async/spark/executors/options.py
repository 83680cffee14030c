"""The options of `format("batchqueue")`: texts from Spark, checked where the write is planned."""

from __future__ import annotations

import difflib
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async.config import QueueConfig, is_handler
from batchqueue_async.errors import ConfigError
from batchqueue_async.export import BatchPolicy, BreakerPolicy, ExportConfig, RetryPolicy
from batchqueue_async.policies import PartitionPolicy, WorkerPolicy
from batchqueue_async.sinks.base import Sink, StagingSink, TransactionalSink
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.sqlite.sink import SqliteSink
from batchqueue_async.spark.bad_rows import check_apart, check_on_bad_row
from batchqueue_async.spark.process_bridge import Sizes
from batchqueue_async.spark.record_keys import check_key_by
from batchqueue_async.spark.route import check_order
from batchqueue_async.spark.rows import NonFinite, check_columns, check_non_finite, check_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchqueue_async.sinks.sqlite.table import SchemaMode
    from batchqueue_async.spark.record_keys import KeyBy
    from batchqueue_async.spark.rows import Rows

BYTES_IN_FLIGHT = 256 * 1024 * 1024

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
_OWN = ("sink", "rows", "rows_in_flight", "bytes_in_flight", "key", "non_finite", "on_bad_row", "dead_letters")
_BUILT_IN = {"sqlite": ("path", "table", "busy_timeout", "schema", "upsert_on"), "jsonl": ("path",)}
_SPARKS = ("checkpointlocation", "outputmode", "queryname", "trigger")
_NEAR = 0.8
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
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
        bytes_in_flight: the most bytes of Arrow data that these rows are made from.
        key: what the key of each record is made of.
        non_finite: what becomes of NaN and infinity.
        dead_letters: where bad rows go, a directory or "package.module:factory"; None: they fail their batch.
        rest: all options, for the sink's factory.
    """

    sink: str
    rows: Rows
    rows_in_flight: int
    queue: QueueConfig[Any]
    export: ExportConfig | None
    bytes_in_flight: int
    key: KeyBy
    non_finite: NonFinite
    dead_letters: str | None
    rest: dict[str, str]

    def sizes(self) -> Sizes:
        """What the queue may hold."""
        whole = self.rows == "batch"
        return Sizes("batchqueue", self.queue, self.rows_in_flight, whole=whole, bytes_in_flight=self.bytes_in_flight)

    def check(self, names: Sequence[str]) -> None:
        """Refuse what can't work, where the write is planned.

        Raises:
            ConfigError: the sink can't be made, or would lose one of the columns.
        """
        made = self.make()
        check_columns("format batchqueue", names, self.rows, made)
        check_apart("format batchqueue", made, self.letters())

    def letters(self) -> StagingSink | None:
        """The sink for bad rows; None: they fail their batch.

        Raises:
            ConfigError: it can't keep the letters of a task that is repeated apart, or has the place of the rows.
        """
        if self.dead_letters is None:
            return None
        if not _FACTORY.fullmatch(self.dead_letters):
            if (
                self.sink == "jsonl"
                and Path(self.rest.get("path", "")).absolute() == Path(self.dead_letters).absolute()
            ):
                raise _error(
                    "dead_letters", self.dead_letters, "is the path of the rows too", "give a directory of its own"
                )
            return JsonLinesSink(self.dead_letters)
        made = self._made(self.dead_letters, "dead_letters")
        if not isinstance(made, StagingSink):
            raise _error(
                "dead_letters",
                self.dead_letters,
                "made no sink with stage, publish and discard, so that a repeated task would write its letters twice",
                "give a directory for JSON lines, or a factory of SqliteSink or PostgresSink",
            )
        return made

    def make(self) -> Any:
        """The sink or handler, not opened."""
        if self.sink == "sqlite":
            timeout = _number("busy_timeout", self.rest.get("busy_timeout", "30"), float)
            schema = cast("SchemaMode", self.rest.get("schema", "strict"))
            keys = _names(self.rest.get("upsert_on", ""))
            table = self.rest.get("table", "rows")
            return SqliteSink(self._need("path"), table, busy_timeout=timeout, schema=schema, upsert_on=keys)
        if self.sink == "jsonl":
            return JsonLinesSink(self._need("path"))
        made = self._made(self.sink, "sink")
        if not isinstance(made, Sink) and not is_handler(made):
            raise _error(
                "sink", self.sink, "made neither a sink nor a handler", "return an object with open, send, close"
            )
        if self.export is not None and not isinstance(made, Sink):
            raise _error("sink", self.sink, "made a handler, which export.* is not for", "return a sink")
        if self.dead_letters is not None and isinstance(made, TransactionalSink) and not isinstance(made, StagingSink):
            raise _error(
                "on_bad_row",
                "dead_letter",
                f"does not go with {type(made).__qualname__}: no task can take its rows again without the bad ones",
                "give the sink stage, publish and discard, or write by foreachBatch(DriverSink(...))",
            )
        alone = self.export is None and not isinstance(made, StagingSink)  # each task of those has its own attempt
        if alone and self.key == "position":
            check_order("format batchqueue", made, self.queue)
        return made

    def _made(self, name: str, option: str) -> Any:
        factory = load(name, option)
        try:
            return factory(self.rest)
        except Exception as error:  # noqa: BLE001 - anything that the user's code raises: its text may quote an option
            text = _without_values(str(error), self.rest)
            raise ConfigError(
                f"format batchqueue: the factory {name!r} failed with {type(error).__qualname__}: {text}; "
                "correct its options or its code"
            ) from None

    def _need(self, name: str) -> str:
        if name not in self.rest:
            raise ConfigError(f"format batchqueue: sink={self.sink!r} needs a {name}; give .option({name!r}, ...)")
        return self.rest[name]


def _without_values(text: str, options: dict[str, str]) -> str:
    """A text without the values of options, which may be secrets."""
    for name, value in sorted(options.items(), key=lambda each: -len(each[1])):
        if value and name not in _OWN:
            text = text.replace(value, f"<{name}>")
    return text


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
    sink = options["sink"]
    _check_names(sink, options)
    queue, export = _group(options, "queue", _QUEUE), _export(_group(options, "export", _EXPORT))
    # An exporter counts records, and its disk takes no Arrow data.
    default = "batch" if sink in _BUILT_IN and export is None else "dict"
    rows_in_flight = _number("rows_in_flight", options.get("rows_in_flight", "100000"), int)
    bytes_in_flight = _number("bytes_in_flight", options.get("bytes_in_flight", str(BYTES_IN_FLIGHT)), int)
    config = QueueConfig[Any](**queue)
    config.validate("batchqueue")
    rows = _rows(options.get("rows", default))
    non_finite = options.get("non_finite", "null" if sink in _BUILT_IN else "keep")
    check_non_finite("format batchqueue", non_finite)
    key = options.get("key")
    columns = None if key is None else key if key in {"content", "position"} else _names(key)
    on_bad_row = options.get("on_bad_row", "fail")
    check_on_bad_row("format batchqueue", on_bad_row, given="dead_letters" in options)
    read = WriteOptions(
        sink=sink,
        rows=rows,
        rows_in_flight=rows_in_flight,
        queue=config,
        export=export,
        bytes_in_flight=bytes_in_flight,
        key=check_key_by("format batchqueue", columns),
        non_finite=cast("NonFinite", non_finite),
        dead_letters=options.get("dead_letters"),
        rest=options,
    )
    read.sizes()
    return read


def _check_names(sink: str, options: dict[str, str]) -> None:
    """Refuse names that nothing reads: for a sink of ours all, for a factory those that look like one of ours."""
    known = (*_OWN, *_BUILT_IN.get(sink, ()), *_SPARKS)
    for name in options:
        if name in known or name.startswith(("queue.", "export.", "spark.")):
            continue
        near = difflib.get_close_matches(name, known, 1, _NEAR)
        if sink in _BUILT_IN or (near and near[0] in _OWN and near[0] not in options):
            nearest = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(known[: -len(_SPARKS)])}"
            raise ConfigError(f"format batchqueue: option {name!r} is unknown to sink={sink!r}; {hint}")


def _group(options: dict[str, str], group: str, known: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """The options `group.name`, by their names."""
    found: dict[str, Any] = {}
    for option, text in options.items():
        if not option.startswith(f"{group}."):
            continue
        name = option.removeprefix(f"{group}.")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {f'{group}.{nearest[0]}'!r}? " if nearest else ""
            raise ConfigError(  # without the value, which may be a secret under a wrong name
                f"format batchqueue: option {option!r} is unknown; {hint}there are {group}.{f', {group}.'.join(known)}"
            )
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


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _number(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ConfigError:
        raise
    except ValueError:
        raise _error(name, text, "is not a number", "pass one") from None


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
