"""A NATS server with JetStream, from Debian's packages."""

from __future__ import annotations

from .base import HOST, Server, apt_program


class NatsServer(Server):
    name = "nats"

    def prepare(self) -> None:
        self.program = apt_program("nats-server", "nats-server", "/usr/sbin")

    def command(self) -> list[str]:
        return [
            self.program,
            "-a",
            HOST,
            "-p",
            str(self.port),
            "-js",
            "-sd",
            str(self.directory / "store"),
            *self.login,
        ]

    login: tuple[str, ...] = ()
    """More options, such as --user and --pass."""
