"""The rules that configuration fields follow, each with a message that names owner, field, value and rule."""

from __future__ import annotations

import math
from typing import NoReturn

from batchqueue_async.errors import ConfigError


def fail(owner: object, name: str, rule: str) -> NoReturn:
    """Raise `ConfigError`, naming owner, field, value and rule."""
    raise ConfigError(f"{type(owner).__name__}: {name}={getattr(owner, name)!r} {rule}")


def kind(owner: object, name: str, wanted: type, *, optional: bool = False) -> None:
    """The field is of this type."""
    value = getattr(owner, name)
    if not (isinstance(value, wanted) or (optional and value is None)):
        fail(owner, name, f"is not a {wanted.__name__}; give a {wanted.__name__}{' or None' if optional else ''}")


def whole(owner: object, name: str, least: int, *, optional: bool = False) -> None:
    """The field is a whole number, not below `least`."""
    value = getattr(owner, name)
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        fail(owner, name, f"is not a whole number of {least} or more; raise it")


def number(owner: object, name: str, *, above: bool) -> None:
    """The field is a finite number, above 0 or not below it."""
    value = getattr(owner, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        fail(owner, name, "is not a finite number; give one above 0")
    if value < 0 or (above and value == 0):
        fail(owner, name, f"is {'below' if value < 0 else 'not above'} 0; raise it")


def seconds(owner: object, name: str, *, zero: bool = False, optional: bool = False) -> None:
    """The field is a number of seconds, above 0 or not below it."""
    if optional and getattr(owner, name) is None:
        return
    number(owner, name, above=not zero)
