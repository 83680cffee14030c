"""`batchqueue check`: everything that is wrong with a pipeline's file, before Spark starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.cli import run
from batchqueue_async.cli.commands import command

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Command

_TEXT = "say everything that is wrong with a pipeline's file, without starting Spark; status 1 if anything is"


def make() -> Command:
    """The command."""
    return command("check", run.check, _TEXT, run.file_params())
