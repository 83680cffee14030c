"""From a file or mapping to a `PipelineSpec`: every fault is found at once, and none of it needs a running Spark."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support.checks import Choice, Flag, Seconds, Whole
from batchqueue_async._support.wording import closest, nearest
from batchqueue_async.config_file import Layers, Section, read_document, read_value
from batchqueue_async.errors import ConfigError
from batchqueue_async.spark.pipelines.fields import (
    OPTIONS,
    Faults,
    Field,
    Interval,
    Name,
    Part,
    Text,
    Texts,
    at,
)
from batchqueue_async.spark.pipelines.kinds import JDBC_DRIVERS, SOURCES, TARGETS
from batchqueue_async.spark.pipelines.restart import RESTART_RULES, RestartPolicy
from batchqueue_async.spark.pipelines.spec import (
    OutputSpec,
    PipelineSpec,
    SessionSpec,
    SourceSpec,
    StoreSpec,
    TargetSpec,
    Timeouts,
    TriggerSpec,
    ViewSpec,
    Watermark,
)
from batchqueue_async.spark.pipelines.sql_names import table_names
from batchqueue_async.spark.pipelines.targets import make_sink, upserts

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchqueue_async.spark.pipelines.kinds import TargetKind
    from batchqueue_async.spark.pipelines.spec import Place

SECTIONS = ("sources", "views", "outputs", "spark", "restart", "timeouts")
_TOP = {
    "version": Field(rule=Whole(most=1), default=1),
    "name": Field(rule=Text()),
    "directory": Field(rule=Text(), default="."),
    "state": Field(rule=Text(), default="state"),
}
_SESSION = {
    "master": Field(rule=Text()),
    "packages": Field(rule=Texts(), default=()),
    "jars": Field(rule=Texts(), default=()),
    "py_files": Field(rule=Texts(), default=()),
    "conf": OPTIONS,
    "log_level": Field(rule=Choice(words=("off", "error", "warn", "info", "debug")), default="error"),
}
_WATERMARK = {"column": Field(rule=Text(), needed=True), "delay": Field(rule=Interval(), needed=True)}
_SOURCE = {"static": Field(rule=Flag(), default=False), "time": Field(rule=Text())}
_VIEW = {"sql": Field(rule=Text(code=True)), "function": Field(rule=Text()), "inputs": Field(rule=Texts(), default=())}
_STORE = {
    "path": Field(rule=Text()),
    "retention": Field(rule=Text()),
    "partitions": Field(rule=Whole(most=10_000)),
}
_OUTPUT = {
    "view": Field(rule=Name(), needed=True),
    "mode": Field(rule=Choice(words=("append", "update", "complete")), default="append"),
    "checkpoint": Field(rule=Text(), is_path=True),
    "key": Field(rule=Texts(least=1), default=()),
    "dead_letters": Field(rule=Text(), is_path=True),
}
_TIMEOUTS = {
    "start": Field(rule=Seconds(), default=180.0),
    "stop": Field(rule=Seconds(), default=30.0),
    "once": Field(rule=Seconds()),
}
_RESTART = {name: Field(rule=rule) for name, rule in RESTART_RULES.items()}
_PLACES = ("driver", "executors", "spark")


def read_file(path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> PipelineSpec:
    """The pipeline of a YAML file.

    Raises:
        ConfigError: something is wrong with it; `faults` has everything.
    """
    file = Path(path)
    layers = Layers()
    content = read_document(layers, file)
    faults = Faults()
    faults.extend(layers.faults)
    if content is None or not layers.whole:
        faults.finish()
    return _read(content or {}, str(file), file.stem, overrides, faults)


def read_mapping(mapping: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> PipelineSpec:
    """The pipeline of a mapping, as a file has it.

    Raises:
        ConfigError: something is wrong with it; `faults` has everything.
    """
    return _read(mapping, "the mapping", "pipeline", overrides, Faults())


def _read(
    content: Mapping[str, Any], origin: str, name: str, overrides: Mapping[str, Any] | None, faults: Faults
) -> PipelineSpec:
    content = _overridden(content, overrides or {}, faults)
    reading = _Reading(Part("", origin, content, faults), faults)
    spec = reading.read(name)
    faults.finish()
    return spec


def _overridden(content: Mapping[str, Any], overrides: Mapping[str, Any], faults: Faults) -> Mapping[str, Any]:
    """The content with the values of overrides, whose names have dots between those of sections."""
    for name, given in overrides.items():
        content = _with(content, name.split("."), _override(name, given, faults), f"override {name}")
    return content


def _override(name: str, value: Any, faults: Faults) -> Any:
    if not isinstance(value, str):
        return value
    layers = Layers()
    read = read_value(layers, f"override {name}", value)
    faults.extend(layers.faults)
    return read


def _with(content: Any, names: list[str], value: Any, origin: str) -> Section:
    made = Section(cast("Mapping[object, object]", content) if isinstance(content, Mapping) else {})
    made.places = dict(content.places) if isinstance(content, Section) else {}
    first, *rest = names
    made[first] = _with(made.get(first), rest, value, origin) if rest else value
    made.places[first] = origin
    return made


class _Reading:
    """One reading of a file."""

    def __init__(self, top: Part, faults: Faults) -> None:
        self._top = top
        self._faults = faults
        self._directory = Path()
        self._state = ""
        self._session = SessionSpec()
        self._sources: dict[str, SourceSpec] = {}
        self._views: dict[str, ViewSpec] = {}
        self._checkpoints: dict[str, str] = {}

    def read(self, name: str) -> PipelineSpec:
        top = self._top.read(_TOP, also=SECTIONS)
        self._directory = Path(top["directory"]).expanduser()
        self._state = at(self._directory, top["state"])
        self._session = self._read_session()
        self._sources = {
            name: self._source(name, part) for name, part in self._top.sections("sources", "source").items()
        }
        if not self._sources and "sources" not in [each.path for each in self._faults.found]:
            self._top.fault("sources", "has no source", "add sources: {name: {type: ...}}")
        views = self._top.sections("views", "view")
        for each, part in views.items():
            self._views[each] = self._view(each, part, list(views))
        outputs = {each: self._output(each, part) for each, part in self._top.sections("outputs", "output").items()}
        if not outputs and not self._faults.found:
            self._top.fault("outputs", "has no output", "add outputs: {name: {view: ..., to: {type: ...}}}")
        spec = PipelineSpec(
            name=top["name"] or name,
            directory=self._directory,
            state=self._state,
            session=self._session,
            sources=self._sources,
            views=self._views,
            outputs={each: output for each, output in outputs.items() if output is not None},
            restart=self._read_restart(),
            timeouts=Timeouts(**self._top.part("timeouts").read(_TIMEOUTS)),
        )
        self._check_unused(spec)
        return spec

    # -- Spark itself --------------------------------------------------------------------------------------------------

    def _read_session(self) -> SessionSpec:
        part = self._top.part("spark")
        values = part.read(_SESSION)
        part.check_references(values)
        for name in values["conf"]:
            if not name.startswith("spark."):
                part.fault("conf", f"names {name!r}, which is not a setting of Spark", "its settings begin with spark.")
        for name in ("jars", "py_files"):
            values[name] = tuple(at(self._directory, each) for each in values[name])
        return SessionSpec(**values)

    def _read_restart(self) -> RestartPolicy:
        given = self._top.part("restart").read(_RESTART)
        return RestartPolicy(**{name: value for name, value in given.items() if value is not None})

    def _need_jars(self, part: Part, name: str, start: str, coordinates: str) -> None:
        """A fault where a jar is needed and, as far as can be seen from here, Spark will not load it."""
        session = self._session
        artifact = coordinates.partition(":")[2]
        if any(artifact.split("_")[0] in each for each in session.packages) or not _is_local(session.master):
            return
        named = [
            *session.jars,
            *(text for key, text in session.conf.items() if "jars" in key or "extraClassPath" in key),
        ]
        if any(start in each for each in named) or any(start in each for each in _installed_jars()):
            return
        way_out = f"add spark: {{packages: ['{coordinates}:VERSION']}}, or its files to spark: {{jars: [...]}}"
        shown = part.values.get(name) if name == "type" else None
        part.fault(name, f"needs {start.rstrip('-')}*.jar, which Spark does not have here", way_out, value=shown)

    # -- sources -------------------------------------------------------------------------------------------------------

    def _kind(self, part: Part, known: Mapping[str, Any]) -> str | None:
        given = part.values.get("type")
        if isinstance(given, str) and given in known:
            return given
        if given is None:
            part.fault("type", "is missing", f"add type: {', '.join(known)}")
        else:
            part.fault("type", "is unknown", nearest(str(given), known), value=given)
        return None

    def _source(self, name: str, part: Part) -> SourceSpec:
        type_ = self._kind(part, SOURCES)
        if type_ is None:
            return SourceSpec(name=name, type="", options={})
        kind = SOURCES[type_]
        options = part.read(kind.fields, also=("type", "watermark", *_SOURCE))
        common = part.read(_SOURCE, also=part.values)
        part.check_references(options)
        self._one_of(part, kind.one_of)
        if type_ == "files" and not options.get("schema") and options["format"] in {"json", "csv"}:
            part.fault("schema", "is missing", "add schema: 'name STRING, at TIMESTAMP'; a stream does not guess it")
        if kind.jars is not None:
            self._need_jars(part, "type", *kind.jars)
        if type_ == "jdbc" and isinstance(options["url"], str):
            self._need_driver(part, options["url"])
        options = self._whole_paths(options, kind.fields)
        return SourceSpec(
            name=name,
            type=type_,
            options=options,
            static=common["static"] or not kind.streams,
            time=common["time"],
            watermark=self._watermark(part),
        )

    def _need_driver(self, part: Part, url: str) -> None:
        if url.startswith(("env:", "file:")):
            return
        if not url.startswith("jdbc:"):
            part.fault("url", "does not begin with jdbc:", "write jdbc:postgresql://host/database, or the like")
        for start, (_, jar, coordinates) in JDBC_DRIVERS.items():
            if url.startswith(start):
                self._need_jars(part, "url", jar, coordinates)

    def _one_of(self, part: Part, names: tuple[str, ...]) -> None:
        given = [name for name in names if part.values.get(name) is not None]
        if names and len(given) != 1:
            rule = f"has {' and '.join(given)}" if given else "is missing"
            part.fault(given[0] if given else names[0], rule, f"give exactly one of {', '.join(names)}")

    def _whole_paths(self, options: dict[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
        paths = {name: at(self._directory, value) for name, value in options.items() if fields[name].is_path and value}
        return {**options, **paths}

    def _watermark(self, part: Part) -> Watermark | None:
        if part.values.get("watermark") is None:
            return None
        values = part.part("watermark").read(_WATERMARK)
        return Watermark(**values) if all(values.values()) else None

    # -- views ---------------------------------------------------------------------------------------------------------

    def _view(self, name: str, part: Part, all_views: list[str]) -> ViewSpec:
        values = part.read(_VIEW, also=("watermark", "store"))
        if name in self._sources:
            part.fault("", "has the name of a source", "rename one of them")
        self._one_of(part, ("sql", "function"))
        function = None
        inputs: tuple[str, ...] = ()
        if values["sql"]:
            inputs = self._inputs_of_sql(part, values["sql"], all_views)
            if values["inputs"]:
                part.fault("inputs", "goes with a function; SQL names what it reads", "leave it out")
        elif values["function"]:
            inputs = tuple(each for each in values["inputs"] if self._is_known(part, "inputs", each, all_views))
            function = self._function(part, values["function"], len(values["inputs"]))
        if not inputs and not any(fault.owner == part.owner for fault in self._faults.found):
            name_ = "inputs" if values["function"] else "sql"
            part.fault(name_, "reads no source and no view", f"there are {', '.join([*self._sources, *self._views])}")
        return ViewSpec(
            name=name,
            inputs=inputs,
            sql=values["sql"],
            function=function,
            watermark=self._watermark(part),
            store=self._store(name, part),
        )

    def _inputs_of_sql(self, part: Part, sql: str, all_views: list[str]) -> tuple[str, ...]:
        known = [*self._sources, *self._views]
        lower = {each.lower(): each for each in known}
        found: list[str] = []
        for each in table_names(sql):
            if each.lower() in lower:
                found.append(lower[each.lower()])
            elif "." not in each:
                self._unknown(part, "sql", each, all_views)
        return tuple(found)

    def _is_known(self, part: Part, field: str, name: str, all_views: list[str]) -> bool:
        known = name in self._sources or name in self._views
        if not known:
            self._unknown(part, field, name, all_views)
        return known

    def _unknown(self, part: Part, field: str, name: str, all_views: list[str]) -> None:
        if name in all_views:
            part.fault(field, f"reads {name!r}, which comes later", f"move view {name!r} before this one")
            return
        known = [*self._sources, *self._views]
        hint = nearest(name, known)
        if closest(name, known) is None:
            hint += "; a table of Spark's catalog is a source with type: table"
        part.fault(field, f"reads {name!r}, which is neither a source nor a view", hint)

    def _function(self, part: Part, text: str, inputs: int) -> Callable[..., Any] | None:
        found = self._load(part, "function", text)
        if found is None:
            return None
        if not callable(found):
            part.fault("function", "is not a function", "name one that takes DataFrames and returns one", value=text)
            return None
        try:
            inspect.signature(found).bind(*[None] * inputs)
        except TypeError:
            rule = f"does not take {inputs} DataFrame{'' if inputs == 1 else 's'}"
            part.fault("function", rule, "list in inputs what it takes, in its order", value=text)
        except ValueError:  # a builtin that says nothing of its parameters
            pass
        return cast("Callable[..., Any]", found)

    def _load(self, part: Part, field: str, text: str) -> Any:
        """What `module:name` names; None where it is a fault."""
        module, colon, name = text.partition(":")
        if not (module and colon and name):
            part.fault(field, "is not module:function", "write package.module:function", value=text)
            return None
        try:
            found = importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - the user's module may raise anything while it is imported
            rule = f"can't be imported ({type(error).__name__}: {error})"
            part.fault(field, rule, "correct the module, or PYTHONPATH", value=text)
            return None
        if not hasattr(found, name):
            known = [each for each in vars(found) if not each.startswith("_") and callable(getattr(found, each))]
            hint = nearest(name, known) if closest(name, known) else "correct the name"
            part.fault(field, f"names no {name!r} of {module}", hint, value=text)
            return None
        return getattr(found, name)

    def _store(self, name: str, part: Part) -> StoreSpec | None:
        given = part.values.get("store")
        if given is None or given is False:
            return None
        default = f"{self._state}/views/{name}"
        if given is True:
            return StoreSpec(path=default)
        if isinstance(given, str):
            return StoreSpec(path=at(self._directory, given))
        if not isinstance(given, Mapping):
            part.fault(
                "store", "is neither true nor a mapping", "write store: true, or store: {path: ...}", value=given
            )
            return None
        below = part.part("store")
        values = below.read(_STORE, also=("trigger",))
        path = at(self._directory, values["path"]) if values["path"] else default
        return StoreSpec(
            path=path, retention=values["retention"], partitions=values["partitions"], trigger=self._trigger(below)
        )

    # -- outputs -------------------------------------------------------------------------------------------------------

    def _trigger(self, part: Part) -> TriggerSpec:
        given = part.values.get("trigger")
        if given is None:
            return TriggerSpec()
        if given in {"available_now", "once"}:
            return TriggerSpec(available_now=True)
        rule = Seconds(above=False)
        every = rule.settle(given)
        if list(rule.problems("trigger", every)):
            part.fault(
                "trigger", "is not a trigger", "write seconds, a text such as '5s', or available_now", value=given
            )
            return TriggerSpec()
        return TriggerSpec(every=float(every))

    def _output(self, name: str, part: Part) -> OutputSpec | None:
        values = part.read(_OUTPUT, also=("trigger", "to"))
        view = values["view"]
        known = [*self._sources, *self._views]
        if view is not None and view not in known:
            part.fault("view", "is neither a source nor a view", nearest(view, known), value=view)
        if part.values.get("to") is None:
            part.fault("to", "is missing", "add to: {type: sqlite, path: out.db, table: rows}")
            return None
        if name in self._views and self._views[name].store is not None and view != name:
            part.fault("", "has the name of a stored view, whose query has that name", "rename one of them")
        targets = [self._target(name, each, values) for each in part.listed("to")]
        found = tuple(each for each in targets if each is not None)
        if len(targets) > 1:
            self._check_fan_out(part, found)
        if values["dead_letters"] and all(each.place == "spark" for each in found):
            way_out = "leave it out, or write in: driver or in: executors"
            part.fault("dead_letters", "is for sinks of this library, in the driver or on executors", way_out)
        checkpoint = at(self._directory, values["checkpoint"] or f"{self._state}/checkpoints/{name}")
        if checkpoint in self._checkpoints:
            rule = f"is that of output {self._checkpoints[checkpoint]!r}"
            part.fault("checkpoint", rule, "give each output a checkpoint of its own")
        self._checkpoints[checkpoint] = name
        return OutputSpec(
            name=name,
            view=view or "",
            mode=values["mode"],
            trigger=self._trigger(part),
            checkpoint=checkpoint,
            key=values["key"],
            dead_letters=None if not values["dead_letters"] else at(self._directory, values["dead_letters"]),
            targets=found,
        )

    def _target(self, output: str, part: Part, values: Mapping[str, Any]) -> TargetSpec | None:
        type_ = self._kind(part, TARGETS)
        if type_ is None:
            return None
        places = TARGETS[type_]
        place = cast("Place", part.values.get("in") or next(iter(places)))
        if place not in places:
            hint = f"write in: {' or in: '.join(places)}" if place in _PLACES else nearest(str(place), _PLACES)
            part.fault("in", f"is not a place that writes {type_}", hint, value=part.values["in"])
            return None
        kind = places[place]
        before = len(self._faults.found)
        options = part.read(kind.fields, also=("type", "in"))
        part.check_references(options)
        if kind.jars is not None:
            self._need_jars(part, "type", *kind.jars)
        options = self._whole_paths(options, kind.fields)
        target = TargetSpec(type=type_, place=place, options=options)
        self._check_mode(part, target, kind, values)
        if type_ == "factory":
            self._load(part, "factory", options["factory"] or "")
        elif len(self._faults.found) == before and kind.sink:
            self._try_sink(output, part, target, values["key"])
        return target

    def _check_mode(self, part: Part, target: TargetSpec, kind: TargetKind, values: Mapping[str, Any]) -> None:
        mode = values["mode"]
        if mode in kind.modes or upserts(target, values["key"]):
            return
        way_out = "write mode: append, with a watermark"
        if kind.upserts and upserts(target, ("any",)):
            way_out += ", or add key: [columns] to the output, by which a row replaces its earlier version"
        rule = f"appends, and the mode of the output is {mode}: each result would come again whenever it changes"
        part.fault("type", rule, way_out, value=target.type)

    def _try_sink(self, output: str, part: Part, target: TargetSpec, key: tuple[str, ...]) -> None:
        """Make the sink once, to see what it says; it opens nothing."""
        try:
            make_sink(output, target, key)
        except ConfigError as error:
            rule, _, way_out = str(error).rpartition("; ")
            part.fault("type", rule or str(error), way_out or "correct it")

    def _check_fan_out(self, part: Part, targets: tuple[TargetSpec, ...]) -> None:
        for target in targets:
            if not TARGETS[target.type][target.place].in_fan_out:
                part.fault(
                    "to",
                    f"has {target.type}, written by Spark, as one of several: a batch that is repeated after a crash "
                    "would be in it twice",
                    "store the view (store: true) and give each its own output",
                )
            elif target.place == "executors":
                part.fault("to", f"has {target.type} in executors as one of several", "give it an output of its own")

    def _check_unused(self, spec: PipelineSpec) -> None:
        used = {output.view for output in spec.outputs.values()} | {
            name for view in spec.views.values() for name in view.inputs
        }
        views = self._top.sections("views", "view") if not self._faults.found else {}
        for name, part in views.items():
            if name not in used:
                part.fault("", "is read by no view and no output", "add an output for it, or remove it")


def _is_local(master: str | None) -> bool:
    return master is not None and master.startswith("local")


def _installed_jars() -> list[str]:
    """The names of the jars that a Spark on this machine has."""
    home = os.environ.get("SPARK_HOME")
    if home is None:
        found = importlib.import_module("pyspark").__file__
        home = str(Path(cast("str", found)).parent)
    return [re.sub(r"^.*/", "", str(each)) for each in Path(home, "jars").glob("*.jar")]
