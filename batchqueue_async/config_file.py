"""The settings of queues outside the code: a YAML file, then the environment, then overrides; the later one wins.

What stands here knows nothing of a queue's fields. It reads the three layers into one `Setting` per queue and field,
each with its origin, so that an error can name the place to correct; `config.load_config` gives them their meaning.

A file is data. It is read with PyYAML's safe loader and turned into texts, numbers, mappings and lists by hand: a tag
can't make it anything else, and aliases, depth and size are bounded before they can cost anything.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec

from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    import yaml

T = TypeVar("T")

MAX_FILE_BYTES = 256 * 1024
MAX_VALUES = 10_000
MAX_DEPTH = 16
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))
_MERGE_TAG = "tag:yaml.org,2002:merge"
_CALL = re.compile(r"(?P<name>[a-z_]+)\s*(?:\((?P<arguments>[^()]*)\))?")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that is set for a queue's field, and where.

    Attributes:
        value: what was set; not yet checked.
        origin: the file, the environment variable, or "overrides".
        layer: what kind of place that is.
    """

    value: Any
    origin: str
    layer: Literal["file", "environment", "code"]


Settings = dict[str, dict[str, Setting]]
"""By queue name and field."""


def read_settings(
    path: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    prefix: str,
    overrides: Mapping[str, Mapping[str, Any]] | None,
) -> Settings:
    """All three layers, each value with its origin."""
    settings: Settings = {} if path is None else _from_file(Path(path))
    extra: Mapping[str, Mapping[str, Any]] = {} if overrides is None else overrides
    _add_environment(settings, environ, prefix, names=[*settings, *extra])
    for queue, fields in _sections("overrides", extra).items():
        settings.setdefault(queue, {}).update(
            {field: Setting(value, "overrides", "code") for field, value in fields.items()}
        )
    return settings


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that was probably meant, or at all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"


def short(value: object) -> str:
    """A value in an error message, whatever its size."""
    return reprlib.repr(value)


# -- the environment -------------------------------------------------------------------------------------------------


def _add_environment(settings: Settings, environ: Mapping[str, str], prefix: str, names: list[str]) -> None:
    """Read `<prefix>QUEUES__<QUEUE>__<FIELD>`; a queue's name is matched in capitals, `_` for all but A-Z and 0-9."""
    start = f"{prefix}QUEUES__"
    for variable in sorted(environ):
        if not variable.startswith(start):
            continue
        wanted, separator, field = variable.removeprefix(start).rpartition("__")
        if not (separator and wanted and field):
            raise ConfigError(f"environment variable {variable}: names no field; write {start}<QUEUE>__<FIELD>=<value>")
        matching = dict.fromkeys(name for name in names if _capitals(name) == _capitals(wanted))
        if len(matching) > 1:
            raise ConfigError(
                f"environment variable {variable}: {wanted} may be any of {', '.join(map(repr, matching))}; "
                "rename one of the queues, or set the field in the file"
            )
        queue = next(iter(matching), wanted.lower())
        origin = f"environment variable {variable}"
        value = _structured(environ[variable], origin)
        settings.setdefault(queue, {})[field.lower()] = Setting(value, origin, "environment")


def _capitals(name: str) -> str:
    return re.sub("[^A-Z0-9]", "_", name.upper())


def _structured(text: str, origin: str) -> Any:
    """In the environment a mapping is JSON; `null`, as in a file, is no value."""
    if text.lower() == "null":
        return None
    if not text.lstrip().startswith("{"):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{origin}: begins with a brace and is no JSON ({error}); correct the value") from None


# -- the file --------------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> Settings:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); correct the path, or its permissions") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has more than {MAX_FILE_BYTES} bytes; a configuration is shorter")
    content: object = _Yaml(path).read(data)
    top: Mapping[str, Any] = _mapping(str(path), content)
    for section in top:
        if section != "queues":
            raise ConfigError(f"{path}: {section} is no section of the file; {nearest(section, ['queues'])}")
    sections = _sections(f"{path}: queues", top.get("queues"))
    return {
        queue: {field: Setting(value, str(path), "file") for field, value in fields.items()}
        for queue, fields in sections.items()
    }


def _sections(where: str, content: object) -> dict[str, Mapping[str, Any]]:
    return {
        queue: _mapping(f"{where}: queue {queue!r}", section) for queue, section in _mapping(where, content).items()
    }


def _mapping(where: str, content: object) -> Mapping[str, Any]:
    """A mapping by text; an empty section of a file is an empty mapping."""
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: {short(content)} is not a mapping; write name: value lines")
    mapping = cast("Mapping[object, Any]", content)
    for key in mapping:
        if not isinstance(key, str):
            raise ConfigError(f"{where}: the name {short(key)} is not a text; put it in quotes")
    return cast("Mapping[str, Any]", content)


class _Yaml:
    """One YAML document, made into plain values under bounds."""

    def __init__(self, path: Path) -> None:
        try:
            import yaml  # noqa: PLC0415 - an extra: only those who have a file need it
        except ImportError:
            raise ConfigError(f"{path}: reading YAML needs PyYAML; run: pip install 'batchqueue-async[yaml]'") from None
        self._path = path
        self._yaml = yaml
        self._loader: yaml.SafeLoader
        self._values = 0

    def read(self, data: bytes) -> Any:
        yaml = self._yaml
        try:
            self._loader = yaml.SafeLoader(data)
            root = self._loader.get_single_node()
            return None if root is None else self._value(root, 0)
        except yaml.MarkedYAMLError as error:
            # The error's own text quotes the file; its problem and place are enough.
            raise self._error(f"is not valid YAML: {error.problem}", error.problem_mark or error.context_mark) from None
        except yaml.YAMLError as error:
            raise self._error(f"is not valid YAML: {getattr(error, 'reason', 'it cannot be decoded')}") from None
        except RecursionError:
            raise self._error(f"is nested more than {MAX_DEPTH} deep") from None

    def _error(self, problem: str, mark: yaml.Mark | None = None) -> ConfigError:
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        return ConfigError(f"{self._path}{place}: {problem}; correct the file")

    def _value(self, node: yaml.Node, depth: int) -> Any:
        # An alias is visited as often as it is used: ten lines of them can stand for a billion values.
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._error(
                f"has more than {MAX_VALUES} values, aliases counted where they are used", node.start_mark
            )
        if depth > MAX_DEPTH:
            raise self._error(f"is nested more than {MAX_DEPTH} deep", node.start_mark)
        yaml = self._yaml
        if isinstance(node, yaml.MappingNode) and node.tag == self._loader.DEFAULT_MAPPING_TAG:
            return self._pairs(node, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == self._loader.DEFAULT_SEQUENCE_TAG:
            return [self._value(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        raise self._error(f"has the tag {short(node.tag)}, and tags have no meaning here", node.start_mark)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        loader: Any = self._loader  # whose stubs leave resolve untyped
        implied = loader.resolve(self._yaml.ScalarNode, node.value, (True, False))
        if node.tag not in _PLAIN_TAGS or node.tag not in (implied, loader.DEFAULT_SCALAR_TAG):
            raise self._error(
                f"has the tag {short(node.tag)}, or a value of its kind; put texts in quotes", node.start_mark
            )
        try:
            return loader.construct_object(node)
        except ValueError as error:  # a number of thousands of digits, or one that only looks like a number
            raise self._error(f"has a value that can't be read ({error})", node.start_mark) from None

    def _pairs(self, node: yaml.MappingNode, depth: int) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            value = self._value(value_node, depth + 1)
            if key_node.tag == _MERGE_TAG:
                sources: list[Any] = value if isinstance(value_node, self._yaml.SequenceNode) else [value]
                if not all(isinstance(source, dict) for source in sources):
                    raise self._error("merges (<<) what is not a mapping", value_node.start_mark)
                for source in sources:
                    merged = source | merged
                continue
            if not isinstance(key_node, self._yaml.ScalarNode):
                raise self._error("has a name that is not a text", key_node.start_mark)
            key = self._scalar(key_node)
            if key in own:
                raise self._error(f"has the name {short(key)} twice", key_node.start_mark)
            own[key] = value
        return merged | own


# -- values that are written as calls --------------------------------------------------------------------------------


def read_call(value: object, makers: Mapping[str, Callable[..., T]]) -> T:
    """What `name`, `name(1, 0.25)`, `{name: [1, 0.25]}` or, for `fixed`, a bare number stands for.

    Example:
        >>> read_call("cpu_cores_with_base(1, 0.25)", {"cpu_cores_with_base": lambda base, per_core: base + per_core})
        1.25

    Raises:
        ValueError: it stands for none of the `makers`; the text says why and what does.
    """
    name, arguments = _call(value)
    maker = makers.get(name)
    if maker is None:
        raise ValueError(f"{name} is unknown; {nearest(name, makers)}")
    try:
        return maker(*arguments)
    except TypeError:
        raise ValueError(f"{name} does not take {len(arguments)} arguments; see its signature") from None


def _call(value: object) -> tuple[str, list[int | float]]:
    if isinstance(value, str) and value.isdecimal() and value.isascii():
        value = msgspec.convert(value, int, strict=False)
    if isinstance(value, int) and not isinstance(value, bool):
        return "fixed", [value]
    if isinstance(value, str) and (match := _CALL.fullmatch(value.strip())):
        arguments = (match["arguments"] or "").strip()
        pieces = arguments.split(",") if arguments else []
        return match["name"], [_number(piece.strip(), strict=False) for piece in pieces]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        name, given = next(iter(mapping.items()), (None, None))
        if len(mapping) == 1 and isinstance(name, str):
            listed = cast("list[object]", given) if isinstance(given, list) else [given]
            return name, [] if given is None else [_number(each, strict=True) for each in listed]
    raise ValueError("is not understood; write name, name(number) or {name: number}")


def _number(value: object, *, strict: bool) -> int | float:
    try:
        return msgspec.convert(value, int | float, strict=strict)
    except msgspec.ValidationError:
        raise ValueError(f"the argument {short(value)} is not a number; only numbers can be given here") from None
