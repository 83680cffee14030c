"""The settings of queues outside the code: a YAML file, then the environment, then overrides; the later one wins.

What stands here knows nothing of a queue's fields. It reads the three layers into one `Setting` per queue and field,
each with its origin, so that an error can name the place to correct; `config.load_config` gives them their meaning.
All faults are collected, so that one error names every one of them.

A file is data. It is read with PyYAML's safe loader and turned into texts, numbers, mappings and lists by hand: a tag
can't make it anything else, and aliases, depth and size are bounded before they can cost anything.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from batchqueue_async._support.checks import Layer, Problem, UnreadableError
from batchqueue_async._support.wording import clip, closest, nearest, short
from batchqueue_async.errors import ConfigError, ConfigFault

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    import yaml

T = TypeVar("T")

PREFIX = "BATCHQUEUE_"
MAX_FILE_BYTES = 256 * 1024
MAX_VALUES = 10_000
MAX_DEPTH = 16
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))
_MERGE_TAG = "tag:yaml.org,2002:merge"
_CALL = re.compile(r"(?P<name>[a-z_]+)\s*(?:\((?P<arguments>[^()]*)\))?")
# They choose between the compiled hot path and its Python, when the package is imported and when it is installed.
_SWITCHES = frozenset({"PURE", "NO_EXTENSIONS"})
# What Kubernetes gives every container of a namespace that has a service named after the prefix.
_SERVICE_LINK = re.compile(
    r"(?:[A-Z0-9]+_)*(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_[A-Z]+)?)"
)
_NOTHING: Any = object()


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that is set for a queue's field, and where.

    Attributes:
        value: what was set; not yet checked.
        origin: the file with line and column, the environment variable, or "overrides".
        layer: what kind of place that is.
    """

    value: Any
    origin: str
    layer: Layer


Settings = dict[str, dict[str, Setting]]
"""By queue name and field."""


@dataclass(slots=True)
class Layers:
    """What the three layers hold.

    Attributes:
        settings: each value with its origin.
        faults: what could not be read.
        whole: whether nothing is missing because of that; else only single values can be judged.
    """

    settings: Settings = field(default_factory=dict[str, dict[str, Setting]])
    faults: list[ConfigFault] = field(default_factory=list[ConfigFault])
    whole: bool = True

    def fault(
        self, origin: str, rule: str, way_out: str, *, owner: str = "", path: str = "", unread: bool = True
    ) -> None:
        """Add something that is wrong; `unread` if a value is missing because of it."""
        self.faults.append(ConfigFault(origin=origin, owner=owner, path=path, rule=rule, way_out=way_out))
        self.whole = self.whole and not unread


def read_settings(
    path: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    prefix: str,
    overrides: Mapping[str, Mapping[str, Any]] | None,
    fields: Collection[str],
) -> Layers:
    """All three layers; `fields` are the names that may be meant where one is misspelled."""
    layers = Layers()
    if path is not None:
        _add_file(layers, Path(path))
    extra = _sections(layers, "overrides", "", overrides)
    _Environment(layers, prefix, fields, names=[*layers.settings, *extra]).read(environ)
    for queue, section in extra.items():
        layers.settings.setdefault(queue, {}).update(
            {name: Setting(value, "overrides", "code") for name, value in section.items()}
        )
    return layers


# -- the environment -------------------------------------------------------------------------------------------------


class _Environment:
    """The variables `<prefix>QUEUES__<QUEUE>__<FIELD>`; a queue's name is in capitals, `_` for all but A-Z and 0-9."""

    def __init__(self, layers: Layers, prefix: str, fields: Collection[str], names: list[str]) -> None:
        self._layers = layers
        self._prefix = prefix
        self._start = f"{prefix}QUEUES__"
        self._fields = fields
        self._names = names
        self._setters: dict[tuple[str, str], str] = {}

    def read(self, environ: Mapping[str, str]) -> None:
        for variable in sorted(environ):
            if variable.startswith(self._start):
                self._add(variable, environ[variable])
            elif self._is_ours(variable):
                self._fault(variable, "is not a setting of a queue", self._meant(variable), unread=False)

    def _add(self, variable: str, text: str) -> None:
        wanted, separator, name = variable.removeprefix(self._start).rpartition("__")
        name = name.lower()
        if not (separator and wanted and name):
            self._fault(variable, "names no field", f"write {self._start}<QUEUE>__<FIELD>=<value>")
            return
        matching = list(dict.fromkeys(each for each in self._names if capitals(each) == capitals(wanted)))
        if len(matching) > 1:
            rule = clip(f"may mean any of the queues {', '.join(map(repr, matching))}")
            self._fault(variable, rule, "rename one of the queues, or set the field in the file")
            return
        queue = matching[0] if matching else wanted.lower()
        setter = self._setters.setdefault((queue, name), variable)
        if setter != variable:
            self._fault(variable, f"sets what {setter} sets", "unset one of the two")
            return
        value = self._value(variable, text)
        section = self._layers.settings.setdefault(queue, {})
        if value is _NOTHING:
            section.pop(name, None)
        else:
            section[name] = Setting(value, f"environment variable {variable}", "environment")

    def _value(self, variable: str, text: str) -> Any:
        """The value of a text: a mapping is JSON, and `null` means None, as in a file."""
        if text.strip().lower() == "null":
            return None
        if not text.lstrip().startswith("{"):
            return text
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            self._fault(variable, f"begins with a brace and is not JSON ({error})", "correct the value")
            return _NOTHING
        except RecursionError:
            value = _NOTHING
        if value is _NOTHING or not _is_bounded(value):
            rule = f"is nested more than {MAX_DEPTH} deep, or has more than {MAX_VALUES} values"
            self._fault(variable, rule, "correct the value")
            return _NOTHING
        return value

    def _is_ours(self, variable: str) -> bool:
        """Whether a variable is meant for a queue, though it is not written so.

        Under the library's own prefix everything is, but for what Kubernetes sets by itself. Under a prefix of the
        program's own, which has other variables with it, only what is nearly right.
        """
        if not variable.upper().startswith(self._prefix.upper()):
            return False
        rest = variable[len(self._prefix) :].upper()
        if variable.startswith(PREFIX) and self._prefix == PREFIX:
            return not is_no_setting(rest)
        section, separator, _ = rest.partition("__")
        return bool(separator) and closest(section, ["QUEUES"]) is not None

    def _meant(self, variable: str) -> str:
        section, _, rest = variable[len(self._prefix) :].upper().partition("__")
        if rest and closest(section, ["QUEUES"]):
            return f"did you mean {self._start}{rest}?"
        known = closest(section.lower(), self._fields)
        return f"write {self._start}<QUEUE>__{known.upper() if known else '<FIELD>'}=<value>, or unset it"

    def _fault(self, variable: str, rule: str, way_out: str, *, unread: bool = True) -> None:
        self._layers.fault(f"environment variable {variable}", rule, way_out, unread=unread)


def is_no_setting(rest: str) -> bool:
    """Whether a variable, by its name without the prefix, is another's: a switch, or what Kubernetes sets by itself."""
    return rest in _SWITCHES or _SERVICE_LINK.fullmatch(rest) is not None


def capitals(name: str) -> str:
    """A name as a variable of the environment spells it."""
    return re.sub("[^A-Z0-9]", "_", name.upper())


def _is_bounded(value: Any) -> bool:
    """Whether a value is as flat and as small as one in a file has to be."""
    level: list[Any] = [value]
    count = 0
    for _ in range(MAX_DEPTH + 1):
        count += len(level)
        level = [inner for each in level for inner in _inner(each)]
        if not level or count > MAX_VALUES:
            break
    return not level and count <= MAX_VALUES


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


# -- the file --------------------------------------------------------------------------------------------------------


def read_document(layers: Layers, path: Path) -> Mapping[str, Any] | None:
    """The names and values at the top of a file, each `Section` of it with its places; None if it can't be used.

    What is wrong with the file is added to `layers`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        layers.fault(str(path), f"can't be read ({error.strerror})", "correct the path, or its permissions")
        return None
    if len(data) > MAX_FILE_BYTES:
        layers.fault(str(path), f"has more than {MAX_FILE_BYTES} bytes", "shorten it: a configuration is smaller")
        return None
    try:
        reader = _Yaml(path, layers)
    except ImportError:
        layers.fault(str(path), "reading YAML needs PyYAML", "run: pip install 'batchqueue-async[yaml]'")
        return None
    content = reader.read(data)
    return None if content is _NOTHING else _mapping(layers, str(path), "", content)


def read_value(layers: Layers, origin: str, text: str) -> Any:
    """What a text stands for where a file would have it as a value; None if it can't be used.

    What is wrong with it is added to `layers`.
    """
    try:
        content = _Yaml(origin, layers).read(text.encode())
    except ImportError:
        layers.fault(origin, "reading YAML needs PyYAML", "run: pip install 'batchqueue-async[yaml]'")
        return None
    return None if content is _NOTHING else content


def _add_file(layers: Layers, path: Path) -> None:
    top = read_document(layers, path)
    if top is None:
        return
    for name in top:
        if name != "queues":
            way_out = nearest(name, ["queues"])
            place = place_of(top, name, str(path))
            layers.fault(place, "is not a section of the file", way_out, path=clip(name))
    origin = place_of(top, "queues", str(path))
    for queue, section in _sections(layers, origin, "queues", top.get("queues")).items():
        layers.settings[queue] = {
            name: Setting(value, place_of(section, name, str(path)), "file") for name, value in section.items()
        }


def _sections(layers: Layers, origin: str, owner: str, content: object) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    queues = _mapping(layers, origin, owner, content)
    for queue, section in queues.items():
        found[queue] = _mapping(layers, place_of(queues, queue, origin), f"queue {clip(repr(queue))}", section)
    return found


def _mapping(layers: Layers, origin: str, owner: str, content: object) -> Mapping[str, Any]:
    """A mapping by text; an empty section of a file is an empty mapping."""
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        layers.fault(origin, f"{short(content)} is not a mapping", "write name: value lines", owner=owner)
        return {}
    mapping = cast("Mapping[object, Any]", content)
    wrong = [key for key in mapping if not isinstance(key, str)]
    for key in wrong:
        place = place_of(mapping, key, origin)
        layers.fault(place, f"the name {short(key)} is not a text", "put it in quotes", owner=owner)
    if not wrong:
        return cast("Mapping[str, Any]", content)
    kept = Section({key: mapping[key] for key in mapping if isinstance(key, str)})
    kept.places = mapping.places if isinstance(mapping, Section) else {}
    return kept


class Section(dict[Any, Any]):
    """A mapping of a file that knows where its names stand.

    Attributes:
        places: by name, the file with line and column.
    """

    places: dict[Any, str]


def place_of(mapping: Mapping[Any, Any], name: object, otherwise: str) -> str:
    """Where a name of a mapping stands in the file; `otherwise` for a mapping that comes from none."""
    return mapping.places.get(name, otherwise) if isinstance(mapping, Section) else otherwise


class _BrokenError(Exception):
    """Nothing of the file can be used."""


class _Yaml:
    """One YAML document, made into plain values under bounds."""

    def __init__(self, path: Path | str, layers: Layers) -> None:
        import yaml  # noqa: PLC0415 - an extra: only those who have a file need it

        self._path = path
        self._layers = layers
        self._yaml = yaml
        self._loader: yaml.SafeLoader
        self._values = 0

    def read(self, data: bytes) -> Any:
        """The document's content, or `_NOTHING`."""
        yaml = self._yaml
        try:
            self._loader = yaml.SafeLoader(data)
            root = self._loader.get_single_node()
            return None if root is None else self._value(root, 0)
        except _BrokenError:
            pass
        except yaml.MarkedYAMLError as error:
            # The error's own text quotes the file; its problem and place are enough.
            self._fault(f"is not valid YAML: {error.problem}", error.problem_mark or error.context_mark)
        except yaml.YAMLError as error:
            self._fault(f"is not valid YAML: {getattr(error, 'reason', 'it cannot be decoded')}")
        except RecursionError:
            self._fault(f"is nested more than {MAX_DEPTH} deep")
        return _NOTHING

    def _fault(self, rule: str, mark: yaml.Mark | None = None) -> None:
        self._layers.fault(self._origin(mark), rule, "correct the file")

    def _origin(self, mark: yaml.Mark | None) -> str:
        return f"{self._path}" if mark is None else f"{self._path}, line {mark.line + 1}, column {mark.column + 1}"

    def _value(self, node: yaml.Node, depth: int) -> Any:
        # An alias is visited as often as it is used: ten lines of them can stand for a billion values.
        self._values += 1
        if self._values > MAX_VALUES:
            self._fault(f"has more than {MAX_VALUES} values, aliases counted where they are used", node.start_mark)
            raise _BrokenError
        if depth > MAX_DEPTH:
            self._fault(f"is nested more than {MAX_DEPTH} deep", node.start_mark)
            raise _BrokenError
        yaml = self._yaml
        if isinstance(node, yaml.MappingNode) and node.tag == self._loader.DEFAULT_MAPPING_TAG:
            return self._pairs(node, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == self._loader.DEFAULT_SEQUENCE_TAG:
            values = [self._value(item, depth + 1) for item in node.value]
            return [value for value in values if value is not _NOTHING]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._fault(f"has the tag {short(node.tag)}, and tags have no meaning here", node.start_mark)
        return _NOTHING

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        loader: Any = self._loader  # whose stubs leave resolve untyped
        implied = loader.resolve(self._yaml.ScalarNode, node.value, (True, False))
        if node.tag not in _PLAIN_TAGS or node.tag not in (implied, loader.DEFAULT_SCALAR_TAG):
            self._fault(f"has the tag {short(node.tag)}, or a value of its kind; put texts in quotes", node.start_mark)
            return _NOTHING
        try:
            return loader.construct_object(node)
        except ValueError as error:  # a number of thousands of digits, or one that only looks like a number
            self._fault(f"has a value that can't be read ({error})", node.start_mark)
            return _NOTHING

    def _pairs(self, node: yaml.MappingNode, depth: int) -> Section:
        merged = Section()
        own = Section()
        merged.places = {}
        own.places = {}
        for key_node, value_node in node.value:
            value = self._value(value_node, depth + 1)
            if key_node.tag == _MERGE_TAG:
                self._merge(merged, value, value_node)
                continue
            if not isinstance(key_node, self._yaml.ScalarNode):
                self._fault("has a name that is not a text", key_node.start_mark)
                continue
            key = self._scalar(key_node)
            if key in own:
                self._fault(f"has the name {short(key)} twice", key_node.start_mark)
            elif key is not _NOTHING and value is not _NOTHING:
                own[key] = value
                own.places[key] = self._origin(key_node.start_mark)
        merged.update(own)
        merged.places |= own.places
        return merged

    def _merge(self, merged: Section, value: Any, node: yaml.Node) -> None:
        """Add what `<<` names to a mapping; of several sources the first one wins."""
        if value is _NOTHING:
            return
        sources: list[Any] = value if isinstance(node, self._yaml.SequenceNode) else [value]
        for source in sources:
            if not isinstance(source, Section):
                self._fault("merges (<<) what is not a mapping", node.start_mark)
                continue
            for key in source:
                if key not in merged:
                    merged[key] = source[key]
                    merged.places[key] = source.places[key]


# -- values that are written as calls --------------------------------------------------------------------------------


def read_call(value: object, makers: Mapping[str, Callable[..., T]]) -> T:
    """What `name`, `name(1, 0.25)`, `{name: [1, 0.25]}` or, for `fixed`, a bare number stands for.

    Example:
        >>> read_call("cpu_cores_with_base(1, 0.25)", {"cpu_cores_with_base": lambda base, per_core: base + per_core})
        1.25

    Raises:
        UnreadableError: it stands for none of the `makers`; the problem says why and what does.
    """
    name, arguments = _call(value)
    maker = makers.get(name)
    if maker is None:
        raise UnreadableError(Problem(f"asks for {short(name)}, which is unknown", nearest(name, makers)))
    try:
        return maker(*arguments)
    except TypeError:
        rule = f"gives {name} {len(arguments)} arguments, which it does not take"
        raise UnreadableError(Problem(rule, "see its signature")) from None
    except ConfigError as error:
        problems = (Problem(f"has {each.path}={each.value}, which {each.rule}", each.way_out) for each in error.faults)
        raise UnreadableError(*problems) from None


def _call(value: object) -> tuple[str, list[int | float]]:
    if isinstance(value, str) and (match := _CALL.fullmatch(value.strip())):
        arguments = (match["arguments"] or "").strip()
        pieces = arguments.split(",") if arguments else []
        return match["name"], [_number(piece.strip(), strict=False) for piece in pieces]
    if isinstance(value, str) and value.strip().isdecimal() and value.isascii():
        return "fixed", [_number(value.strip(), strict=False)]
    if isinstance(value, int) and not isinstance(value, bool):
        return "fixed", [value]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        name, given = next(iter(mapping.items()), (None, None))
        if len(mapping) == 1 and isinstance(name, str):
            listed = cast("list[object]", given) if isinstance(given, list) else [given]
            return name, [] if given is None else [_number(each, strict=True) for each in listed]
    raise UnreadableError(Problem("is not understood", "write name, name(number) or {name: number}"))


def _number(value: object, *, strict: bool) -> int | float:
    try:
        return msgspec.convert(value, int | float, strict=strict)
    except msgspec.ValidationError:
        problem = Problem(f"has the argument {short(value)}, which is not a number", "give numbers alone")
        raise UnreadableError(problem) from None
