"""From the send queue to the sink: taking batches, sending them, and settling each record."""

from __future__ import annotations
