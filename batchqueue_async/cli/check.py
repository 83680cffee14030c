"""`batchqueue check`: everything that is wrong with a service's or a pipeline's file, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.cli import run, run_service, run_spark
from batchqueue_async.cli.commands import command, flag, raw

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Arguments, Command

_TEXT = "say everything that is wrong with a file, without starting anything; status 1 if anything is"
_EPILOG = """\
exit status:
  0  the file is fine
  1  something is wrong with it; with --strict also where there are only warnings
  2  the command could not do its work
"""


def make() -> Command:
    """The command."""
    params = [
        *run.file_params(),
        flag("--no-env", "leave out what this machine need not have: variables, secrets, packages, the program's code"),
        flag(
            "--connect",
            "open each sink, connect to each source and to the collector of traces; send and consume nothing",
        ),
        flag("--json", "JSON, one document"),
        flag("--strict", "warnings are errors"),
    ]
    return command("check", _check, _TEXT, params, epilog=raw(_EPILOG))


def _check(arguments: Arguments) -> int:
    return run_service.check(arguments) if run.is_service(arguments) else run_spark.check(arguments)
