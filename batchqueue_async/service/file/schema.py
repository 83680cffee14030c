"""The service file as a whole: its sections, and the fields of queues and exporters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchqueue_async._support.checks import Choice, Flag, Seconds, Whole
from batchqueue_async.config import (
    CHANGEABLE,
    HANDLER_OPTION_RULES,
    QUEUE_RULES,
    WORKERS_RULE,
    HandlerOptions,
    QueueConfig,
)
from batchqueue_async.durable.config import DURABLE_RULES, DurableConfig
from batchqueue_async.errors import ConfigError, ConfigFault
from batchqueue_async.export.config import CHANGEABLE as EXPORT_CHANGEABLE
from batchqueue_async.export.config import EXPORT_RULES, ExportConfig
from batchqueue_async.policies import by_key
from batchqueue_async.service.file.kinds import SINK, SOURCE
from batchqueue_async.service.file.parts import (
    ADAPTIVE,
    BATCH,
    BREAKER,
    FAILOVER,
    FLAG,
    RATE,
    RETRY,
    SECONDS,
    SPLIT,
    fields_of,
    make_policies,
)
from batchqueue_async.service.file.rules import Addresses, AnyMap, Named, Registered, SecretText, Text, Texts
from batchqueue_async.service.file.shapes import Field, Struct, Things

if TYPE_CHECKING:
    from collections.abc import Callable

LOG_LEVELS = ("debug", "info", "warning", "error")
QUEUE_CODE = ("consumer", "fallback", "on_error")

# -- queues --------------------------------------------------------------------------------------------------------

_HANDLER = Registered(what="handler")
_TAKER = Struct(
    fields=fields_of(HandlerOptions, HANDLER_OPTION_RULES),
    make=HandlerOptions,
    what="handler's options",
)
_QUEUE_FIELDS: dict[str, Field] = {
    "handler": Field(of=_HANDLER, text="the handler of every batch"),
    "handlers": Field(
        of=Things(of=_TAKER, what="handler"),
        text="instead of `handler`: handlers by the type that `@app.handler(name, type=...)` gave them, with options",
    ),
    "exporter": Field(
        of=Named(sections=("exporters",)), text="instead of `handler`: the exporter that takes every batch"
    ),
    "fallback": Field(of=_HANDLER, text="with `handlers`: the handler of items whose type has none"),
    "on_error": Field(of=Registered(what="error_handler"), text="what takes batches whose handler failed"),
    "key": Field(of=Registered(what="key"), text="items of one key go to one partition, in their order"),
    **fields_of(QueueConfig, QUEUE_RULES, live=CHANGEABLE, without=(*QUEUE_CODE, "strategy")),
}


def queue_config(values: dict[str, Any], find: Callable[[str, str], Any], name: str = "queue") -> QueueConfig[Any]:
    """The configuration of a queue, without the handler, which is a matter of where the queue leads.

    Args:
        values: its fields as they were read.
        find: gives what the program registered, by kind and name.
        name: the queue's name, for messages.
    """
    given = {each: value for each, value in values.items() if each in QUEUE_RULES and each not in QUEUE_CODE}
    if "key" in values:
        given["selector"] = by_key(find("key", values["key"]))
    config: QueueConfig[Any] = QueueConfig(**given)
    config.validate(name)
    return config


def _check_queue(**values: Any) -> None:
    ways = [each for each in ("handler", "handlers", "exporter") if values.get(each) is not None]
    if len(ways) != 1:
        rule = f"is given together with {ways[0]}" if ways else "is missing"
        _refuse(ways[-1] if ways else "handler", rule, "give exactly one of handler, handlers, exporter")
    if "fallback" in values and "handlers" not in values:
        _refuse("fallback", f"goes with handlers, and there is {ways[0]}", "leave it out")
    if "key" in values and "selector" in values:
        _refuse("key", "is given together with selector", "give only one of the two")
    queue_config(values, _stand_in)


# -- exporters -----------------------------------------------------------------------------------------------------

_DURABLE_SAID_ELSEWHERE = ("max_records", "max_bytes", "overflow", "block_timeout", "order", "key")
DURABLE = Struct(
    fields=fields_of(DurableConfig, DURABLE_RULES, without=_DURABLE_SAID_ELSEWHERE),
    make=DurableConfig,
    what="durable section",
)
_EXPORTER_FIELDS: dict[str, Field] = {
    "sink": Field(of=Named(sections=("sinks",)), needed=True, text="where records go"),
    "check": Field(
        of=Choice(words=("warn", "fail", "off")),
        default="warn",
        text="what happens at the start when the sink can't be opened: warn and try again later, fail, or off",
    ),
    "check_timeout": Field(of=SECONDS.of, text="seconds for that; `send_timeout` without"),
    "dead_letters": Field(of=Named(sections=("exporters",)), text="the exporter that takes what is given up"),
    **fields_of(
        ExportConfig,
        EXPORT_RULES,
        live=(*EXPORT_CHANGEABLE, "max_records", "max_bytes"),
        path=Text(optional=True),
        durable=DURABLE,
        batch=BATCH,
        retry=RETRY,
        breaker=BREAKER,
        rate=RATE,
        workers=WORKERS_RULE,
        adaptive=ADAPTIVE,
        split=SPLIT,
        failover=FAILOVER,
        key=Registered(what="key"),
        encode=Registered(what="encoder"),
        decode=Registered(what="decoder"),
        on_dead_letter=Registered(what="error_handler"),
    ),
}
_KIND_OF = {"key": "key", "encode": "encoder", "decode": "decoder", "on_dead_letter": "error_handler"}


def export_config(values: dict[str, Any], find: Callable[[str, str], Any]) -> ExportConfig:
    """The configuration of an exporter.

    Args:
        values: its fields as they were read.
        find: gives what the program registered, by kind and name.
    """
    given = make_policies({name: value for name, value in values.items() if name in EXPORT_RULES})
    if isinstance(given.get("durable"), dict):
        given["durable"] = DurableConfig(**given["durable"])
    for name, kind in _KIND_OF.items():
        if name in given:
            given[name] = find(kind, given[name])
    return ExportConfig(**given)


def _check_exporter(**values: Any) -> None:
    export_config(values, _stand_in)


def _stand_in(kind: str, _name: str) -> Any:
    """A function in the place of one that the program registers: names are looked up when its code is loaded."""
    if kind == "error_handler":
        return _take_two
    return _take_one


def _take_one(_: object) -> None: ...


def _take_two(_: object, __: object) -> None: ...


def _switch(value: Any) -> dict[str, Any] | None:
    """What `true` and `false` stand for."""
    return {"enabled": value} if isinstance(value, bool) else None


# -- the file ------------------------------------------------------------------------------------------------------

FILE = Struct(
    what="service file",
    fields={
        "version": Field(of=Whole(most=1), default=1, text="of the format; there is one"),
        "service": Field(
            of=Struct(
                what="service section",
                fields={
                    "name": Field(of=Text(), text="what logs call it; the file's name without"),
                    "drain_timeout": Field(
                        of=Seconds(above=False),
                        default=30.0,
                        live=True,
                        text="seconds from the first SIGTERM or SIGINT until the process ends",
                    ),
                    "start_timeout": Field(
                        of=Seconds(), default=60.0, text="seconds until everything is open; then the start has failed"
                    ),
                    "secrets_every": Field(
                        of=Seconds(), default=5.0, text="seconds between two looks at the files that hold secrets"
                    ),
                },
            ),
            text="the process",
        ),
        "observe": Field(
            of=Struct(
                what="observe section",
                fields={
                    "listen": Field(
                        of=Addresses(),
                        default=["unix:"],
                        text="addresses: 127.0.0.1:9464, unix:/path; unix: is the socket that `batchqueue top` finds",
                    ),
                    "token": Field(of=SecretText(), text="what callers show, as env:NAME or file:/path"),
                    "hosts": Field(of=Texts(), text="further host names by which the pages may be called"),
                    "enabled": Field(of=Flag(), default=True, text="whether anything is served"),
                    "traces": Field(
                        of=Struct(
                            what="traces section",
                            fields={
                                "enabled": Field(of=Flag(), default=True, text="whether batches are traced"),
                                "skip": Field(
                                    of=Texts(),
                                    text="sources, queues and exporters that are left out, as those that carry spans",
                                ),
                            },
                            shorthand=_switch,
                            optional=True,
                        ),
                        text="`true` makes OpenTelemetry spans of batches, whether or not anything is served",
                    ),
                },
            ),
            text="metrics, health and the live page",
        ),
        "logs": Field(
            of=Struct(
                what="logs section",
                fields={
                    "level": Field(
                        of=Choice(words=LOG_LEVELS), default="info", live=True, text="the least that is logged"
                    ),
                    "format": Field(
                        of=Choice(words=("text", "json")),
                        default="text",
                        text="a line per event, for people or programs",
                    ),
                },
            ),
            text="log events, on standard error",
        ),
        "defaults": Field(of=AnyMap(), text="anything, for anchors and `<<`; nothing reads it"),
        "sources": Field(of=Things(of=SOURCE, what="source"), text="where messages come from"),
        "queues": Field(
            of=Things(of=Struct(fields=_QUEUE_FIELDS, make=_check_queue, what="queue"), what="queue"),
            text="queues in memory, drained in batches",
        ),
        "exporters": Field(
            of=Things(of=Struct(fields=_EXPORTER_FIELDS, make=_check_exporter, what="exporter"), what="exporter"),
            text="what keeps records until a sink took them",
        ),
        "sinks": Field(of=Things(of=SINK, what="sink"), text="where records end"),
        "pipelines": Field(
            of=Things(
                what="pipeline",
                of=Struct(
                    what="pipeline",
                    fields={
                        "file": Field(of=Text(), needed=True, text="a pipeline of Spark, in a file of its own"),
                        "once": Field(of=FLAG.of, default=False, text="take what the sources have now, and end"),
                    },
                ),
            ),
            text="pipelines of Spark that run with the service, and stop it when one of them fails",
        ),
    },
)


def _refuse(path: str, rule: str, way_out: str) -> None:
    raise ConfigError.of([ConfigFault(path=path, rule=rule, way_out=way_out)])
