"""A real HTTP server with faults on demand: uvicorn in a process of its own."""

from __future__ import annotations

import base64
import json
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

from .base import Server


class Request(NamedTuple):
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


class HttpServer(Server):
    name = "http"
    stop_timeout = 2.0  # a test may leave an answer behind that takes a minute

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        super().__init__()
        self.certificate = certificate

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://{self.address}"

    def command(self) -> list[str]:
        options = [
            f"--port={self.port}",
            "--host=127.0.0.1",
            "--log-level=warning",
            f"--app-dir={Path(__file__).parents[1]}",
        ]
        if self.certificate:
            options += [f"--ssl-certfile={self.certificate[0]}", f"--ssl-keyfile={self.certificate[1]}"]
        return [sys.executable, "-m", "uvicorn", "servers.http_app:app", *options]

    # -- what tests say and ask; plain HTTP only -----------------------------------------------------------------

    def reset(self) -> None:
        self._ask("_reset", {})

    def script(self, *answers: dict) -> None:
        self._ask("_script", answers)

    def rules(self, **rules: object) -> None:
        self._ask("_rules", rules)

    def received(self) -> list[Request]:
        found = self._ask("_received", None)
        return [Request(each["path"], each["query"], each["headers"], base64.b64decode(each["body"])) for each in found]

    def _ask(self, path: str, content: object):
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"http://{self.address}/{path}", data=data)
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
