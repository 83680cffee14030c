"""Whether, when and how much may be sent: breaker, send gate, backoff, concurrency. Pure decisions."""

from __future__ import annotations
