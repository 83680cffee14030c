"""`KafkaConsumer`: records of topics, as a member of a consumer group, committed when they are handled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from batchqueue_async._support.checks import check_timeout
from batchqueue_async.errors import ConfigError
from batchqueue_async.intake.config import IntakeConfig
from batchqueue_async.intake.consumer import Consumer
from batchqueue_async.intake.kafka.lane import KafkaLane, KafkaOptions
from batchqueue_async.intake.ports import Order
from batchqueue_async.sinks._shared.extras import require
from batchqueue_async.sinks._shared.secrets import Secret
from batchqueue_async.sinks.kafka.client import Cluster, broker_addresses, check_client_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.intake.ports import Lane, Plan
    from batchqueue_async.sinks._shared.tls import TlsOption


class KafkaConsumer(Consumer):
    """Consumes topics as a member of a group; what a handler has finished is committed, and nothing else.

    Records of a partition are handled one after the other by default (`ordered_by=intake.PARTITION`); with
    `intake.KEY` those of a key are, and those of other keys at the same time; a record without a key has no order then.
    A record that fails stays where it is and is tried again, and what comes behind it in its order waits; when it is
    given up it goes to the topic `dead_letters`, with its key, and the commit goes on.

    At a rebalance what runs may finish, and is committed before the partitions are given away. What was not begun is
    the next owner's.

    Example:
        >>> from batchqueue_async import intake
        >>> async def save(message: intake.Message) -> None: ...
        >>> intake.KafkaConsumer("kafka:9092", ["orders"], save, group="billing", dead_letters="orders.dead")
        KafkaConsumer('billing', new)
    """

    orders = frozenset({Order.PARTITION, Order.KEY})
    default_order = Order.PARTITION
    lane_orders = True

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        topics: str | Sequence[str],
        handler: Any,
        *,
        group: str,
        name: str | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
        group_instance_id: str | None = None,
        session_timeout: float = 10.0,
        rebalance_timeout: float = 30.0,
        revoke_timeout: float | None = None,
        stall_timeout: float = 60.0,
        ahead: int = 5_000,
        max_partition_bytes: int = 1 << 20,
        user: str | None = None,
        password: str | Secret | None = None,
        mechanism: str = "PLAIN",
        tls: TlsOption = None,
        client_id: str | None = None,
        timeout: float = 10.0,
        **options: Any,
    ) -> None:
        """Say which topics of which cluster, as which group, and what handles them.

        Args:
            bootstrap: brokers to begin with, `host:port` each, in one text with commas or one by one.
            topics: the topics, or one.
            handler: an async function of a message, or of a batch when `batch` is given; a `BatchQueue`; an `Exporter`.
            group: the consumer group.
            name: what logs and statistics call the consumer; the group's name when None.
            start: where a partition begins of which the group has committed nothing.
            isolation: `read_committed` leaves out what transactions have aborted or not yet committed.
            group_instance_id: a name of this member that survives its restarts, so that a rolling restart within the
                session timeout moves no partition; each member has its own.
            session_timeout: seconds without a heartbeat after which the group gives the member up.
            rebalance_timeout: seconds that the group's members have to come together.
            revoke_timeout: seconds of them in which running handlers may finish; None is half of them.
            stall_timeout: seconds without a record, although there are some, after which the client is made anew.
            ahead: how many offsets of a partition may be read beyond its commit point.
            max_partition_bytes: what one fetch brings of one partition, and what the client keeps of it unread.
            user: the user for SASL; None connects without.
            password: the user's password: `env:NAME`, `file:/path` or the value.
            mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.
            tls: True, a `Tls` or an `ssl.SSLContext`; None connects without TLS.
            client_id: what the brokers call the consumer's connections, in their quotas, metrics and logs, and in the
                member's name in its group; None leaves it to the client.
            timeout: seconds that a dead letter may take until it is confirmed.
            options: what every consumer takes; see `IntakeConfig`.
        """
        require("aiokafka", "kafka")
        owner = f"KafkaConsumer {name or group!r}"
        addresses = broker_addresses(owner, bootstrap)
        check_client_id(owner, client_id)
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        if not names or not all(names):
            raise ConfigError(f"{owner}: topics={topics!r} names no topic; give at least one")
        if not group:
            raise ConfigError(f"{owner}: group={group!r} is empty; commits belong to a group, so name one")
        revoke = rebalance_timeout / 2 if revoke_timeout is None else revoke_timeout
        group_options = KafkaOptions(
            topics=names,
            group=group,
            start=start,
            isolation=isolation,
            group_instance_id=group_instance_id,
            session_timeout=session_timeout,
            rebalance_timeout=rebalance_timeout,
            revoke_timeout=revoke,
            stall_timeout=stall_timeout,
            ahead=ahead,
            max_partition_bytes=max_partition_bytes,
        )
        _check(owner, group_options, timeout)
        config = IntakeConfig(**options)
        self._cluster = Cluster(
            bootstrap=addresses,
            client_id=client_id,
            user=user,
            password=None if password is None else Secret(password),
            mechanism=mechanism,
            tls=tls,
            connect_timeout=config.connect_timeout,
            timeout=timeout,
        )
        self._options = group_options
        super().__init__(handler, config, name=name or group)

    def _lane(self, plan: Plan) -> Lane:
        return KafkaLane(self._cluster, self._options, plan, self._counts)


def _check(owner: str, options: KafkaOptions, timeout: float) -> None:
    """Raise a ConfigError for what can't be."""
    for option, value, choice in (
        ("start", options.start, ("earliest", "latest")),
        ("isolation", options.isolation, ("read_committed", "read_uncommitted")),
    ):
        if value not in choice:
            raise ConfigError(f"{owner}: {option}={value!r} is not {' or '.join(map(repr, choice))}; give one of them")
    for option in ("session_timeout", "rebalance_timeout", "stall_timeout"):
        check_timeout(owner, getattr(options, option), name=option)
    for option, number in (
        *((each, getattr(options, each)) for each in _ABOVE_0),
        ("timeout", timeout),
    ):
        if number <= 0:
            raise ConfigError(f"{owner}: {option}={number} is not above 0; raise it")
    if not 0 <= options.revoke_timeout < options.rebalance_timeout:
        raise ConfigError(
            f"{owner}: revoke_timeout={options.revoke_timeout} is not between 0 and "
            f"rebalance_timeout={options.rebalance_timeout}; the commit after it needs time too"
        )


_ABOVE_0 = ("ahead", "max_partition_bytes", "session_timeout", "rebalance_timeout", "stall_timeout")
