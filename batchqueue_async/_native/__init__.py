"""The choice between the compiled hot path and its Python, made here once, when the package is imported.

The names are the same either way, and mean the same: what `hotpath.c` has is the usual case of what stands in Python,
in `pure.py` or in the function that `compiled` decorates. `BATCHQUEUE_PURE=1` chooses the Python.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from batchqueue_async._native import pure

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F")

API = 7
"""The same number as in hotpath.c: a file that was built from older sources is not used."""


def _load() -> Any:
    """The extension, unless it isn't wanted, isn't there, or was built for something else."""
    if os.environ.get("BATCHQUEUE_PURE", "0") not in {"", "0"} or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    try:
        found = import_module("batchqueue_async._native.hotpath")
    except ImportError:
        return None
    return found if found.API == API else None


_found = _load()
accelerated: bool = _found is not None
"""Whether the hot path is the compiled one."""

# What type checkers see are the names of the Python.
if TYPE_CHECKING or _found is None:
    from batchqueue_async._native.pure import *  # noqa: F403 - its `__all__` says what there is to choose
else:
    globals().update({name: getattr(_found, name) for name in pure.__all__})


def compiled(step: str) -> Callable[[F], F]:
    """Put a compiled step before a method: it takes the usual case, and leaves everything else to the method.

    The method stands in `__wrapped__`, and is what `inspect` sees.
    """
    if _found is None:
        return lambda method: method
    return lambda method: _found.Method(method, step)
