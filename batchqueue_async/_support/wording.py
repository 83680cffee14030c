"""How values, functions and names appear in messages: short, on one line, and never a secret."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import reprlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST = 80
_SECRET_WORD = re.compile(r"pass(?:word|wd|phrase)|secret|token|api[-_]?key|credential|private[-_]?key", re.IGNORECASE)
_SECRET_SHAPE = re.compile(r"://[^/\s]*@|-----BEGIN|^(?=\S*[0-9])(?=\S*[A-Za-z])[A-Za-z0-9+/_=.-]{20,}$")
_MOST_BITS = 128


def short(value: object) -> str:
    """A value of any size in a message; what looks like a secret is only described.

    Example:
        >>> short("many"), short(list(range(100))), short("postgres://app:hunter2@db/shop")
        ("'many'", '[0, 1, 2, 3, 4, 5, ...]', '<text of 30 characters>')
    """
    return clip(_shortener.repr(value), 2 * _LONGEST)


def clip(text: str, most: int = _LONGEST) -> str:
    """A name, or anything else that is not a secret, in a message: on one line, and not too long."""
    line = text if text.isprintable() else repr(text)
    return line if len(line) <= most else f"{line[: most - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that was probably meant, or at all of them.

    Example:
        >>> nearest("max_bacth", ["max_batch", "linger"]), nearest("x", ["max_batch", "linger"])
        ('did you mean max_batch?', 'there are max_batch, linger')
    """
    names = list(known)
    close = closest(name, names)
    return f"did you mean {close}?" if close else f"there are {', '.join(names)}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, if any is near."""
    close = difflib.get_close_matches(name[:_LONGEST], list(known), n=1)
    return close[0] if close else None


def name_of(value: Any) -> str:
    """What a user calls a function, class or object: its own name, or that of its class."""
    while isinstance(value, functools.partial):
        value = value.func
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__


class _Shortener(reprlib.Repr):
    """`reprlib` with names for functions and classes, and nothing of what may be a secret."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = _LONGEST // 2
        self.maxother = _LONGEST

    def repr_str(self, x: str, level: int) -> str:
        if _SECRET_SHAPE.search(x) or _SECRET_WORD.search(x):
            return f"<text of {len(x)} characters>"
        return super().repr_str(x, level)

    def repr_bytes(self, x: bytes, level: int) -> str:  # noqa: ARG002 - reprlib's signature
        return f"<{len(x)} bytes>"

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write a number of thousands of digits, and nobody would read it.
        return super().repr_int(x, level) if x.bit_length() <= _MOST_BITS else f"<int of {x.bit_length()} bits>"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        pairs = [self._pair(key, x[key], level - 1) for key in itertools.islice(x, self.maxdict)]
        return f"{{{', '.join([*pairs, '...'] if len(x) > self.maxdict else pairs)}}}"

    def _pair(self, key: object, value: object, level: int) -> str:
        """Names are not secrets, but they reveal which values are secrets."""
        if not isinstance(key, str):
            return f"{self.repr1(key, level)}: {self.repr1(value, level)}"
        return f"{clip(repr(key))}: {'<hidden>' if _SECRET_WORD.search(key) else self.repr1(value, level)}"

    def repr_instance(self, x: object, level: int) -> str:
        text = super().repr_instance(x, level)
        is_secret = _SECRET_SHAPE.search(text) or _SECRET_WORD.search(text)
        return f"<{type(x).__name__} object>" if is_secret else text

    def repr_function(self, x: Any, level: int) -> str:  # noqa: ARG002 - reprlib's signature
        return name_of(x)

    repr_builtin_function_or_method = repr_method = repr_type = repr_function


_shortener = _Shortener()
