"""What a forked child process inherits: objects whose threads stayed behind, told so at the fork."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that must not go on as it is in a forked child."""

    def after_fork(self) -> None:
        """Called in the child, before anything else of the program runs there."""
        ...


_alive: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch(thing: Forkable) -> None:
    """Call the thing's `after_fork` in every child that is forked from now on."""
    _alive.add(thing)


def _tell_all() -> None:
    for thing in list(_alive):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell_all)
