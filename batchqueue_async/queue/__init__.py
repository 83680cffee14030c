"""The in-memory queue, a module for each station of an item's way: selector, partition, drain, dispatch."""

from __future__ import annotations
