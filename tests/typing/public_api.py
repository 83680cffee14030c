"""Type-only uses of the public API: checked by mypy and pyright, never run."""

from __future__ import annotations
