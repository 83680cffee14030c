"""What an HTTP answer says of a batch: which error a status is, and how long the server asks to be left alone. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from batchqueue_async.errors import (
    AuthError,
    PermanentError,
    RetryableError,
    SinkError,
    ThrottledError,
    TooLargeError,
)

_REFUSES_US = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED}
_LATER = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
_TIMEOUTS = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT}
_REDIRECTS = range(300, 400)
_SERVER_ERRORS = range(500, 600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statuses:
    """What a server's statuses mean beyond what HTTP says.

    Attributes:
        retryable: those that may pass.
        final: those that never will.
    """

    retryable: frozenset[int] = frozenset()
    final: frozenset[int] = frozenset()


_PLAIN = Statuses()


def retry_after(value: str | None, now: float) -> float | None:
    """The seconds that a `Retry-After` header asks for, in either of its forms; None where it says nothing sensible.

    `now` is the time of day, in seconds since 1970, that a date is compared with; a date in the past asks for 0.

    Example:
        >>> retry_after("120", now=0.0)
        120.0
        >>> retry_after("Thu, 01 Jan 1970 00:01:30 GMT", now=60.0)
        30.0
        >>> retry_after("soon", now=0.0) is None
        True
    """
    text = (value or "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return _until(text, now)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _until(date: str, now: float) -> float | None:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, TypeError, IndexError, OverflowError):  # what the parser raises for text that is no date
        return None
    if moment.tzinfo is None:  # "-0000" says UTC of an unknown place
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, moment.timestamp() - now)


def error_for(status: int, what: str, *, wait: float | None = None, statuses: Statuses = _PLAIN) -> SinkError | None:
    """The error that a status is, or None for success; `what` names the request, `wait` is its `Retry-After`.

    Example:
        >>> error_for(204, "POST to http://host/") is None
        True
        >>> error_for(503, "POST to http://host/", wait=2.0)
        RetryableError('POST to http://host/ was answered with 503 Service Unavailable')
    """
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return None
    said = f"{what} was answered with {status} {_phrase(status)}".rstrip()
    if status in statuses.final:
        return PermanentError(said, error_type="refused")
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return ThrottledError(said, retry_after=wait)
    if status in _LATER or status in _SERVER_ERRORS or status in statuses.retryable:
        kind = "timeout" if status in _TIMEOUTS else "server"
        return RetryableError(said, retry_after=wait, error_type=kind)
    if status in _REFUSES_US:
        return AuthError(f"{said}; check the sink's token, or user and password")
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return TooLargeError(said)
    if status in _REDIRECTS:
        return PermanentError(f"{said}; redirects are not followed, give the sink the final URL", error_type="refused")
    return PermanentError(said, error_type="refused")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
