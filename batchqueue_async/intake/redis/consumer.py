"""A consumer of a Redis stream. Needs `[redis]`."""

from __future__ import annotations

import os
import socket
import uuid
from typing import TYPE_CHECKING, Any, Unpack

from batchqueue_async.errors import AuthError, ConfigError
from batchqueue_async.intake.config import IntakeConfig, IntakeOptions
from batchqueue_async.intake.consumer import Consumer
from batchqueue_async.intake.redis.message import RedisFields
from batchqueue_async.intake.redis.session import RedisSession
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.redis_client import RedisServer, end

if TYPE_CHECKING:
    from batchqueue_async.intake.ports import Lane, Plan, Retries
    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption


class RedisConsumer(Consumer):
    """Handles the entries of a Redis stream as one consumer of a group, and acknowledges each after its outcome.

    Entries that were delivered and not acknowledged are handled first: our own, by the consumer's name, and, once they
    have been idle for `claim_after`, those of consumers that are gone. What was trimmed away while it was pending is
    counted in `stats().lost` and logged.

    Example:
        >>> async def save(message) -> None: ...
        >>> RedisConsumer("redis://localhost", "orders", save, group="billing", dead_letters="orders.dead")
        RedisConsumer('orders/billing', new)
    """

    def __init__(
        self,
        url: str,
        stream: str,
        handler: Any,
        *,
        group: str,
        consumer: str | None = None,
        start: str = "0",
        field: str = "data",
        key_field: str = "bq-key",
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        tls: TlsOption = None,
        block: float = 2.0,
        claim_after: float = 60.0,
        timeout: float = 10.0,
        name: str | None = None,
        **options: Unpack[IntakeOptions],
    ) -> None:
        """Say where messages come from, and what handles them.

        Args:
            url: `redis://host:port/db`, `rediss://` for TLS, or `unix:///path`.
            stream: the stream.
            handler: takes a message, or a batch of them; or a `BatchQueue`, or an `Exporter`.
            group: the group, which is made where it is missing.
            consumer: our name in the group, unique among those that run; with a name that stays the same, a restart
                goes on with its own pending entries at once. None makes a new one, which a stop takes out of the group
                again if nothing of it is pending.
            start: where a new group begins: "0" with the stream's first entry, "$" with the next one.
            field: the field with the body; the others are headers.
            key_field: the field with the key.
            user: `env:NAME`, `file:/path` or the value; also in the URL.
            password: likewise.
            tls: for `rediss`: a `Tls`; without, certificates are verified against the system's.
            block: seconds that a read waits at the server.
            claim_after: seconds without a sign of life after which entries of other consumers are taken over; 0 leaves
                them.
            timeout: seconds for an answer.
            name: for logs and metrics; stream and group when None.
            options: those of every consumer; see `IntakeConfig`.
        """
        for what, value in (("block", block), ("timeout", timeout)):
            if value <= 0:
                raise ConfigError(f"RedisConsumer: {what}={value} is not above 0; give seconds")
        if claim_after < 0:
            raise ConfigError(f"RedisConsumer: claim_after={claim_after} is below 0; give seconds, or 0 for never")
        for what, text in (("stream", stream), ("group", group), ("field", field), ("key_field", key_field)):
            if not text:
                raise ConfigError(f"RedisConsumer: {what} is empty; give a name")
        self.server = RedisServer("RedisConsumer", url, user=user, password=password, tls=tls)
        self.stream = stream
        self.group = group
        self._named = consumer is not None
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.start = start
        self.fields = RedisFields(stream, field, key_field)
        self.block = block
        self.claim_after = claim_after
        self.timeout = timeout
        super().__init__(handler, IntakeConfig(**options), name=name or f"{stream}/{group}")

    def _lane(self, plan: Plan) -> Lane:
        return RedisLane(self, plan)

    @property
    def named(self) -> bool:
        """Whether our name in the group was given, and may be had again."""
        return self._named

    def count_lost(self, count: int) -> None:
        """Entries that the stream has no longer, though they were pending."""
        self._counts.lost += count


class RedisLane:
    """The way to one group of one stream."""

    retries: Retries = "kept"
    counts_held = False

    def __init__(self, consumer: RedisConsumer, plan: Plan) -> None:
        self._consumer = consumer
        self._plan = plan

    async def connect(self) -> RedisSession:
        """Connect twice, make the group where it is missing, and begin with what is pending."""
        consumer = self._consumer
        options = {"socket_connect_timeout": consumer.config.connect_timeout}
        reader = consumer.server.client(
            socket_timeout=consumer.block + consumer.timeout, single_connection_client=True, **options
        )
        writer = consumer.server.client(socket_timeout=consumer.timeout, max_connections=4, **options)
        try:
            await self._make_group(writer)
            session = RedisSession(
                reader,
                writer,
                self._plan,
                fields=consumer.fields,
                group=consumer.group,
                consumer=consumer.consumer,
                block=consumer.block,
                claim_after=consumer.claim_after,
                lost=consumer.count_lost,
                leaves=not consumer.named,
            )
            await session.start()
        except BaseException as error:
            await end(reader, writer)
            if isinstance(error, Exception):
                raise self._meaning(error) from None
            raise
        return session

    async def _make_group(self, client: Any) -> None:
        consumer = self._consumer
        known = require("redis.exceptions", "redis")
        try:
            await client.xgroup_create(consumer.stream, consumer.group, id=consumer.start, mkstream=True)
        except known.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _meaning(self, error: Exception) -> Exception:
        known = require("redis.exceptions", "redis")
        where = f"Redis at {self._consumer.server.shown}"
        if isinstance(error, known.AuthenticationError | known.NoPermissionError | known.AuthorizationError):
            return AuthError(f"{where} refuses us; check user, password and permissions")
        text = str(error)
        if isinstance(error, known.ResponseError) and text.startswith("WRONGTYPE"):
            return ConfigError(f"{where}: {self._consumer.stream!r} is not a stream; give one that is")
        return error
