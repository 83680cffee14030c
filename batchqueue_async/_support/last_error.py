"""The last error of a part, kept for whoever looks: what it was, where it came from, when, and how many there were."""

from __future__ import annotations

import time
from dataclasses import dataclass

from batchqueue_async._support.log import place_of
from batchqueue_async._support.redaction import without_payload


@dataclass(frozen=True, slots=True)
class LastError:
    """The newest error of a part.

    Example:
        >>> LastError(error="OSError", where="sink.py:12 in send", text="no route to host", at=0.0, count=3).count
        3

    Attributes:
        error: the class of the error.
        where: the place in the code that raised it.
        text: its text without what could be payload: quoted stretches, numbers and names are hidden.
        at: when, in seconds since the epoch.
        count: how many errors there have been, this one included.
    """

    error: str
    where: str
    text: str
    at: float
    count: int


class ErrorKeeper:
    """Keeps the newest error; `seen` is called per failed batch, `last` from any thread.

    Example:
        >>> keeper = ErrorKeeper()
        >>> keeper.last() is None
        True
        >>> keeper.seen(ValueError("no room for 'a'"))
        >>> keeper.last().text
        'no room for ***'
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        # One tuple, replaced as a whole: a reader on another thread never sees half of an error.
        self._last: tuple[str, str, str, float, int] | None = None

    def seen(self, error: BaseException) -> None:
        """Note an error. The error itself is not kept: its frames would keep the batch alive."""
        count = 1 if self._last is None else self._last[4] + 1
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - the error's class is the user's, and its text is not worth a fault here
            text = ""
        self._last = (type(error).__qualname__, place_of(error), without_payload(text), time.time(), count)

    def last(self) -> LastError | None:
        """The newest error, or None."""
        return None if self._last is None else LastError(*self._last)
