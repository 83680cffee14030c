"""Pipelines of Structured Streaming from a file: sources, views in SQL or functions, outputs, and the run of them."""

from __future__ import annotations
