"""The rules for the values of a pipeline's file, and the reader that applies them and collects every fault."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support.checks import Problem, Rule, UnreadableError
from batchqueue_async._support.wording import clip, nearest, short
from batchqueue_async.config_file import Section, place_of
from batchqueue_async.errors import ConfigError, ConfigFault
from batchqueue_async.sinks._shared.secrets import resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from batchqueue_async._support.checks import Layer

REFERENCES = ("env:", "file:")
_PASSWORD = re.compile(
    r"://[^/?#@\s]*:[^/?#@\s]+@|(?:^|[?&;\s])(?:password|pwd|secret|token)=(?!env:|file:)[^&;\s]", re.IGNORECASE
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_INTERVAL = re.compile(r"\s*\d+(?:\.\d+)?\s*(?:milli|micro)?(?:second|minute|hour|day|week)s?\s*", re.IGNORECASE)


def is_reference(value: object) -> bool:
    """Whether a text names where a value is, instead of being it.

    Example:
        >>> is_reference("env:DATABASE_URL"), is_reference("file:///var/lib/lake"), is_reference("secret")
        (True, False, False)
    """
    return isinstance(value, str) and value.startswith(REFERENCES) and not value.startswith("file://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Rule):
    """A text that is not empty.

    Attributes:
        plain: whether numbers and flags are taken as their text.
        code: whether it is an expression, in which anything may stand.
    """

    plain: bool = False
    code: bool = False

    def settle(self, value: Any) -> Any:
        """The text of a number or flag, where these may stand for one."""
        if self.plain and isinstance(value, bool):
            return str(value).lower()
        return str(value) if self.plain and isinstance(value, int | float) else value

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a text, and not empty."""
        if not isinstance(value, str):
            yield Problem("is not a text", f"write {name}: '...', in quotes where it looks like something else")
        elif not value.strip():
            yield Problem("is empty", f"give {name} a value, or leave it out")
        elif not self.code and _PASSWORD.search(value):
            yield Problem("holds a credential", "write env:NAME or file:/path, and put the whole text there", value="")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretText(Text):
    """A credential, which a file only refers to: `env:NAME` or `file:/path`."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - only some rules name the field
        """It is a reference."""
        if not is_reference(value):
            yield Problem("is not a reference", "write env:NAME or file:/path, never the secret itself", value="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Name(Text):
    """A name that SQL can use without quotes."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - only some rules name the field
        """It is letters, digits and underscores."""
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            yield Problem("is not a name", "use letters, digits and underscores, and begin with no digit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval(Text):
    """A time as Spark writes it: "10 seconds"."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - only some rules name the field
        """It is a number and a unit."""
        if not isinstance(value, str) or not _INTERVAL.fullmatch(value):
            yield Problem("is not an interval", "write a number and a unit, such as '10 seconds' or '5 minutes'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment(Rule):
    """A point in time, as ISO 8601; without an offset it is UTC."""

    def settle(self, value: Any) -> Any:
        """The time that a text stands for."""
        if not isinstance(value, str):
            return value
        try:
            return parse_moment(value)
        except ValueError:
            return value

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a time."""
        if not isinstance(value, datetime):
            yield Problem("is not a time", f"write {name}: '2026-01-31' or '2026-01-31T12:00:00Z'")


def parse_moment(text: str) -> datetime:
    """The point in time that ISO 8601 stands for; without an offset it is UTC.

    Example:
        >>> parse_moment("2026-01-31T12:00:00Z").isoformat(), parse_moment("2026-01-31").isoformat()
        ('2026-01-31T12:00:00+00:00', '2026-01-31T00:00:00+00:00')
    """
    found = datetime.fromisoformat(text)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts(Rule):
    """A list of texts; one alone may stand without its list."""

    least: int = 0

    def settle(self, value: Any) -> Any:
        """The list."""
        return (
            (value,)
            if isinstance(value, str)
            else tuple(cast("list[object]", value))
            if isinstance(value, list)
            else value
        )

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a list of texts."""
        if not isinstance(value, tuple) or not all(
            isinstance(each, str) and each for each in cast("tuple[Any]", value)
        ):
            yield Problem("is not a list of texts", f"write {name}: [one, two]")
        elif len(cast("tuple[str]", value)) < self.least:
            yield Problem("is empty", f"write {name}: [one, two]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Rule):
    """A mapping of texts, for someone else's library; a value may be `env:NAME` or `file:/path`."""

    def settle(self, value: Any) -> Any:
        """The mapping, with numbers and flags as Spark writes them."""
        if not isinstance(value, Mapping):
            return value
        settle = Text(plain=True).settle
        return {name: settle(each) for name, each in cast("Mapping[object, object]", value).items()}

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a mapping of texts, none of which looks like a credential."""
        if not isinstance(value, dict):
            yield Problem("is not a mapping", f"write {name}: {{option: value}}")
            return
        for option, text in cast("dict[object, object]", value).items():
            path = f".{clip(str(option))}"
            if not isinstance(option, str) or not isinstance(text, str):
                yield Problem("is not a text", "write option: value", path=path, value=short(text))
            elif not is_reference(text) and (_PASSWORD.search(text) or _hides(option)):
                yield Problem("holds a credential", "write env:NAME or file:/path", path=path, value="")


def _hides(option: str) -> bool:
    """Whether an option of Spark's, Hadoop's or Kafka's is one for a secret, by its name."""
    name = option.lower()
    if (
        re.search(r"\.secrets?\.|secretkeyref|provider$|\.(?:file|path|location|enabled)$", name)
        and "secret.key" not in name
    ):
        return False
    return re.search(r"passw|secret|token$|access\.?key$|credential|jaas", name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a section.

    Attributes:
        rule: what it may hold.
        needed: whether it must be there.
        default: what it is when it is not.
        is_path: whether it names a file or directory, which may be relative to the pipeline's directory.
    """

    rule: Rule
    needed: bool = False
    default: Any = None
    is_path: bool = False


PATH = Field(rule=Text(), needed=True, is_path=True)
OPTIONS = Field(rule=Options(), default={})


class Faults:
    """All that is wrong with a file, in the order in which it was found."""

    def __init__(self) -> None:
        self.found: list[ConfigFault] = []

    def add(self, origin: str, owner: str, path: str, rule: str, way_out: str, *, value: str | None = None) -> None:
        """Add one."""
        self.found.append(
            ConfigFault(origin=origin, owner=owner, path=path, rule=rule, way_out=way_out, value=value or None)
        )

    def extend(self, faults: Iterable[ConfigFault]) -> None:
        """Add several."""
        self.found.extend(faults)

    def finish(self) -> None:
        """Raise `ConfigError` if there are any."""
        if self.found:
            raise ConfigError.of(self.found)


class Part:
    """One section of a pipeline's file: whose it is, where it stands, what it says.

    Attributes:
        owner: as messages begin: "output 'minute'"; "" for the file itself.
        values: its names and values.
        faults: where what is wrong with it goes.
    """

    def __init__(self, owner: str, origin: str, values: Mapping[str, Any], faults: Faults, path: str = "") -> None:
        self.owner = owner
        self.values = values
        self.faults = faults
        self._origin = origin
        self._path = path

    def place(self, name: str) -> str:
        """Where one of its names stands."""
        return place_of(self.values, name, self._origin)

    def fault(self, name: str, rule: str, way_out: str, *, value: object = None) -> None:
        """Add a fault of one of its names."""
        shown = None if value is None else short(value)
        self.faults.add(self.place(name), self.owner, self._path + name, rule, way_out, value=shown)

    def sections(self, name: str, what: str) -> dict[str, Part]:
        """The sections below a name, each the part of a thing: "source", "view"."""
        found: dict[str, Part] = {}
        for key, value in self.inner(name).items():
            owner = f"{what} {clip(repr(key))}"
            origin = place_of(self.values.get(name) or {}, key, self.place(name))
            if not isinstance(value, Mapping):
                self.faults.add(origin, owner, "", f"{short(value)} is not a mapping", "write name: value lines")
                continue
            if not _NAME.fullmatch(key):
                self.faults.add(origin, owner, "", "its name is not one that SQL takes", "use letters, digits and _")
            found[key] = Part(owner, origin, texts_of(cast("Mapping[object, object]", value)), self.faults)
        return found

    def inner(self, name: str) -> Mapping[str, Any]:
        """A mapping below a name; an empty one where there is none."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.fault(name, "is not a mapping", "write name: value lines", value=value)
            return {}
        return texts_of(cast("Mapping[object, object]", value))

    def part(self, name: str) -> Part:
        """The same as a part of this one's owner."""
        return Part(self.owner, self.place(name), self.inner(name), self.faults, f"{self._path}{name}.")

    def listed(self, name: str) -> list[Part]:
        """The mappings of a list below a name; one alone may stand without its list."""
        value = self.values.get(name)
        each = cast("list[object]", value) if isinstance(value, list) else [value]
        found: list[Part] = []
        for number, item in enumerate(each):
            path = f"{self._path}{name}[{number}]." if len(each) > 1 else f"{self._path}{name}."
            if not isinstance(item, Mapping):
                self.fault(name, "is not a mapping", f"write {name}: {{type: ...}}", value=item)
                continue
            found.append(
                Part(self.owner, self.place(name), texts_of(cast("Mapping[object, object]", item)), self.faults, path)
            )
        return found

    def read(self, fields: Mapping[str, Field], *, also: Iterable[str] = ()) -> dict[str, Any]:
        """The values of its fields, each by its rule; other names, but for those in `also`, are faults."""
        known = [*fields, *also]
        for name in self.values:
            if name not in known:
                # The value may be a secret under a wrong name.
                self.fault(name, f"is not a field of {self._what()}", nearest(name, known))
        return {name: self._value(name, field) for name, field in fields.items()}

    def _what(self) -> str:
        below = self._path.rstrip(".").partition("[")[0].rpartition(".")[2]
        owner = self.owner.partition(" ")[0]
        return " of ".join(each for each in (below, owner) if each) or "the file"

    def _value(self, name: str, field: Field) -> Any:
        if self.values.get(name) is None:
            if field.needed and not self._is_misspelled(name):
                self.faults.add(self._origin, self.owner, self._path + name, "is missing", f"add {name}: ...")
            return field.default
        given = self.values[name]
        layer: Layer = "file"
        try:
            value = field.rule.read(given, layer)
            problems = list(field.rule.problems(name, value))
        except UnreadableError as error:
            value, problems = None, list(error.problems)
        for problem in problems:
            shown = short(given) if problem.value is None else problem.value
            path = f"{self._path}{name}{problem.path}"
            self.faults.add(self.place(name), self.owner, path, problem.rule, problem.way_out, value=shown)
        return field.default if problems else value

    def _is_misspelled(self, name: str) -> bool:
        """Whether a name that is nearly this one is there, which is the fault then."""
        return bool(difflib.get_close_matches(name, [each for each in self.values if each != name], n=1, cutoff=0.8))

    def check_references(self, values: Mapping[str, Any], path: str = "") -> None:
        """See to it that every `env:NAME` and `file:/path` of some values can be read now."""
        for name, value in values.items():
            if isinstance(value, dict):
                self.check_references(cast("dict[str, Any]", value), f"{path}{name}.")
            elif is_reference(value):
                try:
                    resolve(cast("str", value))
                except ConfigError as error:
                    rule, _, way_out = str(error).rpartition("; ")
                    first = (path + name).partition(".")[0]
                    self.faults.add(
                        self.place(first), self.owner, f"{self._path}{path}{name}", f"can't be read: {rule}", way_out
                    )


def texts_of(values: Mapping[Any, Any]) -> Mapping[str, Any]:
    """A mapping with its names as texts, and its places in the file."""
    if all(isinstance(name, str) for name in values):
        return values
    made = Section({str(name): value for name, value in values.items()})
    made.places = {str(name): place for name, place in values.places.items()} if isinstance(values, Section) else {}
    return made


def at(directory: Path, path: str) -> str:
    """A path, relative to a directory unless it is absolute or a URL.

    Example:
        >>> at(Path("/data"), "out.db"), at(Path("/data"), "s3a://lake/rows"), at(Path("/data"), "/tmp/x")
        ('/data/out.db', 's3a://lake/rows', '/tmp/x')
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", path):
        return path
    return str(directory / Path(path).expanduser())
