"""Log events of the library: through structlog where the program configured it, else through `logging`.

A program that never configured structlog would get every event printed; so without a configuration events go to the
`logging` logger "batchqueue_async", whose rules every program knows. Events carry names and numbers, never an item.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

_structured: Any = structlog.get_logger("batchqueue_async")
_plain = logging.getLogger("batchqueue_async")


def _emit(level: int, event: str, fields: dict[str, Any]) -> None:
    if structlog.is_configured():
        _structured.log(level, event, **fields)
    elif _plain.isEnabledFor(level):
        _plain.log(level, "%s %s", event, " ".join(f"{name}={value!r}" for name, value in fields.items()))


def debug(event: str, **fields: Any) -> None:
    """Tell a detail of the library's work."""
    _emit(logging.DEBUG, event, fields)


def info(event: str, **fields: Any) -> None:
    """Tell a step in the life of a queue or scheduler."""
    _emit(logging.INFO, event, fields)


def warning(event: str, **fields: Any) -> None:
    """Tell what the user may want to change."""
    _emit(logging.WARNING, event, fields)


def error(event: str, **fields: Any) -> None:
    """Tell what went wrong."""
    _emit(logging.ERROR, event, fields)
