"""The bytes and files of a durable queue: format, segments, recovery, inspection."""

from __future__ import annotations
