"""What several sinks read from a record's fields: labels and times. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

from batchqueue_async.errors import PermanentError


def labels_of(value: Any) -> dict[str, str]:
    """Labels as a dict of text; other values are written as text.

    Example:
        >>> labels_of({"status": 200})
        {'status': '200'}
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PermanentError(f"a record's labels are of type {type(value).__qualname__}; give a mapping")
    found = cast("Mapping[object, object]", value)
    return {str(name): str(content) for name, content in found.items()}


def time_of(fields: dict[str, Any], now: int) -> int:
    """Take a record's time out of its fields, in nanoseconds.

    Example:
        >>> time_of({"timestamp": 2}, now=0), time_of({"time_unix_nano": 5}, now=0), time_of({}, now=7)
        (2000000000, 5, 7)
    """
    exact: Any = fields.pop("time_unix_nano", None)
    value: Any = fields.pop("timestamp", None)
    if exact is not None:
        if not isinstance(exact, int):
            raise PermanentError(
                f"a record's time_unix_nano is of type {type(exact).__qualname__}; give whole nanoseconds"
            )
        return exact
    if value is None:
        return now
    return nanoseconds(value)


def nanoseconds(moment: object) -> int:
    """A datetime, or seconds since 1970, as whole nanoseconds; a float to the microsecond, which is what it can hold.

    Example:
        >>> nanoseconds(3), nanoseconds(1700000000.123457)
        (3000000000, 1700000000123457000)
    """
    if isinstance(moment, int):
        return moment * 1_000_000_000
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    if not isinstance(moment, float):
        raise PermanentError(
            f"a record's time is of type {type(moment).__qualname__}; give seconds since 1970, or a datetime"
        )
    try:
        return round(moment * 1_000_000) * 1_000
    except (ValueError, OverflowError):
        raise PermanentError(f"a record's time is {moment}, which is none") from None
