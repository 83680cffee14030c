"""The servers as fixtures: each is started once for the whole run, when the first test asks for it."""

from __future__ import annotations
