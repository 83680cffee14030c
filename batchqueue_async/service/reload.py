"""Reading the file again while the service runs: what can change in place does, anything else refuses all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from batchqueue_async._support import log
from batchqueue_async.errors import BatchQueueError, ConfigError
from batchqueue_async.service import logs
from batchqueue_async.service.building import Builder
from batchqueue_async.service.file.schema import FILE, export_config
from batchqueue_async.service.file.shapes import Field, Shape, Struct, Tagged, Things

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchqueue_async.config import QueueConfig
    from batchqueue_async.queue.batch_queue import BatchQueue
    from batchqueue_async.service.file.spec import ServiceSpec
    from batchqueue_async.service.running import Service

_GONE: Any = object()
NOT_RUN = ("version", "defaults")


class Change(NamedTuple):
    """A value that differs.

    Attributes:
        path: where, as names.
        live: whether it can change while the service runs.
        what: "changed", "added" or "removed".
    """

    path: tuple[str, ...]
    live: bool
    what: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} {self.what}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Everything in which two files differ.

    Example:
        >>> [str(each) for each in changes({"logs": {"level": "info"}}, {"logs": {"level": "debug"}})]
        ['logs.level changed']
    """
    return [each for each in _differences(FILE, before, after, (), live=False) if each.path[0] not in NOT_RUN]


def _differences(of: Any, before: Any, after: Any, path: tuple[str, ...], *, live: bool) -> Iterator[Change]:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        old, new = cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", after)
        for name in dict.fromkeys((*old, *new)):
            field = _field(of, name, new)
            inner = None if field is None else field.of
            yield from _differences(
                inner,
                old.get(name, _GONE),
                new.get(name, _GONE),
                (*path, str(name)),
                live=live or (field is not None and field.live),
            )
        return
    # A section that appears or goes is as if it had been empty.
    if len(path) == 1 and isinstance(of, Struct) and _GONE in (before, after):
        nothing: dict[str, Any] = {}
        yield from _differences(
            of, nothing if before is _GONE else before, nothing if after is _GONE else after, path, live=live
        )
        return
    what = "added" if before is _GONE else "removed" if after is _GONE else "changed"
    yield Change(path, live, what)


def _field(of: Shape | None, name: str, content: Mapping[str, Any]) -> Field | None:
    if isinstance(of, Struct):
        return of.fields.get(name)
    if isinstance(of, Things):
        return Field(of=of.of)
    if isinstance(of, Tagged):
        kind = of.kinds.get(str(content.get("type")))
        return None if kind is None else kind.fields.get(name)
    return None


class Reloading:
    """Changes a running service as its file says."""

    def __init__(self, service: Service, read: Callable[[], ServiceSpec] | None) -> None:
        self._service = service
        self._read = read

    async def reload(self) -> bool:
        """Read the file and take it, or refuse it whole; which of the two."""
        service = self._service
        if self._read is None:
            log.warning("reload_refused", service=service.spec.name, reason="it was not read from a file")
            return False
        try:
            spec = self._read()
        except ConfigError as error:
            for fault in error.faults or (error,):
                log.error("reload_refused", service=service.spec.name, reason=str(fault))
            return False
        found = changes(service.spec.content, spec.content)
        refused = [f"{each}; restart" for each in found if not each.live]
        refused = refused or self._limits(spec)
        if refused:
            for reason in refused:
                log.error("reload_refused", service=service.spec.name, reason=reason)
            return False
        return self._take(spec, found)

    def _limits(self, spec: ServiceSpec) -> list[str]:
        """What only looks as if it could change, such as a limit that is lowered."""
        refused: list[str] = []
        for name, exporter in self._service.exporters.items():
            refused += exporter.refusals(export_config(spec.exporters[name].values, self._service.app.find))
        return refused

    def _take(self, spec: ServiceSpec, found: list[Change]) -> bool:
        service = self._service
        builder = Builder(spec, service.app)
        touched = {(each.path[0], each.path[1]) for each in found if len(each.path) > 1}
        done: list[tuple[BatchQueue[Any], QueueConfig[Any]]] = []
        try:
            configs = builder.queue_configs(service.exporters)
            builder.finish()
            for name, config in configs.items():
                if ("queues", name) in touched:
                    queue, before = service.queues[name], service.queues[name].config
                    queue.reconfigure(config)
                    done.append((queue, before))
        except BatchQueueError as error:
            for queue, before in done:
                queue.reconfigure(before)
            log.error("reload_refused", service=service.spec.name, reason=str(error))
            return False
        # None of these refuses any more: `_limits` has asked them.
        for name, exporter in service.exporters.items():
            if ("exporters", name) in touched:
                exporter.reconfigure(export_config(spec.exporters[name].values, service.app.find))
        if any(each.path[0] == "logs" for each in found):
            logs.configure(spec.logs.get("level", "info"), spec.logs.get("format", "text"))
        service.spec = spec
        log.info("reloaded", service=spec.name, changes=[str(each) for each in found])
        return True
