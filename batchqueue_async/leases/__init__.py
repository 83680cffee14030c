"""Leases: records on loan to a consumer, and the order by key. Pure; shared by the durable queue and the exporter."""

from __future__ import annotations
