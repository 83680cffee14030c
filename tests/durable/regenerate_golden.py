"""Writes the golden files anew: only together with a new format number."""

from __future__ import annotations

from test_format import GOLDEN, HEADER_1, golden_hint, golden_segment

GOLDEN.mkdir(parents=True, exist_ok=True)
(GOLDEN / "segment.bqs").write_bytes(golden_segment(HEADER_1))
(GOLDEN / "segment-2.bqs").write_bytes(golden_segment())
(GOLDEN / "hint.ack").write_bytes(golden_hint())
