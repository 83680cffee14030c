"""When the configuration of this process was read last, and whether it could be used: for whoever shows it."""

from __future__ import annotations

from typing import NamedTuple


class Reload(NamedTuple):
    """A reading of the configuration.

    Example:
        >>> Reload(ok=True, at=1.0).ok
        True

    Attributes:
        ok: whether it was taken.
        at: when, in seconds since the epoch.
    """

    ok: bool
    at: float


class LastReload:
    """The last reading, and the last one that was taken; None while nothing has been read from a file.

    Attributes:
        last: the last one.
        taken: the last one that was taken.
    """

    def __init__(self) -> None:
        self.last: Reload | None = None
        self.taken: Reload | None = None

    def note(self, *, ok: bool, at: float) -> None:
        """Remember a reading."""
        self.last = Reload(ok, at)
        if ok:
            self.taken = self.last


reloads = LastReload()
"""Those of this process."""
