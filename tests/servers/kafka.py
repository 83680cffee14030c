"""Apache Kafka in KRaft mode: one node, broker and controller, its jars resolved with Maven."""

from __future__ import annotations

import base64
import subprocess
import uuid
from typing import TYPE_CHECKING

from . import base
from .maven import jars, java

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "4.3.1"

LOGIN = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'username="admin" password="admin-secret" user_tester="right-password";'
)

LOG4J = """<?xml version="1.0"?>
<Configuration status="ERROR">
  <Appenders><Console name="out"><PatternLayout pattern="%d %p %c %m%n"/></Console></Appenders>
  <Loggers><Root level="WARN"><AppenderRef ref="out"/></Root></Loggers>
</Configuration>
"""


class Kafka(base.Server):
    """A broker for PLAINTEXT at `address`, SASL/PLAIN at `sasl_address`, and over TLS at `tls_address`.

    Topics are made on demand, with 3 partitions.
    """

    name = "kafka"
    start_timeout = 180.0

    def __init__(self) -> None:
        super().__init__()
        self.sasl_port = base.free_port()
        self.tls_port = base.free_port()
        self.proxied_port = base.free_port()
        self.controller_port = base.free_port()
        self.proxy_port = base.free_port()
        self.java: str
        self.jars: Path

    @property
    def sasl_address(self) -> str:
        return f"{base.HOST}:{self.sasl_port}"

    @property
    def tls_address(self) -> str:
        return f"{base.HOST}:{self.tls_port}"

    @property
    def certificate(self) -> Path:
        """What `tls_address` shows, which nobody trusts by itself."""
        return self.directory / "cert.pem"

    @property
    def proxied_address(self) -> str:
        """A listener that says of itself to be at `proxy_port`, where a proxy is to stand before it."""
        return f"{base.HOST}:{self.proxied_port}"

    def prepare(self) -> None:
        self.java = java()
        self.jars = jars("org.apache.kafka", "kafka_2.13", VERSION, name="kafka")
        self._make_certificate()
        self.write_configuration()
        (self.directory / "log4j2.xml").write_text(LOG4J)
        config = str(self.directory / "server.properties")
        self.run(*self._java(), "kafka.tools.StorageTool", "format", "-t", _cluster_id(), "-c", config)

    def _make_certificate(self) -> None:
        key = self.directory / "key.pem"
        names = f"subjectAltName=IP:{base.HOST},DNS:localhost"
        options = f"-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext {names} -keyout {key}"
        command = ["openssl", "req", *options.split(), "-out", str(self.certificate)]
        subprocess.run(command, check=True, capture_output=True)
        (self.directory / "keystore.pem").write_bytes(key.read_bytes() + self.certificate.read_bytes())

    def write_configuration(self) -> None:
        """Write server.properties."""
        listeners = {"PLAINTEXT": self.port, "SASL": self.sasl_port, "TLS": self.tls_port, "PROXIED": self.proxied_port}
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{base.HOST}:{self.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": _listeners(listeners | {"CONTROLLER": self.controller_port}),
            "advertised.listeners": _listeners(listeners | {"PROXIED": self.proxy_port}),
            "listener.security.protocol.map": (
                "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,SASL:SASL_PLAINTEXT,TLS:SASL_SSL"
            ),
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl.plain.sasl.jaas.config": LOGIN,
            "listener.name.tls.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.tls.plain.sasl.jaas.config": LOGIN,
            "listener.name.tls.ssl.keystore.type": "PEM",
            "listener.name.tls.ssl.keystore.location": self.directory / "keystore.pem",
            "log.dirs": self.directory / "data",
            "num.partitions": 3,
            "auto.create.topics.enable": "true",
            "offsets.topic.num.partitions": 1,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            # A killed broker may come back when its old session is over.
            "broker.session.timeout.ms": 2_000,
            "broker.heartbeat.interval.ms": 500,
            "group.initial.rebalance.delay.ms": 0,
            "group.min.session.timeout.ms": 1_000,
            # Compaction within a test's time.
            "log.cleaner.backoff.ms": 250,
            "num.network.threads": 2,
            "num.io.threads": 4,
            "log.cleaner.dedupe.buffer.size": 4_194_304,
            "log.cleaner.threads": 1,
        }
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self.directory / "server.properties").write_text(text)

    def command(self) -> list[str]:
        return [*self._java(), "kafka.Kafka", str(self.directory / "server.properties")]

    def ready(self) -> bool:
        return all(map(base.can_connect, (self.port, self.sasl_port, self.tls_port, self.proxied_port)))

    def set_quota(self, client_id: str, rate: int | None) -> None:
        """Let clients of a name produce so many bytes a second; None sets no limit."""
        change = (
            ["--delete-config", "producer_byte_rate"]
            if rate is None
            else ["--add-config", f"producer_byte_rate={rate}"]
        )
        whom = ["--entity-type", "clients", "--entity-name", client_id]
        command = ["kafka.admin.ConfigCommand", "--bootstrap-server", self.address, "--alter"]
        self.run(*self._java(), *command, *whom, *change)

    def _java(self) -> list[str]:
        options = ["-Xmx384m", "-Xms128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        log4j = f"-Dlog4j2.configurationFile={self.directory / 'log4j2.xml'}"
        return [self.java, *options, log4j, "-cp", f"{self.jars}/*"]


def _listeners(ports: dict[str, int]) -> str:
    return ",".join(f"{name}://{base.HOST}:{port}" for name, port in ports.items())


def _cluster_id() -> str:
    # With a zero bit in front it cannot begin with "-", which the tool would take for an option.
    return base64.urlsafe_b64encode((uuid.uuid4().int >> 1).to_bytes(16, "big")).rstrip(b"=").decode()
