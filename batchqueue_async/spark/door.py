"""What the Spark parts need from outside, checked at the door, so that a missing package is named with its command."""

from __future__ import annotations

import importlib
from typing import Any

from batchqueue_async.errors import ConfigError

COMMAND = "pip install 'batchqueue-async[spark]'"
_OLDEST = 4


def need(module: str) -> Any:
    """Import a module of the extra `spark`.

    Raises:
        ConfigError: it is not installed; the message has the command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # it is there, and misses something of its own
        package = module.partition(".")[0]
        raise ConfigError(f"batchqueue_async.spark needs {package}, which is not installed; run: {COMMAND}") from error


def check() -> None:
    """Check that PySpark 4, pyarrow and pandas can be imported."""
    for module in ("pyarrow", "pandas"):
        need(module)
    check_version(need("pyspark").__version__)


def check_version(version: str) -> None:
    """Refuse a PySpark that is too old.

    Example:
        >>> check_version("4.1.0")
    """
    if int(version.partition(".")[0]) < _OLDEST:
        raise ConfigError(
            f"batchqueue_async.spark needs PySpark {_OLDEST} or newer, and found {version}; run: {COMMAND}"
        )
