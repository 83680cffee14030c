"""Log events of the library: through structlog where the program configured it, else through `logging`.

A program that never configured structlog would get every event printed; so without a configuration events go to the
`logging` logger "batchqueue_async", whose rules every program knows. Events carry names and numbers, never an item.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

from batchqueue_async._support.redaction import shortened, without_credentials, without_payload

_structured: Any = structlog.get_logger("batchqueue_async")
_plain = logging.getLogger("batchqueue_async")
_METHODS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}


def _emit(level: int, event: str, fields: dict[str, Any]) -> None:
    # Logging runs the program's own code (filters, processors, handlers, reprs). If it raises, the work that is being
    # logged goes on: an event may be lost, an item may not.
    try:
        if structlog.is_configured():
            # By the level's own method: a plain `BoundLogger` has no `log` that takes a level.
            getattr(_structured, _METHODS[level])(event, **fields)
        elif _plain.isEnabledFor(level):
            _plain.log(level, "%s %s", event, " ".join(f"{name}={value!r}" for name, value in fields.items()))
    except Exception:  # noqa: BLE001, S110 - there is no place left to report it
        pass


def debug(event: str, **fields: Any) -> None:
    """Log a detail of the library's work."""
    _emit(logging.DEBUG, event, fields)


def info(event: str, **fields: Any) -> None:
    """Log a step in the life of a queue or scheduler."""
    _emit(logging.INFO, event, fields)


def warning(event: str, **fields: Any) -> None:
    """Log something that the user may want to change."""
    _emit(logging.WARNING, event, fields)


def error(event: str, **fields: Any) -> None:
    """Log something that went wrong."""
    _emit(logging.ERROR, event, fields)


def place_of(error: BaseException) -> str:
    """Where an error was raised: file, line and function."""
    place = "unknown"
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place


def describe(error: BaseException, *, full: bool = False) -> dict[str, str]:
    """An error as fields of a log event: class, place and text, the text without what may quote an item.

    With `full` the text is whole but for credentials: `log_errors="full"` asks for that.
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the error's class is the user's; what it can't say is not logged
        text = ""
    shown = shortened(without_credentials(text)) if full else without_payload(text)
    return {"error": type(error).__qualname__, "where": place_of(error), "text": shown}
