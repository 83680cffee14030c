"""The door for threads and other event loops: items in bulk, one wake-up for many of them."""

from __future__ import annotations
