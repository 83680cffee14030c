"""What the Spark parts need from outside, checked at the door, so that a missing package is named with its command."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
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
        raise _missing(module) from error


def check() -> None:
    """Check that PySpark 4, pyarrow and pandas are there."""
    need("pyarrow")
    if find_spec("pandas") is None:  # importing it takes half a second of every worker, and only Spark uses it
        raise _missing("pandas")
    check_version(need("pyspark").__version__)


def _missing(module: str) -> ConfigError:
    package = module.partition(".")[0]
    return ConfigError(f"batchqueue_async.spark needs {package}, which is not installed; run: {COMMAND}")


def check_version(version: str) -> None:
    """Refuse a PySpark that is too old.

    Example:
        >>> check_version("4.1.0")
    """
    if int(version.partition(".")[0]) < _OLDEST:
        raise ConfigError(
            f"batchqueue_async.spark needs PySpark {_OLDEST} or newer, and found {version}; run: {COMMAND}"
        )
