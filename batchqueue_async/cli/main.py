"""The `batchqueue` command: one module of this package per command, each with `register(commands)`.

A command's function takes the parsed arguments and returns the exit status: 0 fine, 1 something is wrong with what was
looked at, 2 the command could not do its work.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from batchqueue_async.errors import BatchQueueError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Commands(Protocol):
    """Where a command registers itself: the part that is used of an argparse object whose class has no public name."""

    def add_parser(self, name: str, *, help: str, description: str = ...) -> argparse.ArgumentParser:  # noqa: A002 - argparse's
        """Add the parser of a command."""
        ...


COMMANDS = ("check", "disk", "run", "size", "spark")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = argparse.ArgumentParser(prog="batchqueue", description="Look after batchqueue_async's queues.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"batchqueue_async.cli.{name}").register(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    parsed = build_parser().parse_args(arguments)
    run = cast("Callable[[argparse.Namespace], int]", parsed.run)
    try:
        return run(parsed)
    except (BatchQueueError, OSError) as error:
        print(f"batchqueue: {error}", file=sys.stderr)  # noqa: T201 - a command line speaks by printing
        return 2


if __name__ == "__main__":  # pragma: no cover - `python -m`, in addition to the installed script
    sys.exit(main())
