"""Whether handlers may start: open, or closed for one or more reasons."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Gate:
    """A set of reasons not to go on; open while it is empty.

    Example:
        >>> gate = Gate(lambda: print("go"))
        >>> gate.close("user"), gate.close("downstream"), gate.open("user")
        (None, None, None)
        >>> gate.reasons
        ('downstream',)
        >>> gate.open("downstream")
        go

    Attributes:
        shut: whether there is a reason now; a plain attribute, as workers look at it before every message.
        reasons: the reasons, in the order in which they came.
    """

    __slots__ = ("_on_open", "_timers", "reasons", "shut")

    def __init__(self, on_open: Callable[[], None]) -> None:
        self._on_open = on_open
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.shut = False
        self.reasons: tuple[str, ...] = ()

    def close(self, reason: str) -> None:
        """Add a reason."""
        if reason not in self.reasons:
            self.reasons = (*self.reasons, reason)
            self.shut = True

    def close_for(self, reason: str, seconds: float) -> None:
        """Add a reason that goes by itself."""
        self.close(reason)
        timer = self._timers.pop(reason, None)
        if timer is not None:
            timer.cancel()
        self._timers[reason] = asyncio.get_running_loop().call_later(seconds, self.open, reason)

    def open(self, reason: str) -> None:
        """Take a reason away; with the last one the gate opens."""
        timer = self._timers.pop(reason, None)
        if timer is not None:
            timer.cancel()
        if reason in self.reasons:
            self.reasons = tuple(each for each in self.reasons if each != reason)
            self.shut = bool(self.reasons)
            if not self.shut:
                self._on_open()
