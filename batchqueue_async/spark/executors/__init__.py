"""Rows written by the executors: the data source, its options, and what each Python worker does."""

from __future__ import annotations
