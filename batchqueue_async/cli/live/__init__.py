"""Commands that ask running processes: how they are, why, and what they do now."""

from __future__ import annotations
