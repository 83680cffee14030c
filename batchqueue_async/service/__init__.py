"""A service from one YAML file: sources, queues, exporters and sinks by name, checked whole and run.

file, environment, --set -> layers -> shapes -> ServiceSpec -> Builder -> Service
"""

from __future__ import annotations

from batchqueue_async.service.app import App
from batchqueue_async.service.file.reading import read_service
from batchqueue_async.service.file.spec import ServiceSpec
from batchqueue_async.service.running import Service, ServiceReport

__all__ = ["App", "Service", "ServiceReport", "ServiceSpec", "read_service"]
