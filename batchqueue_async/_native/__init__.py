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

API = 3
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
    CounterFields = pure.CounterFields
    Countdown = pure.Countdown
    Door = pure.Door
    DrainFields = pure.DrainFields
    Entrance = pure.Entrance
    HandlerFields = pure.HandlerFields
    Inbox = pure.Inbox
    InboxLock = pure.InboxLock
    LaneFields = pure.LaneFields
    NO_CALL = pure.NO_CALL
    NO_SLOTS = pure.NO_SLOTS
    PartitionFields = pure.PartitionFields
    Place = pure.Place
    RoundFields = pure.RoundFields
    Share = pure.Share
    TurnFields = pure.TurnFields
    call_usual = pure.call_usual
    finish_usual = pure.finish_usual
    group_by_type = pure.group_by_type
    group_usual = pure.group_usual
    one_type = pure.one_type
    put_credits = pure.put_credits
    put_run = pure.put_run
    sort_run = pure.sort_run
    take_usual = pure.take_usual
else:
    CounterFields = _found.CounterFields
    Countdown = _found.Countdown
    Door = _found.Door
    DrainFields = _found.DrainFields
    Entrance = _found.Entrance
    HandlerFields = _found.HandlerFields
    Inbox = _found.Inbox
    InboxLock = _found.InboxLock
    LaneFields = _found.LaneFields
    NO_CALL = _found.NO_CALL
    NO_SLOTS = _found.NO_SLOTS
    PartitionFields = _found.PartitionFields
    Place = _found.Place
    RoundFields = _found.RoundFields
    Share = _found.Share
    TurnFields = _found.TurnFields
    call_usual = _found.call_usual
    finish_usual = _found.finish_usual
    group_by_type = _found.group_by_type
    group_usual = _found.group_usual
    one_type = _found.one_type
    put_credits = _found.put_credits
    put_run = _found.put_run
    sort_run = _found.sort_run
    take_usual = _found.take_usual


def compiled(step: str) -> Callable[[F], F]:
    """Put a compiled step before a method: it takes the usual case, and leaves everything else to the method.

    The method stands in `__wrapped__`, and is what `inspect` sees.
    """
    if _found is None:
        return lambda method: method
    return lambda method: _found.Method(method, step)
