"""The command: each subject takes its turns, medians count."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .measuring import Row

# Modules of this package, imported when their turn comes.
BROKERS = ("pool", "rabbit", "nats", "redis")
# Kafka's rows are a command of their own, `tests.benchmarks.intake.kafka`, which takes the same options.
ELSEWHERE = "kafka"


def show(row: Row) -> str:
    """A line of the table."""
    target = "" if row.target is None else f"target >= {row.target:4} {'met' if row.met else 'MISSED'}"
    return (
        f"{row.name:38} {row.rate:11,.0f}/s {row.cpu:6.1f} us CPU {row.ratio:6.2f} x {row.against:34} {target}".rstrip()
    )


def main(arguments: list[str]) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="make bench-intake", description=__doc__)
    parser.add_argument(
        "--broker", choices=(*BROKERS, ELSEWHERE), action="append", help="only this one; may be given several times"
    )
    parser.add_argument("--turns", type=int, default=3, help="how often each subject runs; the median counts")
    parser.add_argument("--messages", type=int, default=50_000, help="messages of one run")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="also write JSON")
    options = parser.parse_args(arguments)
    print(f"Python {sys.version.split()[0]}")
    found: list[Row] = []
    for name in options.broker or BROKERS:
        if name == ELSEWHERE:
            continue
        rows = importlib.import_module(f"tests.benchmarks.intake.{name}").rows
        for row in asyncio.run(rows(options.turns, options.messages)):
            print(show(row), flush=True)
            found.append(row)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        written = [row._asdict() | {"met": row.met} for row in found]
        options.out.write_text(json.dumps({"python": sys.version.split()[0], "rows": written}, indent=1))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # the clients tell of every connection
    sys.path.append(str(Path(__file__).parents[2]))  # the servers of the tests
    main(sys.argv[1:])
