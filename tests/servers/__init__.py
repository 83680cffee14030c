"""Real servers for tests: each a process on loopback with its data in a temporary directory."""

from __future__ import annotations
