"""Where the log events of a service go: a line each on standard error, as text for people or as JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import structlog

from batchqueue_async._support.redaction import without_credentials

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(level: str, style: str) -> None:
    """Send the events of the library, and those of others from `warning` on, to standard error.

    Args:
        level: "debug", "info", "warning" or "error".
        style: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    if style == "json":
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
                structlog.processors.JSONRenderer(default=str),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
            cache_logger_on_first_use=False,
        )
    else:
        structlog.reset_defaults()
    logging.getLogger("batchqueue_async").setLevel(LEVELS[level])


class _Text(logging.Formatter):
    """`2026-01-31T12:00:00Z info queue_created queue='rows'`."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return f"{at} {record.levelname.lower()} {_message(record)}"


class _Json(logging.Formatter):
    """What other libraries log, as an object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {"event": _message(record), "logger": record.name, "level": record.levelname.lower()}
        return json.dumps({**said, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))})


def _message(record: logging.LogRecord) -> str:
    """On one line, and without the credentials that a client library may show."""
    text = without_credentials(record.getMessage())
    return text if text.isprintable() else " ".join(text.split())
