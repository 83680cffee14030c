"""What every part leans on: log events, forks, field rules. Not public."""

from __future__ import annotations
