"""A context of its own for every handler call: what one leaves in context variables, no other sees.

The calls of a drain task run in its task one after the other, and a task has one context. So whoever makes the calls
looks after each whether something was left there, and if so goes on in a fresh copy. A copy for each call in advance
would cost more than the call of a small batch, and a task for each call several turns of the loop.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

R = TypeVar("R")


class _Switch:
    """What a coroutine yields to go on in another context at once, without a turn of the loop."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context


class InContexts(Coroutine[Any, Any, R]):
    """A coroutine for a task, whose steps run in the context here, or in those to which it changes.

    To whoever looks at the task (in a debugger, say) it is the coroutine itself.
    """

    __slots__ = ("_run", "_send", "_steps")

    def __init__(self, steps: Coroutine[Any, Any, R]) -> None:
        self._steps = steps
        self._send = steps.send
        self._run = copy_context().run

    def send(self, value: Any) -> Any:
        """Go on."""
        given = self._run(self._send, value)
        return self._switch(given) if type(given) is _Switch else given

    def throw(self, *error: Any) -> Any:
        """Go on with an error: a cancellation, most often."""
        given = self._run(self._steps.throw, *error)
        return self._switch(given) if type(given) is _Switch else given

    def _switch(self, given: Any) -> Any:
        while type(given) is _Switch:
            self._run = given.context.run
            given = self._run(self._send, None)
        return given

    def close(self) -> None:
        """Give it up."""
        self._run(self._steps.close)

    def __await__(self) -> Generator[Any, Any, R]:
        """Only a task has contexts of its own."""
        raise TypeError("it is for a task, and can't be awaited")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)


def has_left(before: Context) -> bool:
    """Whether something was left in the context here since it was copied; where nothing was, that is seen at once."""
    try:
        return copy_context() != before
    except Exception:  # noqa: BLE001 - the values are the user's, and so is their comparison
        return True


@types.coroutine
def restore_context(before: Context) -> Generator[_Switch, None, None]:
    """Go on in a copy of the context that was there before; only in a task of `InContexts`."""
    yield _Switch(before.copy())
