"""The lane to Kafka: how a member of the group is made, with which settings of the client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from batchqueue_async._support import log
from batchqueue_async._support.wording import closest
from batchqueue_async.errors import ConfigError
from batchqueue_async.intake.kafka.assignment import Assignment, Limits
from batchqueue_async.intake.kafka.letters import Letters
from batchqueue_async.intake.kafka.session import KafkaSession
from batchqueue_async.sinks.kafka import client

if TYPE_CHECKING:
    from batchqueue_async.intake.ports import Plan, Retries
    from batchqueue_async.intake.stats import Counters

# The client would throw a whole member out of its group for one handler that is slow; handlers have a timeout of their
# own, and the watch looks after the client.
_NEVER = 2**31 - 1
# How long a broker that makes topics on demand may take for one.
_TOPIC_WAIT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaOptions:
    """What a group member is made with.

    Attributes:
        topics: what it subscribes to.
        group: the group's id.
        start: where a partition is begun of which the group has committed nothing.
        isolation: whether records of open and aborted transactions are read.
        group_instance_id: the member's name that survives its restarts; None for a dynamic member.
        session_timeout: seconds without a heartbeat after which the group gives the member up.
        rebalance_timeout: seconds that the members of the group have to come together.
        revoke_timeout: seconds of them that running handlers may take to finish; None is half.
        commit_interval: seconds between two commits, at least.
        stall_timeout: seconds without progress, although there are records, after which the client is made anew.
        ahead: how many offsets a partition may be read beyond its commit point.
        max_partition_bytes: what one fetch brings of one partition.
    """

    topics: tuple[str, ...]
    group: str
    start: Literal["earliest", "latest"] = "earliest"
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    group_instance_id: str | None = None
    session_timeout: float = 10.0
    rebalance_timeout: float = 30.0
    revoke_timeout: float = 15.0
    commit_interval: float = 0.1
    stall_timeout: float = 60.0
    ahead: int = 5_000
    max_partition_bytes: int = 1 << 20

    @property
    def commit_timeout(self) -> float:
        """Seconds for one commit: what a rebalance leaves when the drain has taken its share, and not all of it."""
        return max(1.0, min(10.0, (self.rebalance_timeout - self.revoke_timeout) / 2))

    @property
    def close_timeout(self) -> float:
        """Seconds for leaving the group."""
        return 1.5

    def client_options(self, timeout: float) -> dict[str, Any]:
        """What aiokafka's consumer is made with, next to the connection."""
        return {
            "group_id": self.group,
            "group_instance_id": self.group_instance_id,
            "enable_auto_commit": False,
            "auto_offset_reset": self.start,
            "isolation_level": self.isolation,
            "session_timeout_ms": int(self.session_timeout * 1000),
            "heartbeat_interval_ms": max(100, int(self.session_timeout * 1000 / 5)),
            "rebalance_timeout_ms": int(self.rebalance_timeout * 1000),
            "max_poll_interval_ms": _NEVER,
            # Joining is one request that lasts until all members have come.
            "request_timeout_ms": int(max(timeout, self.rebalance_timeout + 5.0) * 1000),
            "max_partition_fetch_bytes": self.max_partition_bytes,
        }


class KafkaLane:
    """Makes sessions that consume the topics as a member of the group."""

    retries: Retries = "kept"
    counts_held = False

    def __init__(self, cluster: client.Cluster, options: KafkaOptions, plan: Plan, counts: Counters) -> None:
        self.options = options
        self._counts = counts
        self._cluster = cluster
        self._plan = plan

    async def connect(self) -> KafkaSession:
        """Find the brokers and the topics, join the group.

        Raises:
            ConfigError: a topic does not exist.
            AuthError: credentials, group or topic are refused.
        """
        where = f"Kafka consumer {self._plan.name!r}"
        try:
            consumer = await self._cluster.consumer(**self.options.client_options(self._cluster.timeout))
        except Exception as error:  # noqa: BLE001 - it goes on, by the library's class
            raise client.translate_error(where, error) from None
        session = KafkaSession(
            consumer,
            Assignment(self._limits()),
            self.options,
            plan=self._plan,
            letters=Letters(self._cluster, self._plan.dead_letters),
            counts=self._counts,
        )
        try:
            await self._check_topics(consumer, where)
            await session.join(self._cluster.connect_timeout / 2)
        except BaseException as error:
            await session.end()
            if isinstance(error, Exception):
                raise client.translate_error(where, error) from None
            raise
        return session

    def _limits(self) -> Limits:
        plan = self._plan
        least = max(1, plan.run) if plan.order == "partition" else max(plan.workers, plan.run)
        return Limits(messages=plan.prefetch, bytes=plan.prefetch_bytes, least=least, ahead=self.options.ahead)

    async def _check_topics(self, consumer: client.Consumer, where: str) -> None:
        """A topic that is missing assigns nothing, without a word, for ever."""
        known = await consumer.topics()
        for topic in self.options.topics:
            if topic not in known and not await self._made(topic):
                near = closest(topic, known)
                hint = f"; did you mean {near!r}?" if near else ""
                raise ConfigError(f"{where}: there is no topic {topic!r}{hint}; create it, or correct topics=")
        letters = self._plan.dead_letters
        if letters is not None and letters not in known:
            log.warning("dead_letter_topic_missing", consumer=self._plan.name, topic=letters)

    async def _made(self, topic: str) -> bool:
        """Ask for a topic by its name, which makes it where the broker makes topics on demand."""
        producer = await self._cluster.producer()
        try:
            async with asyncio.timeout(_TOPIC_WAIT):
                return bool(await producer.partitions_for(topic))
        except TimeoutError:
            return False
        except Exception as error:
            if type(error).__name__ in {"UnknownTopicOrPartitionError", "InvalidTopicError"}:
                return False
            raise
        finally:
            await client.stop(producer)
