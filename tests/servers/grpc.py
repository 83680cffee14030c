"""A real gRPC server with faults on demand: grpc.aio in a process of its own."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import NamedTuple

import grpc

from .base import Server


class Call(NamedTuple):
    metadata: dict[str, str]
    content: bytes


class GrpcServer(Server):
    name = "grpc"

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        super().__init__()
        self.certificate = certificate

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://{self.address}"

    def command(self) -> list[str]:
        program = Path(__file__).with_name("grpc_program.py")
        # -P: the program's directory has modules with the names of the clients
        return [sys.executable, "-P", str(program), self.address, *map(str, self.certificate or ())]

    # -- what tests say and ask; without TLS only ----------------------------------------------------------------

    def reset(self) -> None:
        self._ask("Reset", {})

    def script(self, *answers: dict) -> None:
        self._ask("Script", answers)

    def rules(self, **rules: object) -> None:
        self._ask("Rules", rules)

    def received(self) -> list[Call]:
        return [Call(each["metadata"], base64.b64decode(each["content"])) for each in self._ask("Received", {})]

    def _ask(self, method: str, content: object):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(self.address, options=options) as channel:
            call = channel.unary_unary(f"/test.Control/{method}")
            return json.loads(call(json.dumps(content).encode(), timeout=10, wait_for_ready=True))
