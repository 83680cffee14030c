"""Where batches end: each sink in a module of its own, imported by its name, so that extras stay optional."""

from __future__ import annotations
