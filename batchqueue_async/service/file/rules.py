"""Rules for what only a service file has: texts, secrets by reference, names that code registered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support.checks import Problem, Rule
from batchqueue_async._support.wording import clip, short

if TYPE_CHECKING:
    from collections.abc import Iterator

REFERENCES = ("env:", "file:")
_PASSWORD = re.compile(
    r"://[^/?#@\s]*:[^/?#@\s]+@|(?:^|[?&;\s])(?:password|pwd|secret|token)=(?!env:|file:)[^&;\s]", re.IGNORECASE
)
_SECRET_NAME = re.compile(r"passw|secret|token$|access[-_.]?key$|api[-_]?key|authorization|credential", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)[^}]*\}")
_REGISTERED = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_REFERENCE_WAY_OUT = "write env:NAME or file:/path, and put the whole text there"


def is_reference(value: object) -> bool:
    """Whether a text names where a value is, instead of being it.

    Example:
        >>> is_reference("env:DATABASE_URL"), is_reference("file:///var/lib/lake"), is_reference("secret")
        (True, False, False)
    """
    return isinstance(value, str) and value.startswith(REFERENCES) and not value.startswith("file://")


def _text_problems(name: str, value: object, path: str = "") -> Iterator[Problem]:
    """What is wrong with a text that may be a reference."""
    if not isinstance(value, str):
        way_out = f"write {name}: '...', in quotes where it looks like something else"
        yield Problem("is not a text", way_out, path, short(value) if path else None)
    elif not value.strip():
        yield Problem("is empty", f"give {name} a value, or leave it out", path, "''" if path else None)
    elif found := _TEMPLATE.search(value):
        rule = f"holds {clip(found[0])}, and nothing is filled in"
        yield Problem(rule, f"write env:{found['name']} for the whole value", path, "")
    elif _PASSWORD.search(value):
        yield Problem("holds a credential", _REFERENCE_WAY_OUT, path, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Rule):
    """A text that is not empty, and holds no credential; `env:NAME` and `file:/path` stand for one."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is one."""
        yield from _text_problems(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretText(Rule):
    """A credential, which a file only refers to: `env:NAME` or `file:/path`."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - as `Rule.judge` has it
        """It is a reference."""
        if not is_reference(value):
            yield Problem("is not a reference", "write env:NAME or file:/path, never the secret itself", value="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts(Rule):
    """A list of texts; one alone may stand without its list."""

    def settle(self, value: Any) -> Any:
        """The list."""
        return [value] if isinstance(value, str) else value

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a list of texts."""
        if not isinstance(value, list) or not value:
            yield Problem("is not a list of texts", f"write {name}: [one, two]")
            return
        for place, each in enumerate(cast("list[object]", value)):
            yield from _text_problems(name, each, f"[{place}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wholes(Rule):
    """A list of whole numbers."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is one."""
        numbers = cast("list[object]", value) if isinstance(value, list) else [None]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in numbers):
            yield Problem("is not a list of whole numbers", f"write {name}: [409, 423]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMap(Rule):
    """A mapping of names to texts; values may be `env:NAME` or `file:/path`, and have to be where they are secrets."""

    def settle(self, value: Any) -> Any:
        """The mapping, with numbers and flags as their texts."""
        if not isinstance(value, Mapping):
            return value
        return {name: _plain(each) for name, each in cast("Mapping[object, object]", value).items()}

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is one."""
        if not isinstance(value, Mapping):
            yield Problem("is not a mapping", f"write {name}: {{name: value}}")
            return
        for key, each in cast("Mapping[object, object]", value).items():
            path = f".{clip(str(key))}"
            if not isinstance(key, str):
                yield Problem("is a name that is not a text", "put it in quotes", path, "")
            elif _SECRET_NAME.search(key) and isinstance(each, str) and not is_reference(each):
                yield Problem("holds a credential", _REFERENCE_WAY_OUT, path, "")
            else:
                yield from _text_problems(key, each, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyMap(Rule):
    """A mapping whose values are whoever takes it to judge."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a mapping with texts as names."""
        names = cast("Mapping[object, object]", value) if isinstance(value, Mapping) else (None,)
        if not all(isinstance(key, str) for key in names):
            yield Problem("is not a mapping with texts as names", f"write {name}: {{name: value}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered(Rule):
    """The name under which the program's code registered something.

    Attributes:
        what: of what kind it is: "handler", "decoder".
        built_in: names that need no code.
    """

    what: str
    built_in: tuple[str, ...] = ()

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a name; whether something has it is known when the program's code is loaded."""
        if not isinstance(value, str) or not _REGISTERED.fullmatch(value):
            shown = isinstance(value, str) and ":" in value
            way_out = (
                f"register it in code with @app.{self.what}('name'), name it here, and run with --app module:app"
                if shown
                else f"write {name}: {', '.join([*self.built_in, ''])}the name that @app.{self.what}('name') gave it"
            )
            yield Problem(f"is not the name of a {self.what.replace('_', ' ')}", way_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Rule):
    """The name of another part of the file.

    Attributes:
        sections: where it may stand.
    """

    sections: tuple[str, ...]

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a text; what has the name is looked up when the whole file is read."""
        if not isinstance(value, str) or not value:
            yield Problem("is not a name", f"write {name}: the name of one of {' or '.join(self.sections)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses(Texts):
    """Where the pages are served: `127.0.0.1:9464`, `unix:/path`, `unix:`."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a list of them."""
        found = list(Texts.judge(self, name, value))  # super() means another class where a dataclass has slots
        yield from found
        if found:
            return
        for place, each in enumerate(cast("list[str]", value)):
            host, colon, port = each.rpartition(":")
            is_tcp = bool(colon and host) and port.isdecimal() and int(port) <= _MOST_PORT
            if not each.startswith("unix:") and not is_tcp:
                way_out = "write 127.0.0.1:9464, '[::1]:9464', unix:/path, or 'unix:' for the socket of this user"
                yield Problem("is not HOST:PORT or unix:PATH", way_out, f"[{place}]", short(each))


_MOST_PORT = 65_535


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value
