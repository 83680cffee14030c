"""Event loops with a name, the manager that owns them and the queues, and the ways in from elsewhere."""

from __future__ import annotations
