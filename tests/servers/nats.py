"""A NATS server with JetStream, from Debian's packages."""

from __future__ import annotations

from .base import HOST, Server, apt_program


class NatsServer(Server):
    name = "nats"

    def __init__(self, *options: str) -> None:
        super().__init__()
        self.options = options

    def prepare(self) -> None:
        self.program = apt_program("nats-server", "nats-server", "/usr/sbin")

    def command(self) -> list[str]:
        store = str(self.directory / "store")
        return [self.program, "-a", HOST, "-p", str(self.port), "-js", "-sd", store, *self.options]
