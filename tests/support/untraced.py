"""No tracer where a test interrupts: it would never give back a lock that it holds at an interrupted call.

Nor where one does the same thousands of times (the marker `untraced`): the coverage's tracer takes most of that time.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Turn this thread's tracer off meanwhile."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracer)
