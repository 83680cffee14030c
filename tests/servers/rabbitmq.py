"""RabbitMQ from Debian's packages, with its own node name, ports and directories."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

from .base import HOST, Server, apt_program, free_port

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = "/usr/lib/rabbitmq/bin"


class RabbitServer(Server):
    name = "rabbitmq"
    start_timeout = 180.0

    def __init__(self, certificate: tuple[Path, Path] | None) -> None:
        super().__init__()
        self.certificate = certificate
        self.tls_port = free_port()

    def prepare(self) -> None:
        # Debian's command on the PATH wants to become the user rabbitmq; the one behind it does not care.
        apt_program("rabbitmq-server", "rabbitmq-server", "/usr/sbin")
        (self.directory / "enabled_plugins").write_text("[].")
        tls = ""
        if self.certificate is not None:
            tls = (
                f"listeners.ssl.1 = {HOST}:{self.tls_port}\nssl_options.verify = verify_none\n"
                f"ssl_options.certfile = {self.certificate[0]}\nssl_options.keyfile = {self.certificate[1]}\n"
                f"ssl_options.cacertfile = {self.certificate[0]}\n"
            )
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = {self.address}\nmax_message_size = 1000000\nloopback_users = none\n{tls}"
            "log.console = false\nlog.file.level = warning\nvm_memory_high_watermark.absolute = 512MB\n"
        )
        self.epmd_port, self.distribution_port = free_port(), free_port()

    def environment(self) -> dict[str, str]:
        here = self.directory
        return {
            "HOME": str(here),  # the cookie is kept there
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": f"batchqueue-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.distribution_port),
            "RABBITMQ_MNESIA_BASE": str(here / "mnesia"),
            "RABBITMQ_LOG_BASE": str(here / "log"),
            "RABBITMQ_CONFIG_FILE": str(here / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(here / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(here / "rabbitmq.pid"),
            "RABBITMQ_CONF_ENV_FILE": str(here / "none"),
        }

    def command(self) -> list[str]:
        return [f"{PROGRAMS}/rabbitmq-server"]

    def ctl(self, *arguments: str) -> str:
        return self.run(f"{PROGRAMS}/rabbitmqctl", "--quiet", *arguments)

    def dispose(self) -> None:
        self.stop()
        # The port mapper outlives its nodes; this one is ours alone.
        with suppress(OSError, subprocess.SubprocessError, AttributeError):
            subprocess.run(
                ["epmd", "-port", str(self.epmd_port), "-kill"],
                env=os.environ | {"ERL_EPMD_ADDRESS": HOST},
                capture_output=True,
                timeout=20,
                check=False,
            )
        super().dispose()
