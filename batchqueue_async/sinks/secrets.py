"""Public path of credentials; they live in `sinks._shared.secrets`."""

from __future__ import annotations

from batchqueue_async.sinks._shared.secrets import Secret, redacted, resolve

__all__ = ["Secret", "redacted", "resolve"]
