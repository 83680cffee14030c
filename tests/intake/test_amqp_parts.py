"""The parts of RabbitMQ's lane that decide without a broker."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pamqp.frame
import pamqp.header
import pytest
from pamqp import commands

from batchqueue_async.errors import AuthError, ConfigError, RetryableError
from batchqueue_async.intake.amqp.broker import Broker
from batchqueue_async.intake.amqp.delay_queues import delay_queue
from batchqueue_async.intake.amqp.delivery import AmqpDelivery
from batchqueue_async.intake.ports import Epoch


def delivery(*, redelivered: bool = False, **properties: Any) -> AmqpDelivery:
    header = pamqp.header.ContentHeader(0, 4, commands.Basic.Properties(**properties))
    raw = pamqp.frame.marshal(header, 1)[7:-1]
    where = {"exchange": "shop", "routing_key": "orders.new"}
    return AmqpDelivery(b"body", epoch=Epoch(), queue="orders", tag=7, redelivered=redelivered, raw=raw, **where)


class TestDelivery:
    def test_what_a_handler_sees(self) -> None:
        when = dt.datetime(2026, 11, 19, 12, 0, tzinfo=dt.UTC)
        headers = {"customer": "c-1", "amount": 3, "blob": bytearray(b"\xff")}
        message = delivery(headers=headers, message_id="m-1", timestamp=when)
        assert (message.body, message.key, message.id, message.source) == (b"body", "orders.new", "m-1", "orders")
        assert message.published_at == when.timestamp()
        assert message.headers == {"customer": "c-1", "amount": "3", "blob": "\ufffd"}
        assert message.exchange == "shop"
        assert message.size > 4

    def test_without_properties(self) -> None:
        message = delivery()
        assert (message.id, message.published_at, dict(message.headers)) == ("orders#7", None, {})

    @pytest.mark.parametrize(
        ("redelivered", "headers", "attempt"),
        [
            (False, None, 1),
            (True, None, 2),
            (False, {"other": "1"}, 1),
            (False, {"bq-attempt": 4}, 4),
            (True, {"bq-attempt": "4"}, 5),
            (True, {"x-delivery-count": 6}, 7),
            (True, {"bq-attempt": 3, "x-delivery-count": 2}, 5),
            (False, {"bq-attempt": "junk", "x-delivery-count": "junk"}, 1),
            (False, {"bq-attempt": -3}, 1),
        ],
    )
    def test_in_30_attempts_come_from_the_broker(
        self, redelivered: bool, headers: dict[str, Any] | None, attempt: int
    ) -> None:
        assert delivery(redelivered=redelivered, headers=headers).attempt == attempt

    def test_the_key_is_the_first_one_after_a_wait(self) -> None:
        assert delivery(headers={"bq-routing-key": "orders.first"}).key == "orders.first"

    def test_a_repr_shows_no_payload(self) -> None:
        assert "body" not in repr(delivery())


class TestDelayQueues:
    @pytest.mark.parametrize(
        ("delay", "seconds"), [(0, 1), (0.2, 1), (1, 1), (1.1, 2), (2, 2), (3, 4), (5.5, 8), (60, 64), (1e12, 2**21)]
    )
    def test_in_31_each_delay_has_its_queue(self, delay: float, seconds: int) -> None:
        queue = delay_queue("orders", delay)
        assert queue.name == f"orders.retry.{seconds}"
        assert queue.arguments["x-message-ttl"] == seconds * 1000
        assert queue.arguments["x-expires"] > queue.arguments["x-message-ttl"]
        assert queue.arguments["x-expires"] < 2**32
        assert queue.arguments["x-dead-letter-routing-key"] == "orders"


class TestBroker:
    @pytest.mark.parametrize("url", ["http://host/", "amqp://", "amqp:host", ""])
    def test_a_url_of_something_else(self, url: str) -> None:
        with pytest.raises(ConfigError, match="does not name a broker"):
            Broker(url)

    def test_no_secret_shows(self) -> None:
        broker = Broker("amqp://shop:s3cret@localhost/orders?x=1", password="t0ken")
        assert "s3cret" not in repr(broker) + broker.place
        with pytest.raises(ConfigError) as told:
            Broker("http://shop:s3cret@localhost")
        assert "s3cret" not in str(told.value)

    def test_tls_needs_its_scheme(self) -> None:
        with pytest.raises(ConfigError, match="amqps://"):
            Broker("amqp://localhost", tls=True)

    @pytest.mark.parametrize("heartbeat", [0, -1, 1.5, True, 100_000])
    def test_an_odd_heartbeat(self, heartbeat: Any) -> None:
        with pytest.raises(ConfigError, match="heartbeat="):
            Broker("amqp://localhost", heartbeat=heartbeat)

    async def test_a_missing_credential_is_named_when_it_connects(self) -> None:
        with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE"):
            await Broker("amqp://localhost:1", password="env:NOT_SET_ANYWHERE").connect(None)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("ProbableAuthenticationError", AuthError),
            ("ChannelAccessRefused", AuthError),
            ("ConnectionNotAllowed", AuthError),
            ("ConnectionInternalError", RetryableError),
            ("ChannelInvalidStateError", RetryableError),
        ],
    )
    def test_what_an_error_means(self, name: str, kind: type[Exception]) -> None:
        import aiormq.exceptions

        broker = Broker("amqp://localhost")
        told = broker.judge(getattr(aiormq.exceptions, name)("amqp://u:s3cret@h"))
        assert type(told) is kind
        assert "s3cret" not in str(told)

    def test_slowness_is_told_apart(self) -> None:
        told = Broker("amqp://localhost").judge(TimeoutError())
        assert isinstance(told, RetryableError)
        assert told.error_type == "timeout"
