"""From a file to a `ServiceSpec`: every fault is found at once, in milliseconds, and nothing is opened or imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support.wording import nearest
from batchqueue_async.config_file import Layers, place_of, read_document
from batchqueue_async.errors import ConfigError
from batchqueue_async.service.file.layers import read_layers
from batchqueue_async.service.file.rules import is_reference
from batchqueue_async.service.file.schema import FILE
from batchqueue_async.service.file.shapes import Reader
from batchqueue_async.service.file.spec import SECTIONS, ServiceSpec
from batchqueue_async.sinks.secrets import Secret

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchqueue_async.errors import ConfigFault
    from batchqueue_async.service.file.shapes import Located

_PLACE = re.compile(r"^(?P<file>.*), line (?P<line>\d+), column (?P<column>\d+)$", re.DOTALL)
SPARK_SECTIONS = ("views", "outputs", "spark", "directory", "state", "restart", "timeouts")


def read_service(
    file: str | os.PathLike[str],
    *,
    settings: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    secrets: bool = True,
) -> ServiceSpec:
    """The service of a YAML file, with the environment's `BATCHQUEUE_` variables and `NAME=VALUE` settings over it.

    Args:
        file: the file.
        settings: values by their path with dots: "exporters.warehouse.max_bytes=2GiB".
        environ: the variables; those of the process when None.
        secrets: whether everything that `env:NAME` and `file:/path` refer to has to be there.

    Raises:
        ConfigError: something is wrong; `faults` has everything, in the order of the file.
    """
    path = Path(file)
    layers = Layers()
    content = read_layers(layers, path, FILE, os.environ if environ is None else environ, settings)
    reader = Reader(layers.faults)
    if layers.faults and not content:
        raise ConfigError.of(layers.faults)
    values = FILE.read(reader, "", str(path), content)
    spec = ServiceSpec(
        name=_name_in(values) or path.stem,
        file=path,
        content=content,
        origins=dict(_origins(content, str(path))),
        **{name: value for name, value in values.items() if name not in ("version", "defaults")},
    )
    _Links(reader, spec).check()
    if secrets:
        _check_references(reader, content, str(path))
    if reader.faults:
        raise ConfigError.of(sorted(reader.faults, key=_order(path)))
    return spec


def _name_in(values: dict[str, Any]) -> str | None:
    section: dict[str, Any] = values.get("service") or {}
    return section.get("name")


def is_service_file(file: str | os.PathLike[str]) -> bool:
    """Whether a file is to be read as a service, and not as a pipeline of Spark, which has other sections."""
    top = read_document(Layers(), Path(file)) or {}
    return any(name in FILE.fields and name != "sources" for name in top if name not in ("version", "name")) or not any(
        name in top for name in SPARK_SECTIONS
    )


def where(fault: ConfigFault) -> tuple[str, int | None, int | None]:
    """File, line and column of a fault; or the variable or option that set it, without numbers."""
    found = _PLACE.match(fault.origin or "")
    if found is None:
        return fault.origin or "", None, None
    return found["file"], int(found["line"]), int(found["column"])


def _order(path: Path) -> Any:
    """Sorts faults as they stand in the file; what stands nowhere in it comes last."""

    def place(fault: ConfigFault) -> tuple[bool, int, int]:
        file, line, column = where(fault)
        return file != str(path) or line is None, line or 0, column or 0

    return place


def _origins(content: Mapping[Any, Any], origin: str, path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        place = place_of(content, name, origin)
        yield f"{path}{name}", place
        if isinstance(value, Mapping):
            yield from _origins(cast("Mapping[str, Any]", value), place, f"{path}{name}.")


def _check_references(reader: Reader, content: Any, origin: str, path: str = "") -> None:
    """See to it that everything is there that texts refer to."""
    pairs: list[tuple[str, str, Any]] = []
    if isinstance(content, Mapping):
        section = cast("Mapping[str, Any]", content)
        pairs = [
            (f"{path}.{name}" if path else str(name), place_of(section, name, origin), each)
            for name, each in section.items()
            if path or name != "defaults"
        ]
    elif isinstance(content, list):
        pairs = [(f"{path}[{at}]", origin, each) for at, each in enumerate(cast("list[object]", content))]
    for name, place, value in pairs:
        if is_reference(value):
            try:
                Secret(value).reveal()
            except ConfigError as error:
                rule, _, way_out = str(error).rpartition("; ")
                reader.fault(name, place, f"can't be read: {rule}", way_out)
        else:
            _check_references(reader, value, place, name)


def _names_in(section: Any) -> list[str]:
    return [str(name) for name in cast("Mapping[str, Any]", section)] if isinstance(section, Mapping) else []


class _Links:
    """What names what: everything that is named is there, no two share what belongs to one."""

    def __init__(self, reader: Reader, spec: ServiceSpec) -> None:
        self._reader = reader
        self._spec = spec
        content: Any = spec.content
        # A thing that could not be read is there all the same: it has its own faults already.
        self._names: dict[str, list[str]] = {section: _names_in(content.get(section)) for section in SECTIONS}

    def check(self) -> None:
        spec = self._spec
        for name, source in spec.sources.items():
            self._source(f"sources.{name}", source)
        for name, queue in spec.queues.items():
            self._known(f"queues.{name}", queue, "exporter", "exporters")
            for each in queue.values.get("feeds", ()):
                self._is_known(f"queues.{name}.feeds", queue.place("feeds"), each, self._names["queues"], "queue")
            if name in queue.values.get("feeds", ()):
                rule, way_out = "names the queue itself", "name only other queues"
                self._reader.fault(f"queues.{name}.feeds", queue.place("feeds"), rule, way_out)
        for name, exporter in spec.exporters.items():
            self._exporter(name, exporter)
        for name in set(self._names["queues"]) & set(self._names["exporters"]):
            origin = self._spec.origins.get(f"exporters.{name}", "")
            rule, way_out = "has the name of a queue, and a source names both alike", "rename one of the two"
            self._reader.fault(f"exporters.{name}", origin, rule, way_out)
        self._traces()
        self._shared_sinks()
        self._shared_paths()
        runs = any(self._names[each] for each in ("sources", "queues", "exporters", "pipelines"))
        if not runs and not self._reader.faults:
            way_out = "add sources, queues or exporters; `batchqueue new` writes a file to begin with"
            self._reader.fault("", str(spec.file), "has nothing that runs", way_out)

    def _traces(self) -> None:
        known = [name for section in ("sources", "queues", "exporters") for name in self._names[section]]
        origin = self._spec.origins.get("observe.traces.skip", "")
        section: dict[str, Any] = self._spec.observe.get("traces") or {}
        for each in section.get("skip", ()):
            self._is_known("observe.traces.skip", origin, each, known, "source, queue or exporter")

    def _source(self, path: str, source: Located) -> None:
        given = [each for each in ("to", "handler") if source.values.get(each) is not None]
        if len(given) != 1:
            rule = "is given together with to" if given else "is missing"
            name, way_out = (
                ("handler", "give only one of the two")
                if given
                else ("to", "add to: QUEUE, to: EXPORTER or handler: NAME")
            )
            self._reader.fault(f"{path}.{name}", source.place(name), rule, way_out)
        if source.values.get("to") is not None:
            known = [*self._names["queues"], *self._names["exporters"]]
            self._is_known(f"{path}.to", source.place("to"), source.values["to"], known, "queue or exporter")

    def _exporter(self, name: str, exporter: Located) -> None:
        path = f"exporters.{name}"
        self._known(path, exporter, "sink", "sinks")
        self._known(path, exporter, "dead_letters", "exporters")
        seen = [name]
        here: Located | None = exporter
        while here is not None and (further := here.values.get("dead_letters")) is not None:
            if further in seen:
                rule = f"leads back to {further!r}: {' -> '.join([*seen, further])}"
                self._reader.fault(
                    f"{path}.dead_letters", exporter.place("dead_letters"), rule, "end in another exporter"
                )
                return
            seen.append(further)
            here = self._spec.exporters.get(further)

    def _shared_sinks(self) -> None:
        """A sink belongs to one exporter, which opens and closes it."""
        users: dict[str, str] = {}
        for name, exporter in self._spec.exporters.items():
            sink = exporter.values.get("sink")
            if sink in users:
                rule = f"is the sink of {users[sink]!r} too"
                self._reader.fault(
                    f"exporters.{name}.sink", exporter.place("sink"), rule, "give each a sink of its own", value=sink
                )
            elif sink is not None:
                users[sink] = name

    def _shared_paths(self) -> None:
        users: dict[str, str] = {}
        for name, exporter in self._spec.exporters.items():
            given = exporter.values.get("path")
            if given is None:
                continue
            path = os.path.realpath(given)
            if path in users:
                rule = f"is the directory of {users[path]!r} too"
                self._reader.fault(
                    f"exporters.{name}.path", exporter.place("path"), rule, "give each one of its own", value=given
                )
            users.setdefault(path, name)

    def _known(self, path: str, thing: Located, field: str, section: str) -> None:
        name = thing.values.get(field)
        if name is not None:
            self._is_known(f"{path}.{field}", thing.place(field), name, self._names[section], section[:-1])

    def _is_known(self, path: str, origin: str, name: str, known: list[str], what: str) -> None:
        if name not in known:
            way_out = nearest(name, known) if known else "there is none; add it"
            article = "an" if what.startswith("e") else "a"
            self._reader.fault(path, origin, f"is not {article} {what} of this file", way_out, value=name)


def warnings_of(spec: ServiceSpec) -> list[ConfigFault]:
    """What is not wrong, and probably not meant."""
    reader = Reader()
    used = {exporter.values.get("sink") for exporter in spec.exporters.values()}
    for name, sink in spec.sinks.items():
        if name not in used:
            reader.fault(f"sinks.{name}", sink.origin, "is used by no exporter", "remove it, or name it in an exporter")
    fed = {
        *(source.values.get("to") for source in spec.sources.values()),
        *(queue.values.get("exporter") for queue in spec.queues.values()),
        *(exporter.values.get("dead_letters") for exporter in spec.exporters.values()),
    }
    for name, exporter in spec.exporters.items():
        if name not in fed:
            rule = "is fed by nothing in the file"
            reader.fault(f"exporters.{name}", exporter.origin, rule, "only the program's code can feed it")
        if exporter.values.get("path") is None and exporter.values.get("overflow", "drop_oldest").startswith("drop"):
            rule = "keeps records in memory, and drops the oldest when it is full"
            way_out = "set path to keep them on disk, or overflow: block"
            reader.fault(f"exporters.{name}", exporter.origin, rule, way_out)
    return reader.faults
