"""The Redis sink at nodes of a cluster, at a replica and at a sentinel: what they say is taken as what it is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
import redis.asyncio
from outage_kit import LIMIT, until
from redis.crc import key_slot
from servers.redis_cluster import NODES, SLOTS, cluster, watched
from sink_places import delivered_more, under_load

import batchqueue_async as bq
from batchqueue_async.sinks.redis import RedisSink

pytestmark = [pytest.mark.real_time(one_loop=True), pytest.mark.timeout(3 * LIMIT)]

QUICK = {"timeout": 5.0, "connect_timeout": 2.0}


def stream_of(node: int) -> str:
    """A name whose slot this node has."""
    share = SLOTS // NODES
    return next(
        f"rows{number}" for number in itertools.count() if min(key_slot(b"rows%d" % number) // share, NODES - 1) == node
    )


async def numbers(port: int, stream: str) -> list[int]:
    client = redis.asyncio.Redis(port=port)
    try:
        return [int(entry[b"data"]) for _, entry in await client.xrange(stream)]
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def opened(sink):
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


async def test_at_a_node_of_a_cluster():
    with cluster() as nodes:
        first = nodes[0]
        mine, other = stream_of(0), stream_of(1)
        async with opened(RedisSink(f"redis://{first.address}", stream=other, **QUICK)) as sink:
            with pytest.raises(bq.ConfigError, match="has not this stream"):
                await sink.send([b"1"])
        # A slot on its way to another node: what is not there yet has to be asked for over there.
        ids = [node.ask("CLUSTER", "MYID").split(b"\r\n")[1].decode() for node in nodes[:2]]
        slot = key_slot(mine.encode())
        nodes[1].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        first.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        async with opened(RedisSink(f"redis://{first.address}", stream=mine, **QUICK)) as sink:
            with pytest.raises(bq.ConfigError, match="has not this stream"):
                await sink.send([b"1"])
            for node in (first, nodes[1]):
                node.ask("CLUSTER", "SETSLOT", slot, "STABLE")

        async def lose_a_node(exporter):
            nodes[2].kill()
            await until(lambda: "ClusterDown" in (exporter.stats().last_error or ""))
            await asyncio.to_thread(nodes[2].start)
            await delivered_more(exporter)

        sink = RedisSink(f"redis://{first.address}", stream=mine, **QUICK)
        count, stats, dead = await under_load(sink, lambda number: b"%d" % number, lose_a_node)
        assert (dead, stats.pauses) == ([], 0)
        assert stats.failures["server"] > 0
        assert sorted(set(await numbers(first.port, mine))) == list(range(count))


async def test_at_a_replica_that_a_sentinel_makes_the_primary():
    with watched() as (primary, replica, sentinel):
        async with opened(RedisSink(f"redis://{sentinel.address}", stream="rows", **QUICK)) as sink:
            with pytest.raises(bq.ConfigError, match="sentinel"):
                await sink.send([b"1"])
        sink = RedisSink(f"redis://{replica.address}", stream="rows", **QUICK)
        async with opened(sink):
            with pytest.raises(bq.RetryableError, match="ReadOnly"):
                await sink.send([b"1"])
        retry = bq.RetryPolicy(initial=0.05, max_delay=0.2)
        config = bq.ExportConfig(retry=retry, breaker=bq.BreakerPolicy(reset_timeout=0.2))
        async with bq.Exporter(sink, config) as exporter:
            await exporter.consume([b"%d" % number for number in range(100)])
            await until(lambda: exporter.stats().failures.get("server", 0) > 0)
            primary.kill()
            await exporter.flush(LIMIT)
            stats = exporter.stats()
        assert (stats.delivered, stats.dead_lettered) == (100, 0)
        assert sorted(set(await numbers(replica.port, "rows"))) == list(range(100))
