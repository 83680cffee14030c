"""What several sinks share: TLS, secrets, extras, records as rows, connections, threads. Not public."""

from __future__ import annotations
