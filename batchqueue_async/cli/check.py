"""`batchqueue check`: everything that is wrong with a pipeline's file, before Spark starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.cli import run

if TYPE_CHECKING:
    from batchqueue_async.cli.main import Commands

_TEXT = "say everything that is wrong with a pipeline's file, without starting Spark; status 1 if anything is"


def register(commands: Commands) -> None:
    """Add `check`."""
    parser = commands.add_parser("check", help=_TEXT, description=_TEXT)
    run.add_file(parser)
    parser.set_defaults(run=run.check)
