"""What a section of a file may look like: fields, named things, things of a kind; and the reader that finds all faults.

A shape is data. The same shapes check a file, make its JSON Schema and the tables of its reference page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support.checks import Problem, Rule, UnreadableError
from batchqueue_async._support.wording import clip, closest, nearest, short
from batchqueue_async.config_file import Section, place_of
from batchqueue_async.errors import ConfigError, ConfigFault

if TYPE_CHECKING:
    from collections.abc import Callable

NOTHING: Any = object()
"""Read where a value can't be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a section.

    Attributes:
        of: the rule for its value, or the shape of it.
        needed: whether it must be there.
        default: what holds where it is not.
        text: what it is, in a line for the reference.
        live: whether a reload can change it while the service runs.
    """

    of: Rule | Shape
    needed: bool = False
    default: Any = None
    text: str = ""
    live: bool = False


class Reader:
    """Everything that is wrong, in the order of the file's sections.

    Attributes:
        faults: what was found.
    """

    def __init__(self, faults: list[ConfigFault] | None = None) -> None:
        self.faults: list[ConfigFault] = [] if faults is None else faults

    def fault(self, path: str, origin: str, rule: str, way_out: str, *, value: object = NOTHING) -> None:
        """Add a fault."""
        shown = None if value is NOTHING else short(value)
        self.faults.append(ConfigFault(path=path, rule=rule, way_out=way_out, value=shown, origin=origin))

    def problem(self, path: str, origin: str, problem: Problem, value: object) -> None:
        """Add what a rule found."""
        shown = short(value) if problem.value is None else problem.value or None
        self.faults.append(
            ConfigFault(
                path=path + problem.path, rule=problem.rule, way_out=problem.way_out, value=shown, origin=origin
            )
        )


class Shape:
    """What a value may look like, where it is not one value."""

    def read(self, reader: Reader, path: str, origin: str, value: Any) -> Any:
        """The value as the service takes it; `NOTHING` where something is wrong with it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Struct(Shape):
    """A mapping with fields.

    Attributes:
        fields: by name.
        make: the class that checks the fields together.
        what: what the mapping is, for messages: "queue", "postgres sink".
        shorthand: what another value than a mapping stands for; None where it stands for nothing.
        optional: whether it may be None, which is not the same as one without fields.
    """

    fields: Mapping[str, Field]
    make: Callable[..., Any] | None = None
    what: str = "section"
    shorthand: Callable[[Any], dict[str, Any] | None] | None = None
    optional: bool = False

    def read(self, reader: Reader, path: str, origin: str, value: Any) -> Any:
        """The fields that are given, each as its rule reads it."""
        if value is None and self.optional:
            return None
        given: Any = {} if value is None else value
        if not isinstance(given, Mapping) and self.shorthand is not None:
            meant = self.shorthand(given)
            given = given if meant is None else meant
        if not isinstance(given, Mapping):
            names = ", ".join(f"{name}: ..." for name in list(self.fields)[:3])
            reader.fault(path, origin, "is not a mapping", f"write {{{names}}}", value=value)
            return NOTHING
        section = cast("Mapping[str, Any]", given)
        before = len(reader.faults)
        values = self._values(reader, path, origin, section)
        if self.make is not None and len(reader.faults) == before:
            self._check_together(reader, path, origin, section, partial(self.make, **values))
        return values

    def _values(self, reader: Reader, path: str, origin: str, section: Mapping[Any, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in section:
            place = place_of(section, name, origin)
            if name in self.fields:
                read = read_field(reader, self.fields[name].of, f"{path}{name}", place, section[name])
                if read is not NOTHING:
                    values[name] = read
            else:
                # The value may be a secret under a wrong name.
                label = name if isinstance(name, str) else short(name)
                hint = nearest(label, self.fields)
                reader.fault(f"{path}{clip(label)}", place, f"is not a field of a {self.what}", hint)
        for name, each in self.fields.items():
            if each.needed and section.get(name) is None and not self._is_misspelled(name, section):
                reader.fault(f"{path}{name}", origin, "is missing", f"add {name}: ...")
        return values

    def _is_misspelled(self, name: str, section: Mapping[Any, Any]) -> bool:
        """Whether a name that is nearly this one is there, which is the fault then."""
        return (
            closest(name, [each for each in section if isinstance(each, str) and each not in self.fields]) is not None
        )

    @staticmethod
    def _check_together(
        reader: Reader, path: str, origin: str, section: Mapping[Any, Any], make: Callable[[], Any]
    ) -> None:
        try:
            make()
        except ConfigError as error:
            for each in error.faults or (None,):
                name = "" if each is None else each.path
                first = name.partition(".")[0].partition("[")[0]
                place = place_of(section, first, origin)
                rule, way_out = (str(error), "correct it") if each is None else (each.rule, each.way_out)
                reader.faults.append(
                    ConfigFault(
                        path=f"{path}{name}".rstrip("."),
                        rule=rule,
                        way_out=way_out,
                        value=None if each is None else each.value,
                        origin=place,
                    )
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Things(Shape):
    """A mapping from names to things of one shape.

    Attributes:
        of: the shape.
        what: what they are: "queue", "sink".
    """

    of: Shape
    what: str

    def read(self, reader: Reader, path: str, origin: str, value: Any) -> Any:
        """Each thing that could be read, by name."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            reader.fault(path.rstrip("."), origin, "is not a mapping", "write name: {...}", value=value)
            return {}
        section = cast("Mapping[str, Any]", value)
        found: dict[str, Any] = {}
        for name, each in section.items():
            place = place_of(section, name, origin)
            if not isinstance(name, str) or not name or not name.isprintable() or "." in name:
                rule, way_out = f"is not a name for a {self.what}", "give it a text without dots"
                reader.fault(f"{path}{clip(str(name))}", place, rule, way_out)
                continue
            read = self.of.read(reader, f"{path}{name}.", place, each)
            if read is not NOTHING:
                found[name] = Located(read, place, _places(each))
        return found


@dataclass(frozen=True, slots=True)
class Located:
    """A thing of the file, and where it stands.

    Attributes:
        values: what was read of it.
        origin: where it stands.
        places: where its fields stand.
    """

    values: Any
    origin: str
    places: Mapping[str, str] = field(default_factory=dict[str, str])

    def place(self, name: str) -> str:
        """Where a field of it stands."""
        return self.places.get(name, self.origin)


def _places(value: object) -> Mapping[str, str]:
    return dict(value.places) if isinstance(value, Section) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(Shape):
    """A mapping whose `type` says which fields it has.

    Attributes:
        kinds: the shape of each type.
        what: what it is: "sink".
    """

    kinds: Mapping[str, Struct]
    what: str

    def read(self, reader: Reader, path: str, origin: str, value: Any) -> Any:
        """The fields, with `type` among them."""
        if not isinstance(value, Mapping):
            reader.fault(path.rstrip("."), origin, "is not a mapping", f"write {{type: {next(iter(self.kinds))}, ...}}")
            return NOTHING
        section = cast("Mapping[str, Any]", value)
        kind = section.get("type")
        if kind is None:
            hint = f"add type: one of {', '.join(self.kinds)}"
            if (near := closest("type", [each for each in section if isinstance(each, str)])) is not None:
                hint = f"{near} is there; did you mean type?"
            reader.fault(f"{path}type", origin, "is missing", hint)
            return NOTHING
        if not isinstance(kind, str) or kind not in self.kinds:
            place = place_of(section, "type", origin)
            hint = nearest(kind if isinstance(kind, str) else short(kind), self.kinds)
            reader.fault(f"{path}type", place, f"is not a kind of {self.what}", hint, value=kind)
            return NOTHING
        rest = Section({name: each for name, each in section.items() if name != "type"})
        rest.places = dict(section.places) if isinstance(section, Section) else {}
        return {"type": kind, **self.kinds[kind].read(reader, path, origin, rest)}


def read_field(reader: Reader, of: Rule | Shape, path: str, origin: str, value: Any) -> Any:
    """The value of a field; `NOTHING` where it is wrong."""
    name = path.rpartition(".")[2]
    if isinstance(of, Shape):
        inner = f"{path}." if isinstance(of, Struct | Things | Tagged) else path
        return of.read(reader, inner, origin, value)
    try:
        read = of.read(value, "file")
        problems = list(of.problems(name, read))
    except UnreadableError as error:
        read, problems = None, list(error.problems)
    for each in problems:
        reader.problem(path, each.origin or origin, each, value)
    return NOTHING if problems else read
