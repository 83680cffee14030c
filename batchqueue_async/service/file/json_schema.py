"""The JSON Schema of a service file, for editors; made from the shapes that check the file."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from batchqueue_async._support.checks import MOST_SECONDS, Bytes, Choice, Flag, Real, Rule, Seconds, Whole
from batchqueue_async.config import NestedRule, PolicyRule
from batchqueue_async.service.file.kinds import SINKS, SOURCES
from batchqueue_async.service.file.rules import (
    Addresses,
    AnyMap,
    Named,
    Registered,
    SecretText,
    Text,
    TextMap,
    Texts,
    Wholes,
)
from batchqueue_async.service.file.schema import FILE
from batchqueue_async.service.file.shapes import Field, Shape, Struct, Tagged, Things

if TYPE_CHECKING:
    from collections.abc import Mapping

Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DURATION = r"^\s*([0-9]+(\.[0-9]+)?\s*(d|h|ms|us|m|s)\s*)+$"
_SIZE = r"^\s*[0-9]+(\.[0-9]+)?\s*([kmgtKMGT]i?)?[bB]?\s*$"
_REFERENCE = r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:/.+)$"


def json_schema() -> Json:
    """The schema of the whole file.

    Example:
        >>> sorted(json_schema()["properties"])[:3]
        ['defaults', 'exporters', 'logs']
    """
    made = of_shape(FILE)
    title = "A service of batchqueue_async"
    return {"$schema": DIALECT, "title": title, **made, "$comment": "written by `batchqueue schema`"}


def of_shape(shape: Shape) -> Json:
    """The schema of a shape."""
    if isinstance(shape, Struct):
        return _struct(shape)
    if isinstance(shape, Things):
        return {"type": ["object", "null"], "additionalProperties": of_shape(shape.of)}
    if isinstance(shape, Tagged):
        return _tagged(shape)
    raise TypeError(f"{type(shape).__name__} has no JSON Schema; add it here")


def _struct(shape: Struct, more: Mapping[str, Any] | None = None, texts: Mapping[str, str] | None = None) -> Json:
    known = {name: _field(each, (texts or {}).get(name, "")) for name, each in shape.fields.items()}
    made: Json = {"type": "object", "properties": {**(more or {}), **known}, "additionalProperties": False}
    needed = [*(more or {}), *(name for name, each in shape.fields.items() if each.needed)]
    if needed:
        made["required"] = needed
    elif shape.optional or shape is not FILE:
        made["type"] = ["object", "null"]
    if shape.shorthand is None:
        return made
    if shape.shorthand(1) is not None:
        short: Json = {"type": "integer"}
    else:
        short = {"const": True} if shape.shorthand(False) is None else {"type": "boolean"}
    return {"anyOf": [made, short]}


def _tagged(shape: Tagged) -> Json:
    classes = {**SINKS} if shape.what == "sink" else {**SOURCES}
    kinds: list[Json] = []
    for name, kind in shape.kinds.items():
        known = classes.get(name)
        made = _struct(kind, {"type": {"const": name}}, None if known is None else known.texts())
        if known is not None:
            made["description"] = known.text
        kinds.append(made)
    return {"oneOf": kinds}


def _field(field: Field, text: str) -> Json:
    made = of_shape(field.of) if isinstance(field.of, Shape) else of_rule(field.of)
    if isinstance(field.of, Rule) and field.of.optional:
        made = {"anyOf": [made, {"type": "null"}]}
    if field.text or text:
        made = {**made, "description": field.text or text}
    return made


@singledispatch
def of_rule(rule: Rule) -> Json:
    """The schema of what a rule takes."""
    del rule
    return {}


@of_rule.register
def _whole(rule: Whole) -> Json:
    return {"type": "integer", "minimum": rule.least, "maximum": rule.most}


@of_rule.register
def _bytes(rule: Bytes) -> Json:
    return {"anyOf": [{"type": "integer", "minimum": rule.least}, {"type": "string", "pattern": _SIZE}]}


@of_rule.register
def _real(rule: Real) -> Json:
    least = {"exclusiveMinimum": rule.least} if rule.above else {"minimum": rule.least}
    return {"type": "number", **({} if math.isinf(rule.most) else {"maximum": rule.most}), **least}


@of_rule.register
def _seconds(rule: Seconds) -> Json:
    number = _real(rule)
    number["maximum"] = min(rule.most, MOST_SECONDS)
    return {"anyOf": [number, {"type": "string", "pattern": _DURATION}]}


@of_rule.register
def _flag(rule: Flag) -> Json:
    del rule
    return {"type": "boolean"}


@of_rule.register
def _choice(rule: Choice) -> Json:
    return {"enum": list(rule.words)}


@of_rule.register
def _policy(rule: PolicyRule) -> Json:
    words = "|".join(rule.makers)
    forms: list[Json] = [{"type": "string", "pattern": rf"^\s*([0-9]+|({words})\s*(\([0-9., ]*\))?)\s*$"}]
    return {"anyOf": [{"type": "integer", "minimum": 1}, *forms, {"type": "object", "maxProperties": 1}]}


@of_rule.register
def _nested(rule: NestedRule) -> Json:
    inner = {name: of_rule(each) for name, each in rule.rules.items()}
    made: Json = {"type": "object", "properties": inner, "additionalProperties": False}
    return {**made, "required": list(rule.needed)} if rule.needed else made


@of_rule.register
def _text(rule: Text) -> Json:
    del rule
    return {"type": "string", "minLength": 1}


@of_rule.register
def _secret(rule: SecretText) -> Json:
    del rule
    return {"type": "string", "pattern": _REFERENCE}


@of_rule.register
def _texts(rule: Texts) -> Json:
    del rule
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}


@of_rule.register
def _addresses(rule: Addresses) -> Json:
    one = {"type": "string", "pattern": r"^(unix:.*|.+:[0-9]{1,5})$"}
    del rule
    return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}


@of_rule.register
def _wholes(rule: Wholes) -> Json:
    del rule
    return {"type": "array", "items": {"type": "integer"}}


@of_rule.register
def _text_map(rule: TextMap) -> Json:
    del rule
    return {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}


@of_rule.register
def _any_map(rule: AnyMap) -> Json:
    del rule
    return {"type": "object"}


@of_rule.register
def _registered(rule: Registered) -> Json:
    del rule
    return {"type": "string", "pattern": r"^[A-Za-z_][A-Za-z0-9_.-]{0,99}$"}


@of_rule.register
def _named(rule: Named) -> Json:
    del rule
    return {"type": "string", "minLength": 1}
