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

API = 2
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
    Countdown = pure.Countdown
    Door = pure.Door
    Entrance = pure.Entrance
    Inbox = pure.Inbox
    InboxLock = pure.InboxLock
    Place = pure.Place
    Share = pure.Share
    group_by_type = pure.group_by_type
    one_type = pure.one_type
    put_credits = pure.put_credits
    put_run = pure.put_run
    sort_run = pure.sort_run
else:
    Countdown = _found.Countdown
    Door = _found.Door
    Entrance = _found.Entrance
    Inbox = _found.Inbox
    InboxLock = _found.InboxLock
    Place = _found.Place
    Share = _found.Share
    group_by_type = _found.group_by_type
    one_type = _found.one_type
    put_credits = _found.put_credits
    put_run = _found.put_run
    sort_run = _found.sort_run


def compiled(step: str) -> Callable[[F], F]:
    """Put a compiled step before a method: it takes the usual case, and leaves everything else to the method.

    The method stands in `__wrapped__`, and is what `inspect` sees.
    """
    if _found is None:
        return lambda method: method
    return lambda method: _found.Method(method, step)
