"""From a `ServiceSpec` to objects: sinks, exporters, queues and consumers, made and not yet opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from batchqueue_async._support.log import describe
from batchqueue_async.errors import BatchQueueError, ConfigError, ConfigFault
from batchqueue_async.export.exporter import Exporter
from batchqueue_async.intake.config import INTAKE_RULES
from batchqueue_async.intake.ports import DROP, KEY, PARTITION
from batchqueue_async.service.app import DECODERS
from batchqueue_async.service.file.kinds import SINKS, SOURCES
from batchqueue_async.service.file.parts import make_policies
from batchqueue_async.service.file.rules import is_reference
from batchqueue_async.service.file.schema import export_config, queue_config
from batchqueue_async.sinks.base import require_sink
from batchqueue_async.sinks.secrets import Secret, resolve
from batchqueue_async.sinks.tls import Tls

if TYPE_CHECKING:
    from batchqueue_async.config import QueueConfig
    from batchqueue_async.service.app import App
    from batchqueue_async.service.file.shapes import Located
    from batchqueue_async.service.file.spec import ServiceSpec

T = TypeVar("T")

# Options that their class reads itself, at each connection; every other reference is resolved when the object is made.
_READ_LATER = frozenset({"user", "password", "token", "proxy", "dsn"})
_MAPS_OF_SECRETS = frozenset({"headers"})
_MAPS_READ_LATER = frozenset({"options", "storage_options", "catalog"})


class Builder:
    """Makes what a file describes; every thing that can't be made is a fault with its place.

    Attributes:
        faults: what can't be made.
    """

    def __init__(self, spec: ServiceSpec, app: App) -> None:
        self._spec = spec
        self._app = app
        self.faults: list[ConfigFault] = []

    def finish(self) -> None:
        """Raise `ConfigError` for everything that could not be made."""
        if self.faults:
            raise ConfigError.of(self.faults)

    def _make(self, path: str, thing: Located, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except BatchQueueError as error:
            self._fault(path, thing, str(error))
        except Exception as error:  # noqa: BLE001 - the class is the user's or another library's: any error is a fault of the file
            said = describe(error)
            self._fault(path, thing, f"{said['error']}: {said['text']}")
        return None

    def _fault(self, path: str, thing: Located, text: str) -> None:
        rule, _, way_out = text.rpartition("; ")
        self.faults.append(
            ConfigFault(
                path=path,
                rule=f"can't be made: {rule or way_out}",
                way_out=way_out if rule else "correct it",
                origin=thing.origin,
            )
        )

    # -- sinks and exporters ---------------------------------------------------------------------------------------

    def sinks(self) -> dict[str, Any]:
        """The sinks, by name."""
        made = {
            name: self._make(f"sinks.{name}", each, partial(self.sink, each)) for name, each in self._spec.sinks.items()
        }
        return {name: sink for name, sink in made.items() if sink is not None}

    def sink(self, thing: Located) -> Any:
        """One sink."""
        values = dict(thing.values)
        kind = values.pop("type")
        if kind == "code":
            options: dict[str, Any] = values.get("options") or {}
            made = self._app.find("sink", values["use"])(**{name: _value(each) for name, each in options.items()})
            return require_sink(made, f"@app.sink({values['use']!r})")
        return construct(SINKS[kind], values)

    def exporters(self, sinks: Mapping[str, Any]) -> dict[str, Exporter]:
        """The exporters, by name, each after the one that takes its dead letters."""
        made: dict[str, Exporter] = {}

        def make(name: str) -> None:
            thing = self._spec.exporters[name]
            further = thing.values.get("dead_letters")
            if further is not None and further not in made and further in self._spec.exporters:
                make(further)
            sink = sinks.get(thing.values["sink"])
            if name in made or sink is None:
                return
            found = self._make(
                f"exporters.{name}",
                thing,
                lambda: self._exporter(name, thing, sink, None if further is None else made.get(further)),
            )
            if found is not None:
                made[name] = found

        for name in self._spec.exporters:
            make(name)
        return made

    def _exporter(self, name: str, thing: Located, sink: Any, dead_letters: Exporter | None) -> Exporter:
        values = thing.values
        return Exporter(
            sink,
            export_config(values, self._app.find),
            name=name,
            check=values.get("check", "warn"),
            check_timeout=values.get("check_timeout"),
            dead_letters=dead_letters,
        )

    # -- queues ----------------------------------------------------------------------------------------------------

    def queue_configs(self, exporters: Mapping[str, Exporter]) -> dict[str, QueueConfig[Any]]:
        """The configurations of the queues, with their single handlers."""
        made = {
            name: self._make(f"queues.{name}", each, partial(self._queue, name, each, exporters))
            for name, each in self._spec.queues.items()
        }
        return {name: config for name, config in made.items() if config is not None}

    def _queue(self, name: str, thing: Located, exporters: Mapping[str, Exporter]) -> QueueConfig[Any]:
        values, find = thing.values, self._app.find
        config = queue_config(values, find, name)
        code: dict[str, Any] = {}
        if values.get("handler") is not None:
            code["consumer"] = find("handler", values["handler"])
        elif values.get("exporter") is not None:
            code["consumer"] = exporters.get(values["exporter"])
        handlers: dict[str, Any] = values.get("handlers") or {}
        for handler in handlers:
            find("handler", handler)
            if self._app.type_of(handler) is None:
                raise ConfigError(
                    f"handler {handler!r} was registered without a type; write @app.handler({handler!r}, type=...)"
                )
        if "fallback" in values:
            code["fallback"] = find("handler", values["fallback"])
        if "on_error" in values:
            code["on_error"] = find("error_handler", values["on_error"])
        return replace(config, **{each: value for each, value in code.items() if value is not None})

    # -- sources ---------------------------------------------------------------------------------------------------

    def consumers(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """The consumers, by name; `targets` are the queues and exporters that they may lead to."""
        made = {
            name: self._make(f"sources.{name}", each, partial(self._consumer, name, each, targets))
            for name, each in self._spec.sources.items()
        }
        return {name: consumer for name, consumer in made.items() if consumer is not None}

    def _consumer(self, name: str, thing: Located, targets: Mapping[str, Any]) -> Any:
        values = dict(thing.values)
        kind = values.pop("type")
        to, handler = values.pop("to", None), values.pop("handler", None)
        target = self._app.find("handler", handler) if to is None else targets[to]
        options: dict[str, Any] = {
            each: values.pop(each) for each in list(values) if each in INTAKE_RULES and each != "dead_letters"
        }
        options = make_policies(options)
        dead = values.pop("dead_letters")
        options["dead_letters"] = DROP if dead == "drop" else dead
        if options.get("decode") is not None:
            options["decode"] = DECODERS.get(options["decode"]) or self._app.find("decoder", options["decode"])
        if options.get("ordered_by") is not None:
            known = {"partition": PARTITION, "key": KEY}
            options["ordered_by"] = known.get(options["ordered_by"]) or self._app.find("key", options["ordered_by"])
        return construct(SOURCES[kind], {**values, **options}, target, name=name)


def is_read_later(field: str) -> bool:
    """Whether what a field refers to is read at each connection, so that a new value is used without a restart."""
    return field in _READ_LATER or field in _MAPS_OF_SECRETS or field in _MAPS_READ_LATER


def construct(kind: Any, values: Mapping[str, Any], *more: Any, **named: Any) -> Any:
    """An object of a class that a file names."""
    given = {name: _option(name, value) for name, value in values.items()}
    if kind.extra == "kafka" and is_reference(given.get("user")):
        given["user"] = resolve(given["user"])  # which its client takes as it is
    places = [given.pop(name) for name in kind.positional]
    return kind.load()(*places, *more, **given, **named)


def _option(name: str, value: Any) -> Any:
    """An option as its class takes it."""
    if name == "tls":
        return _tls(value)
    if name == "oauth2" and isinstance(value, dict):
        from batchqueue_async.sinks.http import OAuth2  # noqa: PLC0415 - httpx is an extra

        return OAuth2(**cast("dict[str, Any]", value))
    if isinstance(value, Mapping) and name in _MAPS_OF_SECRETS:
        pairs = cast("Mapping[str, Any]", value).items()
        return {each: Secret(one) if is_reference(one) else one for each, one in pairs}
    if name in _READ_LATER or name in _MAPS_READ_LATER:
        return cast("object", value)
    return _value(value)


def _tls(given: dict[str, Any] | None) -> Tls | None:
    if given is None:
        return None
    return Tls(**{name: each if name == "key_password" else _value(each) for name, each in given.items()})


def _value(value: Any) -> Any:
    """A value, with what it refers to in its place."""
    if isinstance(value, Mapping):
        return {name: _value(each) for name, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_value(each) for each in cast("list[object]", value)]
    return resolve(cast("str", value)) if is_reference(value) else cast("object", value)
