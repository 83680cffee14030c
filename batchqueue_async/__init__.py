"""An asyncio-native batch queue framework."""

from __future__ import annotations
