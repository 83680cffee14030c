"""The benchmarks: `make bench`, or `python -m tests.benchmarks --help`."""

from __future__ import annotations
