"""Redis from Debian's packages."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from .base import HOST, Server, apt_program

if TYPE_CHECKING:
    from pathlib import Path


class RedisServer(Server):
    name = "redis"

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        super().__init__()
        self.certificate = certificate

    def prepare(self) -> None:
        self.program = apt_program("redis-server", "redis-server")

    def command(self) -> list[str]:
        options = f"--port {self.port} --bind {HOST} --dir {self.directory} --appendonly yes --appendfsync always"
        if self.certificate:
            cert, key = self.certificate
            options = options.replace("--port", "--port 0 --tls-port")
            options += f" --tls-cert-file {cert} --tls-key-file {key} --tls-auth-clients no"
        return [self.program, *options.split(), "--save", ""]

    def ready(self) -> bool:
        if self.certificate:
            return super().ready()
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")  # an error while it reads its data
        except OSError:
            return False
