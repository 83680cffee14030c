"""The client of a sink, imported at the door, so that a missing extra is named with its command."""

from __future__ import annotations

import importlib
from typing import Any

from batchqueue_async.errors import ConfigError


def require(module: str, extra: str) -> Any:
    """Import a module that the extra `extra` installs.

    The module comes back as `Any`: the clients are typed in parts at best, and each sink names the types it takes
    from its client in one place.

    Example:
        >>> require("json", "kafka").loads("[1]")
        [1]

    Raises:
        ConfigError: it is not installed; the message has the command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, and misses something of its own
        package = module.partition(".")[0]
        raise ConfigError(
            f"this sink needs {package}, which is not installed; run: pip install 'batchqueue-async[{extra}]'"
        ) from error
