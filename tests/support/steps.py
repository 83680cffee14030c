"""How much a step of the event loop does: the calls of functions between two turns, the same on whatever machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType

# 5 ms of Python, at the slowest that calls were seen to run.
STEP_LIMIT = 25_000


class Steps:
    """Counts while it is entered; `most` is the longest step."""

    def __init__(self) -> None:
        self.most = self.count = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_run" and frame.f_code.co_filename.endswith("events.py"):
            self.count = 0
        elif event in ("call", "c_call"):
            self.count += 1
            self.most = max(self.most, self.count)
