"""PostgreSQL from Debian's packages, with a cluster of its own."""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path

from . import base


class Postgres(base.Server):
    """A server with one database and one user, who needs the password, and a superuser who comes over the socket."""

    name = "postgres"
    stop_signal = signal.SIGINT  # PostgreSQL's fast shutdown: it does not wait for its clients

    def __init__(self) -> None:
        super().__init__()
        # initdb and postgres refuse root; Debian's package brings the user along.
        self.user = "postgres" if os.geteuid() == 0 else None
        self.password = secrets.token_hex(8)
        self.data = self.directory / "data"
        self.bin: Path

    @property
    def dsn(self) -> str:
        return self.dsn_at(self.port)

    def dsn_at(self, port: int, password: str | None = None) -> str:
        return f"postgresql://tester:{password or self.password}@{base.HOST}:{port}/tests"

    def start(self) -> None:
        if not self._prepared:
            # Before anything is done as its user, who may come with the package.
            places = "/usr/lib/postgresql/*/bin"
            self.bin = Path(base.apt_program("initdb", "postgresql", places)).resolve().parent
        super().start()

    def prepare(self) -> None:
        secret = self.directory / "password"
        secret.write_text(self.password)
        base.give(secret, "postgres")
        self.run(
            *(str(self.bin / "initdb"), "-D", str(self.data), "-U", "tester", "--pwfile", str(secret)),
            *("--auth-host=scram-sha-256", "--auth-local=trust", "-E", "UTF8", "--locale=C", "--no-sync"),
        )
        secret.unlink()
        with (self.data / "postgresql.conf").open("a") as config:
            config.write(
                f"listen_addresses = '{base.HOST}'\nport = {self.port}\nunix_socket_directories = '{self.directory}'\n"
                "shared_buffers = 32MB\nmax_connections = 60\nmax_prepared_transactions = 0\n"
            )

    def command(self) -> list[str]:
        return [str(self.bin / "postgres"), "-D", str(self.data)]

    def ready(self) -> bool:
        try:
            self.sql("SELECT 1", database="postgres")
        except RuntimeError:
            return False
        if "tests" not in self.sql("SELECT datname FROM pg_database", database="postgres"):
            self.sql("CREATE DATABASE tests", database="postgres")
        return True

    def sql(self, statement: str, database: str = "tests") -> list[str]:
        """Run SQL through psql, which the sink has no part in; the lines of the answer."""
        psql = str(self.bin / "psql")
        options = ("-h", str(self.directory), "-p", str(self.port), "-U", "tester", "-d", database)
        return self.run(psql, "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", *options, "-c", statement).splitlines()
