"""From the disk to consumers: leases, the reads that feed them, dead letters."""

from __future__ import annotations
