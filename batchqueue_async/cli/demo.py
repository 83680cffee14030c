"""`batchqueue demo`: records survive a destination that goes away; 20 seconds, and no Java."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from batchqueue_async.cli.commands import command, option, raw, say

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Arguments, Command

_EPILOG = """\
A program puts records into a queue; an exporter keeps them on disk and sends them to a server on a port of loopback.
The server goes away for a third of the time. In the end every record has to be there.

exit status: 0 every record arrived, 3 some did not
"""


def make() -> Command:
    """The command."""
    params = [
        option("--seconds", type=float, default=20.0, show_default=True, text="how long it takes"),
        option("--rate", type=int, default=2_000, show_default=True, text="records per second"),
    ]
    return command("demo", _run, "show a destination that goes away and comes back", params, epilog=raw(_EPILOG))


def _run(arguments: Arguments) -> int:
    from batchqueue_async.cli.demonstration import demonstrate

    with tempfile.TemporaryDirectory(prefix="batchqueue-demo-") as directory:
        path = Path(directory) / "queue"
        result = asyncio.run(demonstrate(path, seconds=arguments.seconds, rate=arguments.rate, say=say))
    missing = result.produced - result.arrived
    say(
        f"{result.arrived:,} of {result.produced:,} records arrived, {missing:,} are missing, {result.repeated:,} came "
        f"twice; at most {result.most_waiting:,} waited on disk, and the breaker opened {result.opened} times"
    )
    return 0 if result.complete else 3
