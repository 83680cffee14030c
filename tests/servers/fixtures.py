"""The servers as fixtures: each is started once for the whole run, when the first test asks for it."""

from __future__ import annotations

import pytest

from servers import base
from servers.kafka import Kafka
from servers.postgres import Postgres


@pytest.fixture(scope="session")
def postgres():
    server = base.provide("PostgreSQL", Postgres)
    yield server
    server.dispose()


@pytest.fixture(scope="session")
def kafka():
    server = base.provide("Kafka", Kafka)
    yield server
    server.dispose()
