"""A consumer of a NATS JetStream stream. Needs `[nats]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from batchqueue_async._support import log
from batchqueue_async.errors import AuthError, ConfigError, RetryableError
from batchqueue_async.intake.config import IntakeConfig, IntakeOptions
from batchqueue_async.intake.consumer import Consumer
from batchqueue_async.intake.nats.session import NatsSession
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.nats_client import NatsServers

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from batchqueue_async.intake.ports import Lane, Plan, Retries
    from batchqueue_async.sinks._shared.secrets import Secret
    from batchqueue_async.sinks._shared.tls import TlsOption

_NOT_FOUND = 404


class NatsConsumer(Consumer):
    """Handles the messages of a JetStream stream by a pool of workers, and acknowledges each after its outcome.

    The durable consumer is made if it is not there, with explicit acknowledgements and without a limit of deliveries:
    attempts are counted here, by the server's own count, and end in the dead letters. Messages that wait or are being
    handled are reported as in progress, so that `ack_wait` is about this process, not about its queue.

    Example:
        >>> async def save(message) -> None: ...
        >>> NatsConsumer("nats://localhost", "orders.>", save, stream="ORDERS", durable="billing", dead_letters="dead")
        NatsConsumer('ORDERS/billing', new)
    """

    def __init__(
        self,
        url: str | Sequence[str],
        subject: str,
        handler: Any,
        *,
        stream: str,
        durable: str,
        user: str | Secret | None = None,
        password: str | Secret | None = None,
        token: str | Secret | None = None,
        credentials: str | os.PathLike[str] | None = None,
        tls: TlsOption = None,
        ack_wait: float = 30.0,
        heartbeat: float = 5.0,
        expires: float = 30.0,
        name: str | None = None,
        **options: Unpack[IntakeOptions],
    ) -> None:
        """Say where messages come from, and what handles them.

        Args:
            url: `nats://host:port`, or `tls://`; several for a cluster.
            subject: which messages of the stream: the consumer's filter.
            handler: takes a message, or a batch of them; or a `BatchQueue`, or an `Exporter`.
            stream: the stream.
            durable: the consumer's name there: those of one name share its messages.
            user: `env:NAME`, `file:/path` or the value.
            password: likewise.
            token: likewise.
            credentials: a file with a JWT and its seed.
            tls: True, a `Tls` or an SSL context; None is TLS where the URL or the server says so, verified.
            ack_wait: seconds after which the server delivers again what a process that is gone has held.
            heartbeat: seconds between signs of life that the server is asked for; three missed ones end the session.
            expires: seconds after which a pull is made anew.
            name: for logs and metrics; stream and durable when None.
            options: those of every consumer; see `IntakeConfig`.
        """
        for what, value in (("ack_wait", ack_wait), ("heartbeat", heartbeat), ("expires", expires)):
            if value <= 0:
                raise ConfigError(f"NatsConsumer: {what}={value} is not above 0; give seconds")
        if expires < 2 * heartbeat:
            raise ConfigError(
                f"NatsConsumer: expires={expires} is below twice heartbeat={heartbeat}, which no server takes; raise it"
            )
        for what, text in (("stream", stream), ("durable", durable)):
            if not text or set(text) & set(" .*>\t\r\n/\\"):
                raise ConfigError(
                    f"NatsConsumer: {what}={text!r} is not a name of JetStream; leave out dots and blanks"
                )
        config = IntakeConfig(**options)
        self.servers = NatsServers(
            "NatsConsumer",
            url,
            user=user,
            password=password,
            token=token,
            credentials=credentials,
            tls=tls,
            connect_timeout=config.connect_timeout,
        )
        self.subject = subject
        self.stream = stream
        self.durable = durable
        self.ack_wait = ack_wait
        self.heartbeat = heartbeat
        self.expires = expires
        super().__init__(handler, config, name=name or f"{stream}/{durable}")

    def _lane(self, plan: Plan) -> Lane:
        return NatsLane(self, plan)


class NatsLane:
    """The way to one durable consumer."""

    retries: Retries = "broker"
    counts_held = True

    def __init__(self, consumer: NatsConsumer, plan: Plan) -> None:
        self._consumer = consumer
        self._plan = plan
        self._warned = False

    async def connect(self) -> NatsSession:
        """Connect, find or make the durable consumer, and begin to listen."""
        consumer = self._consumer
        known = require("nats.errors", "nats")
        sessions: list[NatsSession] = []

        async def lost(*_: Any) -> None:
            for session in sessions:
                session.lose("the connection is closed")

        try:
            client = await consumer.servers.connect(
                name=self._plan.name,
                closed_cb=lost,
                disconnected_cb=lost,
                ping_interval=max(1, round(consumer.heartbeat)),
                max_outstanding_pings=2,
            )
        except known.AuthorizationError:
            raise self._refused() from None
        except known.Error as error:
            if "authorization" in str(error).lower():
                raise self._refused() from None
            raise
        try:
            ack_wait = await self._find(client)
            session = NatsSession(
                client,
                self._plan,
                stream=consumer.stream,
                durable=consumer.durable,
                ack_wait=ack_wait,
                expires=consumer.expires,
                heartbeat=consumer.heartbeat,
            )
            sessions.append(session)
            await session.start()
        except BaseException:
            await client.close()
            raise
        return session

    def _refused(self) -> AuthError:
        shown = self._consumer.servers.shown
        return AuthError(f"NATS at {shown} refuses us; check user, password, token or credentials")

    async def _find(self, client: Any) -> float:
        """The `ack_wait` of the durable consumer, which is made where it is missing."""
        consumer, plan = self._consumer, self._plan
        api = require("nats.js.api", "nats")
        errors = require("nats.js.errors", "nats")
        jetstream = client.jetstream()
        where = f"NATS at {consumer.servers.shown}"
        try:
            info = await jetstream.consumer_info(consumer.stream, consumer.durable)
        except errors.NotFoundError:
            wanted = api.ConsumerConfig(
                durable_name=consumer.durable,
                filter_subject=consumer.subject,
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=consumer.ack_wait,
                max_ack_pending=max(1_000, 2 * plan.prefetch),
                max_deliver=-1,
            )
            try:
                info = await jetstream.add_consumer(consumer.stream, wanted)
            except errors.NotFoundError:
                raise ConfigError(
                    f"{where} has no stream {consumer.stream!r}; make it, with the subject {consumer.subject!r}"
                ) from None
            except errors.APIError as error:
                if error.code is not None and error.code >= 500:  # noqa: PLR2004 - a server's own trouble
                    raise RetryableError(f"{where} can't make the consumer now: {error.err_code}") from None
                raise ConfigError(
                    f"{where} refuses the consumer {consumer.durable!r} of {consumer.subject!r}: error {error.err_code}"
                ) from None
        self._check(where, info.config, api)
        return float(info.config.ack_wait or consumer.ack_wait)

    def _check(self, where: str, config: Any, api: Any) -> None:
        """What another has set up so that we can't keep our promises, or only in part."""
        consumer, plan = self._consumer, self._plan
        named = f"{where}: the consumer {consumer.durable!r} of {consumer.stream!r}"
        if config.deliver_subject:
            raise ConfigError(f"{named} pushes to {config.deliver_subject!r}; give a durable that pulls")
        if config.ack_policy != api.AckPolicy.EXPLICIT:
            raise ConfigError(f"{named} has ack_policy={config.ack_policy}; give a durable with explicit acks")
        if (config.filter_subject or ">") != consumer.subject and config.filter_subject:
            raise ConfigError(
                f"{named} has the filter {config.filter_subject!r}, not {consumer.subject!r}; give that, "
                "or another durable"
            )
        if self._warned:
            return
        self._warned = True
        most = consumer.config.retry.max_attempts
        if config.max_deliver is not None and config.max_deliver > 0 and (most is None or config.max_deliver <= most):
            # The server then just stops delivering: without a dead letter, and without a word.
            log.warning("nats_max_deliver", consumer=plan.name, max_deliver=config.max_deliver, max_attempts=most)
        if config.max_ack_pending is not None and 0 < config.max_ack_pending < plan.prefetch:
            log.warning(
                "nats_max_ack_pending",
                consumer=plan.name,
                max_ack_pending=config.max_ack_pending,
                prefetch=plan.prefetch,
            )
