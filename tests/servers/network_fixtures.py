"""More servers as fixtures: those of the HTTP, gRPC and message broker sinks."""

from __future__ import annotations

import subprocess

import pytest

from .base import provide
from .clickhouse import ClickHouseEngine, ClickHouseServer
from .collector import CollectorServer
from .grpc import GrpcServer
from .http import HttpServer
from .nats import NatsServer
from .opensearch import OpenSearch
from .prometheus import PrometheusServer
from .rabbitmq import RabbitServer
from .redis import RedisServer


def started(name, make):
    server = provide(name, make)
    yield server
    server.dispose()


@pytest.fixture(scope="session")
def http_process():
    yield from started("http", HttpServer)


@pytest.fixture
def http_server(http_process):
    running(http_process).reset()
    return http_process


@pytest.fixture(scope="session")
def grpc_process():
    yield from started("grpc", GrpcServer)


@pytest.fixture
def grpc_server(grpc_process):
    running(grpc_process).reset()
    return grpc_process


def running(server):
    if not server.running:  # a test may have killed it
        server.start()
    return server


@pytest.fixture(scope="session")
def redis_process():
    yield from started("redis", RedisServer)


@pytest.fixture
def redis_server(redis_process):
    return running(redis_process)


@pytest.fixture(scope="session")
def nats_process():
    yield from started("nats", NatsServer)


@pytest.fixture
def nats_server(nats_process):
    return running(nats_process)


@pytest.fixture(scope="session")
def rabbit_process(certificate_files):
    yield from started("rabbitmq", lambda: RabbitServer(certificate_files))


@pytest.fixture
def rabbit_server(rabbit_process):
    return running(rabbit_process)


@pytest.fixture(scope="session")
def collector(grpc_process):
    """A Collector that passes on to the gRPC server."""
    yield from started("otelcol", lambda: CollectorServer(grpc_process.address))


@pytest.fixture(scope="session")
def prometheus():
    yield from started("prometheus", PrometheusServer)


@pytest.fixture(scope="session")
def clickhouse_server():
    """Debian's, of 2018."""
    yield from started("ClickHouse", ClickHouseServer)


@pytest.fixture(scope="session")
def clickhouse():
    """The current engine."""
    yield from started("chDB", ClickHouseEngine)


@pytest.fixture(scope="session")
def opensearch_process():
    yield from started("OpenSearch", OpenSearch)


@pytest.fixture
def opensearch(opensearch_process):
    return running(opensearch_process)


@pytest.fixture(scope="session")
def certificate_files(tmp_path_factory):
    """A certificate for 127.0.0.1 and localhost that nobody trusts by itself, and its key."""
    directory = tmp_path_factory.mktemp("certificate")
    cert, key = directory / "cert.pem", directory / "key.pem"
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    options = f"-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext {names} -keyout {key}"
    subprocess.run(["openssl", "req", *options.split(), "-out", cert], check=True, capture_output=True)
    return cert, key
