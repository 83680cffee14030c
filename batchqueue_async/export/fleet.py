"""Sizing past one machine: from rates to processes, partitions, disks and network, and which of them gives out first.

Pure arithmetic; `fleet_simulation` plays the same fleet through an outage and a rolling restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from batchqueue_async._support.checks import Checkup, Real
from batchqueue_async.export.sizing import bytes_for_outage

_MOST = 1e18
_POSITIVE = (
    *("rate", "record_bytes", "latency", "batch_records", "workers", "process_rate", "disk_rate", "network_rate"),
    *("partition_rate", "cores", "group_limit", "partition_limit"),
)
_RULES = (
    dict.fromkeys(_POSITIVE, Real(most=_MOST))
    | dict.fromkeys(("outage", "restart", "rebalance"), Real(above=False, most=_MOST))
    | dict.fromkeys(("catch_up", "destination_rate", "destination_connections"), Real(most=_MOST, optional=True))
    | {"busy": Real(most=1.0)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What a fleet has to do, and what one process of it can.

    The limits of a process are what you measured of yours; the defaults are cautious figures, for records of a few
    hundred bytes on a present-day core.

    Example:
        >>> Fleet(rate=1e6, record_bytes=300, outage=600, latency=0.05).batch_records
        500

    Attributes:
        rate: records per second that come in, in all.
        record_bytes: bytes of a record as it is encoded.
        outage: seconds of the destination's outage to keep everything in.
        latency: seconds that the destination takes for a batch.
        batch_records: records of a batch.
        workers: sends under way at once, per process.
        catch_up: seconds in which the backlog of an outage is to be delivered; the length of the outage when None.
        process_rate: records per second that one process handles with a core of its own.
        busy: the share of each limit that is planned with; the rest is for what is uneven.
        disk_rate: bytes per second that a process may write to its disk.
        network_rate: bytes per second of a machine's network, each way.
        partition_rate: bytes per second of a partition of the broker.
        cores: cores of a machine, with a process each.
        destination_rate: records per second that the destination takes in all; None where nothing is known.
        destination_connections: sends that it allows at once, in all; likewise.
        group_limit: members of one consumer group, above which its rebalances take too long.
        partition_limit: partitions of one cluster of brokers.
        restart: seconds for which a process is away when it is replaced.
        rebalance: seconds for which partitions that move are not consumed.
    """

    rate: float
    record_bytes: float
    outage: float
    latency: float
    batch_records: int = 500
    workers: int = 8
    catch_up: float | None = None
    process_rate: float = 40_000.0
    busy: float = 0.7
    disk_rate: float = 150e6
    network_rate: float = 1.25e9
    partition_rate: float = 10e6
    cores: int = 8
    destination_rate: float | None = None
    destination_connections: int | None = None
    group_limit: int = 1_000
    partition_limit: int = 200_000
    restart: float = 30.0
    rebalance: float = 5.0

    def __post_init__(self) -> None:
        """Refuse what can't be computed with."""
        Checkup("fleet", self, _RULES).finish()

    @property
    def peak_rate(self) -> float:
        """Records per second while the backlog of an outage is caught up with."""
        if not self.outage:
            return self.rate
        return self.rate * (1.0 + self.outage / (self.catch_up or self.outage))

    @property
    def sends_rate(self) -> float:
        """Records per second that a process's sends allow."""
        return self.workers * self.batch_records / self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """What a fleet needs.

    Attributes:
        processes: processes, which are consumers of one group, or cores of Spark executors.
        because: what asks for that many: "cpu", "sends" or "disk".
        machines: machines with `cores` processes each, or more where the network asks for them.
        partitions: partitions of the topic: as many per process, and none above `partition_rate`.
        disk_bytes: bytes of each process's directory, for the outage and one neighbour's share while that is away.
        disk_write_rate: bytes per second that each process writes.
        network_in: bytes per second that come to each machine; network_out: that leave it.
        connections: sends under way at once at the destination.
        peak_rate: records per second that the destination gets after an outage.
        restart_seconds: for a rolling restart of all, one after the other, each with its catching up.
        restart_backlog: records that wait at most because of one replaced process.
        limits: the rate at which each limit is met, by name, the lowest first; in records per second.
    """

    processes: int
    because: str
    machines: int
    partitions: int
    disk_bytes: int
    disk_write_rate: float
    network_in: float
    network_out: float
    connections: int
    peak_rate: float
    restart_seconds: float
    restart_backlog: float
    limits: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def breaks_at(self) -> tuple[str, float]:
        """The limit that is met first, and at which rate; ("", infinity) where none is."""
        return next(iter(self.limits.items()), ("", math.inf))


def plan(fleet: Fleet) -> FleetPlan:
    """What a fleet needs, and where it would break.

    Example:
        >>> found = plan(Fleet(rate=1e6, record_bytes=300, outage=600, latency=0.05))
        >>> found.processes, found.because, found.machines
        (72, 'cpu', 9)
        >>> found.breaks_at[0]
        'consumer group'
    """
    peak = fleet.peak_rate
    each = {
        "cpu": fleet.process_rate * fleet.busy,
        "sends": fleet.sends_rate * fleet.busy,
        # While a backlog is caught up with, records are still written at the rate at which they come in.
        "disk": fleet.disk_rate * fleet.busy / fleet.record_bytes * peak / fleet.rate,
    }
    because = min(each, key=lambda name: each[name])
    processes = max(1, math.ceil(round(peak / each[because], 9)))
    traffic = fleet.rate * fleet.record_bytes
    peak_traffic = peak * fleet.record_bytes
    machines = max(
        math.ceil(processes / fleet.cores), math.ceil(round(peak_traffic / (fleet.network_rate * fleet.busy), 9))
    )
    per_process = max(1, math.ceil(round(traffic / (fleet.partition_rate * fleet.busy) / processes, 9)))
    share = fleet.rate / processes
    others = max(1, processes - 1)
    backlog = share * (fleet.restart + 2 * fleet.rebalance)
    spare = max(peak - fleet.rate, fleet.rate * (1 / fleet.busy - 1))
    return FleetPlan(
        processes=processes,
        because=because,
        machines=machines,
        partitions=processes * per_process,
        disk_bytes=bytes_for_outage(
            arrival=share * (1 + 1 / others), record_bytes=fleet.record_bytes, outage=fleet.outage, on_disk=True
        ),
        disk_write_rate=share * fleet.record_bytes,
        network_in=traffic / machines,
        network_out=peak_traffic / machines,
        connections=processes * fleet.workers,
        peak_rate=peak,
        restart_seconds=processes * (fleet.restart + 2 * fleet.rebalance + backlog / spare),
        restart_backlog=backlog,
        limits=_limits(fleet, each[because], per_process, peak / fleet.rate),
    )


def _limits(fleet: Fleet, each: float, per_process: int, factor: float) -> dict[str, float]:
    """The rates at which limits are met that more processes and machines don't raise."""
    found = {
        "consumer group": fleet.group_limit * each / factor,
        "partitions": fleet.partition_limit / per_process * each / factor,
    }
    if fleet.destination_rate is not None:
        found["destination"] = fleet.destination_rate / factor
    if fleet.destination_connections is not None:
        found["connections"] = fleet.destination_connections / fleet.workers * each / factor
    return dict(sorted(found.items(), key=lambda pair: pair[1]))
