"""Redis from Debian's packages."""

from __future__ import annotations

import socket

from .base import HOST, Server, apt_program


class RedisServer(Server):
    name = "redis"

    def prepare(self) -> None:
        self.program = apt_program("redis-server", "redis-server")

    def command(self) -> list[str]:
        options = f"--port {self.port} --bind {HOST} --dir {self.directory} --appendonly yes --appendfsync always"
        return [self.program, *options.split(), "--save", ""]

    def ready(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")  # an error while it reads its data
        except OSError:
            return False
