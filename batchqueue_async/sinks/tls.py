"""Public path of TLS for sinks; it lives in `sinks._shared.tls`."""

from __future__ import annotations

from batchqueue_async.sinks._shared.tls import Tls, TlsOption

__all__ = ["Tls", "TlsOption"]
