"""`App`: the code of a service, registered by the names that its file uses."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async._support.checks import HandlerRule, require
from batchqueue_async._support.wording import clip, name_of, nearest
from batchqueue_async.errors import ConfigError, QueueClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchqueue_async.export.exporter import Exporter
    from batchqueue_async.intake.message import Message
    from batchqueue_async.queue.batch_queue import BatchQueue

F = TypeVar("F")

WHAT = ("handler", "error_handler", "decoder", "encoder", "key", "sink")


class App:
    """What a service's file names and only code can be: handlers, decoders, keys, sinks of one's own.

    `batchqueue run service.yaml --app shop.service:app` gives the file's names to what is registered here.

    Example:
        >>> app = App()
        >>> @app.handler("parse")
        ... async def parse(batch: list[bytes]) -> None:
        ...     await app.queue("rows").produce_many([{"raw": each.decode()} for each in batch])
        >>> app.names("handler")
        ['parse']
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {what: {} for what in WHAT}
        self._types: dict[str, type | None] = {}
        self._queues: dict[str, BatchQueue[Any]] = {}
        self._exporters: dict[str, Exporter] = {}

    # -- what the file names ---------------------------------------------------------------------------------------

    def handler(self, name: str, type: type | None = None) -> Callable[[F], F]:  # noqa: A002 - users write `type=`, the same as for `BatchQueue.handler`
        """Decorator: a handler of batches, or of messages where a source names it.

        Args:
            name: what the file calls it.
            type: the type of the items, for a queue with `handlers`.
        """

        def register(handler: F) -> F:
            require(f"handler {name!r}", "handler", handler, HandlerRule())
            self._types[name] = type
            return self._add("handler", name, handler)

        return register

    def error_handler(self, name: str) -> Callable[[F], F]:
        """Decorator: a function of a failed batch and its error, for `on_error` and `on_dead_letter`."""
        return lambda function: self._add("error_handler", name, function)

    def decoder(self, name: str) -> Callable[[F], F]:
        """Decorator: from a `Message` to its value for a source, from bytes to a record for an exporter."""
        return lambda function: self._add("decoder", name, function)

    def encoder(self, name: str) -> Callable[[F], F]:
        """Decorator: from a record to bytes, for an exporter on disk."""
        return lambda function: self._add("encoder", name, function)

    def key(self, name: str) -> Callable[[F], F]:
        """Decorator: from an item, record or message to the key whose order is kept."""
        return lambda function: self._add("key", name, function)

    def sink(self, name: str) -> Callable[[F], F]:
        """Decorator: a function or class that makes a sink of the `options` in the file."""
        return lambda factory: self._add("sink", name, factory)

    def _add(self, what: str, name: str, value: F) -> F:
        known = self._known[what]
        if name in known and known[name] is not value:
            raise ConfigError(f"{_said(what)} {name!r}: there is one of that name already; choose another name")
        if not callable(value) and what != "handler":
            raise ConfigError(f"{_said(what)} {name!r}: {name_of(value)} can't be called; give a function")
        known[name] = value
        return value

    def names(self, what: str) -> list[str]:
        """The names of one kind: "handler", "error_handler", "decoder", "encoder", "key", "sink"."""
        return list(self._known[what])

    def find(self, what: str, name: str) -> Any:
        """What has a name.

        Raises:
            ConfigError: nothing has it; the message names the nearest.
        """
        if name in self._known[what]:
            return self._known[what][name]
        known = self.names(what)
        if not known:
            way_out = f"register one with @app.{what}({name!r}), and run with --app module:app"
        else:
            way_out = nearest(name, known)
        raise ConfigError(f"{_said(what)} {name!r}: the program has not registered it; {way_out}")

    def type_of(self, handler: str) -> type | None:
        """The type of items that a handler was registered for."""
        return self._types.get(handler)

    # -- what runs -------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> BatchQueue[Any]:
        """A queue of the file, while the service runs.

        Raises:
            QueueClosedError: there is none of that name, or the service does not run.
        """
        return _running("queue", name, self._queues)

    def exporter(self, name: str) -> Exporter:
        """An exporter of the file, while the service runs.

        Raises:
            QueueClosedError: there is none of that name, or the service does not run.
        """
        return _running("exporter", name, self._exporters)

    def attach(self, queues: dict[str, BatchQueue[Any]], exporters: dict[str, Exporter]) -> None:
        """Let the code find what the service has made; called by the service."""
        self._queues, self._exporters = queues, exporters


T = TypeVar("T")


def _running(what: str, name: str, things: dict[str, T]) -> T:
    if name in things:
        return things[name]
    if not things:
        raise QueueClosedError(f"{what} {name!r}: the service does not run now; ask for it in a handler")
    raise QueueClosedError(f"{what} {name!r}: is not in the file; {nearest(name, things)}")


def _said(what: str) -> str:
    return what.replace("_", " ")


def decode_json(message: Message) -> Any:
    """The value of a message that is JSON.

    Example:
        >>> from batchqueue_async.intake.message import Message
        >>> decode_json(Message(b'{"id": 1}'))
        {'id': 1}
    """
    return json.loads(message.body)


def decode_text(message: Message) -> str:
    """The value of a message that is text in UTF-8."""
    return message.body.decode()


DECODERS = {"json": decode_json, "text": decode_text}
"""The decoders of messages that need no code."""


def load_app(reference: str | None, near: Path) -> App:
    """The app that `module:name` names; an empty one for None.

    Modules are looked for where Python looks for a program's: next to the file, and in the present directory.

    Raises:
        ConfigError: the module can't be imported, or has no such app.
    """
    if reference is None:
        return App()
    module, colon, name = reference.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"--app {clip(reference)}: is not MODULE:NAME; write --app shop.service:app")
    for directory in (str(near.resolve().parent), str(Path.cwd())):
        if directory not in sys.path:
            sys.path.insert(0, directory)
    try:
        found: Any = importlib.import_module(module)
        for each in name.split("."):
            found = getattr(found, each)
    except ImportError as error:
        raise ConfigError(f"--app {reference}: can't be imported ({error}); correct the name, or install it") from error
    except AttributeError:
        raise ConfigError(
            f"--app {reference}: the module {module} has no {name}; write {name} = batchqueue_async.service.App()"
        ) from None
    if not isinstance(found, App):
        raise ConfigError(f"--app {reference}: is a {type(found).__name__}, not an App; make it with App()")
    return found
