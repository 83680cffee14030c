"""`batchqueue size`: the sizing formula, for a given latency, workers and backlog."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from batchqueue_async.export import sizing

if TYPE_CHECKING:
    import argparse

    from batchqueue_async.cli.main import Commands


def register(commands: Commands) -> None:
    """Add `size`."""
    text = "drain rate and drain time of an exporter's backlog, and what an outage needs"
    size = commands.add_parser("size", help=text, description=text)
    size.add_argument("--workers", type=int, required=True, metavar="N", help="batches under way at once")
    size.add_argument("--latency", type=float, required=True, metavar="SECONDS", help="what the sink takes for one")
    size.add_argument("--backlog", type=float, default=0.0, metavar="RECORDS", help="records that wait")
    size.add_argument("--batch", type=int, default=1, metavar="RECORDS", help="records of a batch (1)")
    size.add_argument("--arrival", type=float, default=0.0, metavar="RATE", help="records that come in, per second")
    size.add_argument("--record-bytes", type=float, default=0.0, metavar="BYTES", help="the size of a record")
    size.add_argument("--outage", type=float, default=0.0, metavar="SECONDS", help="an outage to keep everything in")
    size.add_argument("--memory-percent", type=float, default=None, metavar="SHARE", help="a share of memory, e.g. 0.1")
    size.add_argument("--json", action="store_true", help="JSON, one document")
    size.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
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
        _say(json.dumps({name: _finite(value) for name, value in found.items()}))
        return 0
    for name, value in found.items():
        _say(f"{name.replace('_', ' '):22} {_shown(value)}")
    return 0


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def _shown(value: float | None) -> str:
    if value is None or math.isinf(value):
        return "never: records come in faster than they leave"
    return f"{value:,.1f}".removesuffix(".0")


def _say(text: str) -> None:
    print(text)  # noqa: T201 - a command line speaks by printing
