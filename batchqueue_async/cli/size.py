"""`batchqueue size`: the sizing formula, for a given latency, workers and backlog."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from batchqueue_async.cli.commands import command, flag, option, say
from batchqueue_async.export import sizing

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Arguments, Command


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
        flag("--json", "JSON, one document"),
    ]
    return command("size", _run, text, params)


def _run(arguments: Arguments) -> int:
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


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def _shown(value: float | None) -> str:
    if value is None or math.isinf(value):
        return "never: records come in faster than they leave"
    return f"{value:,.1f}".removesuffix(".0")
