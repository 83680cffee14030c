"""The values of a service: the file, over it the environment, over that `--set`; each knows where it was set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support.wording import clip, closest
from batchqueue_async.config_file import (
    PREFIX,
    Layers,
    Section,
    capitals,
    is_no_setting,
    place_of,
    read_document,
    read_value,
)
from batchqueue_async.service.file.shapes import Field, Shape, Struct, Tagged, Things

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from batchqueue_async._support.checks import Rule


def read_layers(
    layers: Layers, file: Path, shape: Struct, environ: Mapping[str, str], settings: Sequence[str]
) -> Section:
    """The content of a file, with what the environment and `--set NAME=VALUE` change.

    What is wrong is added to `layers`.
    """
    content = _section(read_document(layers, file) or {})
    for variable in sorted(environ):
        if variable.startswith(PREFIX):
            rest = variable.removeprefix(PREFIX)
            if not is_no_setting(rest):
                _set_by_variable(layers, content, shape, (variable, environ[variable]))
    for text in settings:
        name, equals, value = text.partition("=")
        origin = f"--set {clip(name)}"
        if not (equals and all(name.split("."))):
            layers.fault(origin, "is not NAME=VALUE", "write --set exporters.warehouse.max_bytes=2GiB")
            continue
        _put(content, name.split("."), read_value(layers, origin, value), origin)
    return content


def _section(value: Mapping[Any, Any]) -> Section:
    made = Section(value)
    made.places = dict(value.places) if isinstance(value, Section) else {}
    return made


def _put(content: Section, names: Sequence[str], value: Any, origin: str) -> None:
    """Set a value; the mappings on the way are copies, because an anchor may stand in several places."""
    first, *rest = names
    if rest:
        inner = content.get(first)
        made = _section(cast("Mapping[str, Any]", inner)) if isinstance(inner, Mapping) else _section({})
        place = place_of(content, first, origin)
        content[first] = made
        content.places[first] = place
        _put(made, rest, value, origin)
    else:
        content[first] = value
        content.places[first] = origin


# -- the environment -------------------------------------------------------------------------------------------------


def _set_by_variable(layers: Layers, content: Section, shape: Struct, given: tuple[str, str]) -> None:
    variable, text = given
    origin = f"environment variable {variable}"
    path, problem = _path_of(variable.removeprefix(PREFIX).split("__"), shape, content)
    if problem:
        layers.fault(origin, *problem)
        return
    _put(content, path, read_value(layers, origin, text), origin)


def _path_of(pieces: list[str], shape: Struct, content: Any) -> tuple[list[str], tuple[str, str] | None]:
    """The path that the pieces of a variable's name stand for; and what is wrong with them."""
    path: list[str] = []
    here: Shape | Rule = shape
    for number, piece in enumerate(pieces):
        known = _names(here, content)
        if known is None:
            return path, ("names a field of what has none", f"end it with {'__'.join(pieces[:number])}")
        found = next((name for name in known if capitals(name) == piece), None)
        if found is None:
            if not isinstance(here, Things) or not piece:
                start = "__".join(pieces[:number])
                near = closest(piece, [capitals(name) for name in known])
                way_out = f"did you mean {near}?" if near else "unset it, or see the reference of the file"
                return path, (f"sets {clip(piece)!r}, which is not a field{f' of {start}' if start else ''}", way_out)
            found = piece.lower()
        path.append(found)
        inner: Any = cast("Mapping[str, Any]", content).get(found) if isinstance(content, Mapping) else None
        here = _inner(here, found, inner)
        content = inner
    return path, None


def _names(shape: Shape | Rule, content: Any) -> list[str] | None:
    there = [str(name) for name in cast("Mapping[str, Any]", content)] if isinstance(content, Mapping) else []
    if isinstance(shape, Struct):
        return list(shape.fields)
    if isinstance(shape, Things):
        return there
    if isinstance(shape, Tagged):
        kind = cast("Mapping[str, Any]", content).get("type") if isinstance(content, Mapping) else None
        known = shape.kinds.get(str(kind))
        kinds = list(shape.kinds.values()) if known is None else [known]
        return ["type", *dict.fromkeys(name for each in kinds for name in each.fields)]
    # What a rule takes whole may be a mapping, whose names the environment can spell.
    return there or None


def _inner(shape: Shape | Rule, name: str, content: Any) -> Shape | Rule:
    if isinstance(shape, Struct):
        return shape.fields[name].of
    if isinstance(shape, Things):
        return shape.of
    if isinstance(shape, Tagged):
        kinds = [each.fields[name] for each in shape.kinds.values() if name in each.fields]
        found: Field | None = kinds[0] if kinds else None
        return _ANY if found is None else found.of
    return shape if isinstance(content, Mapping) else _ANY


_ANY = Shape()
