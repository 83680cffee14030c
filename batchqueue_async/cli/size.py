"""`batchqueue size`: the sizing formula for one process, and with `--fleet` for many."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli.commands import command, flag, option, say
from batchqueue_async.export import sizing
from batchqueue_async.export.fleet import Fleet, plan

if TYPE_CHECKING:
    import click

    from batchqueue_async.cli.commands import Arguments, Command
    from batchqueue_async.export.fleet_simulation import Played

MOST_PLAYED = 16
"""Processes that `--played` plays; the others are like them."""


_FLEET = {
    "catch_up": (
        float,
        "SECONDS",
        "in which an outage's backlog is to be delivered; its length when not given",
    ),
    "process_rate": (float, "RATE", "records per second that a process handles with a core"),
    "busy": (float, "SHARE", "share of each limit to plan with"),
    "disk_rate": (float, "BYTES", "bytes per second that a process may write"),
    "network_rate": (float, "BYTES", "bytes per second of a machine's network, each way"),
    "partition_rate": (float, "BYTES", "bytes per second of a partition"),
    "cores": (int, "N", "cores of a machine"),
    "destination_rate": (float, "RATE", "records per second that the destination takes in all"),
    "destination_connections": (int, "N", "sends that it allows at once, in all"),
    "group_limit": (int, "N", "members of a consumer group"),
    "restart": (float, "SECONDS", "for which a replaced process is away"),
    "rebalance": (float, "SECONDS", "for which partitions that move stand still"),
}
"""What `Fleet` has besides what a single process is asked for."""


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
        *_fleet_params(),
        option(
            "--played", type=float, metavar="SECONDS", text="--fleet: play the fleet so long, with the outage amid it"
        ),
        option("--seed", type=int, default=0, metavar="N", text="--fleet: the seed of --played"),
        flag("--spark", "--fleet: executors of Spark, for whom partitions are tasks"),
        flag("--json", "JSON, one document"),
    ]
    return command("size", _run, text, params)


def _fleet_params() -> list[click.Parameter]:
    """The options of `Fleet`, with the defaults that it has."""
    defaults = {each.name: each.default for each in fields(Fleet)}
    return [
        option(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar=metavar,
            default=defaults[name],
            text=f"--fleet: {text}" + ("" if defaults[name] is None else f" ({defaults[name]:,.12g})"),
        )
        for name, (kind, metavar, text) in _FLEET.items()
    ]


def _run(arguments: Arguments) -> int:
    if arguments.fleet:
        return _run_fleet(arguments)
    drain = partial(
        sizing.drain,
        workers=arguments.workers,
        latency=arguments.latency,
        batch_records=arguments.batch,
        arrival=arguments.arrival,
    )
    found: dict[str, float | None] = asdict(drain(backlog=arguments.backlog))
    if arguments.outage:
        backlog = arguments.arrival * arguments.outage
        found["outage_records"] = backlog
        found["outage_bytes"] = sizing.bytes_for_outage(
            arrival=arguments.arrival, record_bytes=arguments.record_bytes, outage=arguments.outage
        )
        found["outage_drain_seconds"] = drain(backlog=backlog).seconds
    if arguments.memory_percent is not None:
        found["memory_bytes"] = sizing.memory_share(arguments.memory_percent)
    if arguments.json:
        say(json.dumps({name: _finite(value) for name, value in found.items()}))
        return 0
    for name, value in found.items():
        say(f"{name.replace('_', ' '):22} {_shown(value)}")
    return 0


def _run_fleet(arguments: Arguments) -> int:
    fleet = Fleet(
        rate=arguments.arrival,
        record_bytes=arguments.record_bytes,
        outage=arguments.outage,
        latency=arguments.latency,
        batch_records=arguments.batch,
        workers=arguments.workers,
        **{name: getattr(arguments, name) for name in _FLEET},
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
    from batchqueue_async.export.fleet_simulation import Course, play

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
