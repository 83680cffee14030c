"""What every measuring process is set up with: the event loops, and quiet logs."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import structlog

try:
    import uvloop
except ImportError:  # not made for Windows
    uvloop = None

if TYPE_CHECKING:
    from collections.abc import Callable

LOOP_FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
if uvloop is not None:
    LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop} | LOOP_FACTORIES


def quiet_logs() -> None:
    """Drop log events below errors, as a service does with the debug ones; printing them is not what is measured."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
