"""From `put` to the disk: gathering, group commit, and the writer on its thread."""

from __future__ import annotations
