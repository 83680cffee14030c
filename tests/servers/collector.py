"""An OpenTelemetry Collector that passes on what it is sent, built by Go from `otelcol/`.

`otelcol/` is what the Collector's builder makes of `builder.yaml`, with the checksums of all modules:
`go run go.opentelemetry.io/collector/cmd/builder@v0.145.0 --config=builder.yaml --skip-compilation`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from .base import CACHE, Server, UnavailableError, free_port, lock

SOURCES = Path(__file__).with_name("otelcol")

CONFIG = """
receivers: {{otlp: {{protocols: {{grpc: {{endpoint: "{address}"}}, http: {{endpoint: "{http_address}"}}}}}}}}
exporters:
  otlp:
    endpoint: "{target}"
    tls: {{insecure: true}}
    sending_queue: {{enabled: false}}
    retry_on_failure: {{enabled: false}}
service:
  telemetry: {{metrics: {{level: none}}, logs: {{level: warn}}}}
  pipelines:
    traces: {{receivers: [otlp], exporters: [otlp]}}
    metrics: {{receivers: [otlp], exporters: [otlp]}}
    logs: {{receivers: [otlp], exporters: [otlp]}}
"""


class CollectorServer(Server):
    name = "otelcol"

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        self.http_address = f"127.0.0.1:{free_port()}"

    def prepare(self) -> None:
        self.program = built()
        (self.directory / "config.yaml").write_text(
            CONFIG.format(address=self.address, http_address=self.http_address, target=self.target)
        )

    def command(self) -> list[str]:
        return [str(self.program), f"--config=file:{self.directory}/config.yaml"]


def built() -> Path:
    """The Collector, built once for each state of the sources."""
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))).hexdigest()[:16]
    program = CACHE / f"otelcol-{state}"
    with lock("otelcol"):
        if not program.exists():
            go = shutil.which("go")
            if go is None:
                raise UnavailableError("the OpenTelemetry Collector is built with Go, and there is no go here")
            making = program.with_suffix(".new")
            command = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", str(making), "."]
            done = subprocess.run(
                command, cwd=SOURCES, capture_output=True, text=True, timeout=540, check=False, env=os.environ
            )
            if done.returncode:
                raise UnavailableError(f"go build of the OpenTelemetry Collector fails: {done.stderr[-300:]}")
            making.rename(program)
    return program
