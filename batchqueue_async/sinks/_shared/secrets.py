"""Credentials: where they come from, and how they stay out of what people read.

A credential is given as a reference: `env:NAME` names an environment variable, `file:/path` a file, such as one that a
secret store mounts; anything else is the value itself. It is read when it is used, so that a rotated file counts at
the next connection, and a pickled sink carries the reference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from batchqueue_async._support.redaction import HIDDEN, without_credentials
from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Secret:
    """A credential that shows in no text; `reveal` reads it.

    Example:
        >>> token = Secret("correct horse")
        >>> token, f"{token}"
        (Secret('***'), '***')
        >>> token.reveal()
        'correct horse'
    """

    __slots__ = ("_reference",)

    def __init__(self, reference: str | Secret) -> None:
        # Another secret is copied, not revealed: what it refers to may change.
        self._reference: str = reference._reference if isinstance(reference, Secret) else reference  # noqa: SLF001 - its own class

    def reveal(self) -> str:
        """The value, read from where it is now.

        Raises:
            ConfigError: the variable or file is not there; the message names it.
        """
        kind, _, place = self._reference.partition(":")
        if kind == "env":
            return _variable(place)
        if kind == "file":
            return _file(place)
        return self._reference

    def __repr__(self) -> str:
        return f"Secret({HIDDEN!r})"

    def __str__(self) -> str:
        return HIDDEN

    def __format__(self, spec: str) -> str:
        return format(HIDDEN, spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._reference == other._reference

    def __hash__(self) -> int:
        return hash((Secret, self._reference))

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return Secret, (self._reference,)


@overload
def resolve(reference: str | Secret) -> str: ...
@overload
def resolve(reference: None) -> None: ...
@overload
def resolve(reference: str | Secret | None) -> str | None: ...
def resolve(reference: str | Secret | None) -> str | None:
    """The value of a credential option: `env:NAME`, `file:/path`, a plain value, or None.

    Example:
        >>> os.environ["EXAMPLE_TOKEN"] = "t0ken"
        >>> resolve("env:EXAMPLE_TOKEN")
        't0ken'
    """
    return None if reference is None else Secret(reference).reveal()


def resolve_option(value: Any) -> Any:
    """The value of an option of someone else's library: `env:NAME`, `file:/path`, or as it is; a URL is no reference.

    Example:
        >>> resolve_option("file:///var/lib/lake"), resolve_option(3)
        ('file:///var/lib/lake', 3)
    """
    if isinstance(value, Secret):
        return value.reveal()
    return resolve(value) if isinstance(value, str) and not value.startswith("file://") else value


def header_value(name: str, value: str) -> str:
    """A value for a header or metadata field, which has no line breaks and no other control characters.

    Example:
        >>> header_value("authorization", "Bearer t0ken")
        'Bearer t0ken'
    """
    if not value.isprintable():
        raise ConfigError(f"the value for the field {name!r} holds a line break or another control character; fix it")
    return value


def redacted(text: str, secrets: Iterable[Secret | str | None] = ()) -> str:
    """A text without the passwords in the URLs and settings it holds, and without the given secrets.

    Example:
        >>> redacted("postgresql://app:s3cret@db/app?sslmode=verify-full")
        'postgresql://app:***@db/app?sslmode=verify-full'
        >>> redacted("host=db password=s3cret")
        'host=db password=***'
        >>> redacted("refused: t0ken", [Secret("t0ken")])
        'refused: ***'
    """
    for secret in secrets:
        if secret and (value := resolve(secret)):
            text = text.replace(value, HIDDEN)
    return without_credentials(text)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ConfigError(f"a credential is to come from the environment variable {name!r}, which is not set; set it")
    return value


def _file(path: str) -> str:
    try:
        # A text editor and `echo` end the file with a line break that is no part of the secret.
        found = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(
            f"a credential is to come from the file {path!r}, which cannot be read ({reason}); "
            "make it, readable for this user only"
        ) from None
    if not found:  # as it is for a moment while it is written anew
        raise ConfigError(f"a credential is to come from the file {path!r}, which is empty; write it")
    return found
