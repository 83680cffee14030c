"""Cancellations that somebody asked for, told from those that come out of a client whose own futures were cancelled."""

from __future__ import annotations

import asyncio
from typing import Final

ENDS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends the program, or the coroutine that runs.

Anything else that a user's function raises is its message's error, though it be no `Exception`, as the panics of
compiled libraries are not.
"""


def asked_for(error: BaseException) -> bool:
    """Whether an error is the cancellation of the task that runs, which somebody has asked for.

    Clients cancel their own futures when a connection goes, and whoever waits for one gets a `CancelledError`. In a
    task that nobody has cancelled it is an error like any other: to pass it on would end the task without a word.

    Example:
        >>> async def main() -> bool:
        ...     lost = asyncio.get_running_loop().create_future()
        ...     lost.cancel()
        ...     try:
        ...         await lost
        ...     except asyncio.CancelledError as error:
        ...         return asked_for(error)
        >>> asyncio.run(main())
        False
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
