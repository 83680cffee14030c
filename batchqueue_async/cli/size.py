"""`batchqueue size`: the sizing formula for one process, and with `--fleet` for many."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli.commands import command, flag, option, say
from batchqueue_async.export import sizing

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Arguments, Command
    from batchqueue_async.export.fleet import Fleet
    from batchqueue_async.export.fleet_simulation import Played

MOST_PLAYED = 16
"""Processes that `--played` plays; the others are like them."""


# What `Fleet` has besides what a single process is asked; None takes its default.
_FLEET: tuple[tuple[str, type, str, str], ...] = (
    ("catch-up", float, "SECONDS", "in which an outage's backlog is to be delivered (its length)"),
    ("process-rate", float, "RATE", "records per second that a process handles with a core (40,000)"),
    ("busy", float, "SHARE", "share of each limit to plan with (0.7)"),
    ("disk-rate", float, "BYTES", "bytes per second that a process may write (150e6)"),
    ("network-rate", float, "BYTES", "bytes per second of a machine's network, each way (1.25e9)"),
    ("partition-rate", float, "BYTES", "bytes per second of a partition (10e6)"),
    ("cores", int, "N", "cores of a machine (8)"),
    ("destination-rate", float, "RATE", "records per second that the destination takes in all"),
    ("destination-connections", int, "N", "sends that it allows at once, in all"),
    ("group-limit", int, "N", "members of a consumer group (1,000)"),
    ("restart", float, "SECONDS", "for which a replaced process is away (30)"),
    ("rebalance", float, "SECONDS", "for which partitions that move stand still (5)"),
)


def make() -> Command:
    """The command."""
    text = "drain rate and drain time of an exporter's backlog, and what an outage needs"
    params = [
        option("--workers", type=int, required=True, metavar="N", text="batches under way at once"),
        option("--latency", type=float, required=True, metavar="SECONDS", text="what the sink takes for one"),
        option("--backlog", type=float, default=0.0, metavar="RECORDS", text="records that wait"),
        option("--batch", type=int, default=1, metavar="RECORDS", text="records of a batch (1)"),
        option("--arrival", type=float, default=0.0, metavar="RATE", text="records that come in, per second"),
        option("--record-bytes", type=float, default=0.0, metavar="BYTES", text="the size of a record"),
        option("--outage", type=float, default=0.0, metavar="SECONDS", text="an outage to keep everything in"),
        option("--memory-percent", type=float, metavar="SHARE", text="a share of memory, e.g. 0.1"),
        flag("--fleet", "size many processes: consumers of one group, or with --spark cores of executors"),
        *(
            option(f"--{name}", type=kind, metavar=metavar, text=f"--fleet: {text}")
            for name, kind, metavar, text in _FLEET
        ),
        option(
            "--played", type=float, metavar="SECONDS", text="--fleet: play the fleet so long, with the outage amid it"
        ),
        option("--seed", type=int, default=0, metavar="N", text="--fleet: the seed of --played"),
        flag("--spark", "--fleet: executors of Spark, for whom partitions are tasks"),
        flag("--json", "JSON, one document"),
    ]
    return command("size", _run, text, params)


def _run(arguments: Arguments) -> int:
    if arguments.fleet:
        return _run_fleet(arguments)
    answer = sizing.drain(
        workers=arguments.workers,
        latency=arguments.latency,
        backlog=arguments.backlog,
        batch_records=arguments.batch,
        arrival=arguments.arrival,
    )
    found: dict[str, float | None] = dict(asdict(answer))
    if arguments.outage:
        backlog = arguments.arrival * arguments.outage
        found["outage_records"] = backlog
        found["outage_bytes"] = sizing.bytes_for_outage(
            arrival=arguments.arrival, record_bytes=arguments.record_bytes, outage=arguments.outage
        )
        found["outage_drain_seconds"] = sizing.drain(
            workers=arguments.workers,
            latency=arguments.latency,
            backlog=backlog,
            batch_records=arguments.batch,
            arrival=arguments.arrival,
        ).seconds
    if arguments.memory_percent is not None:
        found["memory_bytes"] = sizing.memory_share(arguments.memory_percent)
    if arguments.json:
        say(json.dumps({name: _finite(value) for name, value in found.items()}))
        return 0
    for name, value in found.items():
        say(f"{name.replace('_', ' '):22} {_shown(value)}")
    return 0


def _run_fleet(arguments: Arguments) -> int:
    from batchqueue_async.export.fleet import Fleet, plan  # noqa: PLC0415 - only for those who ask for it

    given = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name, *_ in _FLEET}
    fleet = Fleet(
        rate=arguments.arrival,
        record_bytes=arguments.record_bytes,
        outage=arguments.outage,
        latency=arguments.latency,
        batch_records=arguments.batch,
        workers=arguments.workers,
        **{name: value for name, value in given.items() if value is not None},
    )
    answer = plan(fleet)
    found: dict[str, Any] = asdict(answer)
    played = _played(arguments, fleet, answer.processes) if arguments.played is not None else None
    if arguments.json:
        say(json.dumps(found | ({} if played is None else {"played": _all_finite(asdict(played))})))
        return 0
    names = {"processes": "executor cores", "partitions": "tasks"} if arguments.spark else {}
    limits: dict[str, float] = found.pop("limits")
    for name, value in found.items():
        say(f"{names.get(name, name.replace('_', ' ')):22} {value if isinstance(value, str) else _shown(value)}")
    if arguments.spark:
        # A micro-batch of ten seconds, by the rate while a backlog is caught up with.
        say(f"{'maxOffsetsPerTrigger':22} {_shown(math.ceil(answer.peak_rate * 10))}, with a trigger every 10 s")
    for name, rate in limits.items():
        say(f"breaks at {_shown(rate)} records per second: {name}")
    for name, value in asdict(played).items() if played is not None else ():
        say(f"played, {name.replace('_', ' '):14} {_shown(value)}")
    return 0


def _played(arguments: Arguments, fleet: Fleet, processes: int) -> Played:
    """A part of the fleet, with its share of the records: each process does the same however many there are."""
    from batchqueue_async.export.fleet_simulation import Course, play  # noqa: PLC0415 - as above

    few = min(processes, MOST_PLAYED)
    begin = arguments.played / 10
    course = Course(
        seconds=arguments.played,
        outages=((begin, begin + fleet.outage),) if fleet.outage else (),
        restarts=((begin + fleet.outage + fleet.restart, 0),),
    )
    return play(replace(fleet, rate=fleet.rate * few / processes), few, course, seed=arguments.seed)


def _all_finite(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def _shown(value: float | None) -> str:
    if value is None or math.isinf(value):
        return "never: records come in faster than they leave"
    return f"{value:,.1f}".removesuffix(".0")
