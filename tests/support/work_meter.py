"""How much work something is, counted and not timed: the lines of the package that run.

A ratio of two such counts says how work grows with the size of a task, on any machine and under any load. What C code
does by itself (to copy a list, say) is not seen: look at the bench rows for that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import batchqueue_async

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Self

PACKAGE = str(Path(batchqueue_async.__file__).parent)


class Meter:
    """Counts the package's lines that run inside the `with` block, on this thread."""

    def __init__(self) -> None:
        self.lines = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.lines += 1
        return self._line


def lines_of(call: Callable[[], object]) -> int:
    """The lines of the package that a call runs."""
    with Meter() as meter:
        call()
    return meter.lines
