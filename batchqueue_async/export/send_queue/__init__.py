"""Where records wait to be sent: in memory or on disk, with the same few calls."""

from __future__ import annotations
