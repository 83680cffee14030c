"""What the durable queue knows and decides. Never awaits, does no I/O."""

from __future__ import annotations
