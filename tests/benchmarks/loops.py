"""The event loops that every row is measured on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

try:
    import uvloop
except ImportError:  # not made for Windows
    uvloop = None

if TYPE_CHECKING:
    from collections.abc import Callable

LOOP_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
if uvloop is not None:
    LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop} | LOOP_FACTORIES
