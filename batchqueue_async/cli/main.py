"""The `batchqueue` command: a module for each of its commands, with `make()`.

A command's function takes the parsed arguments and returns the exit status: 0 fine, 1 something is wrong with what was
looked at, 2 the command could not do its work, 3 something was left undelivered.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click
from click.shell_completion import shell_complete

from batchqueue_async.cli.commands import FAILED, Group, complain, raw, say
from batchqueue_async.errors import BatchQueueError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "bench": "bench",
    "check": "check",
    "completion": "completion",
    "dead-letters": "dead_letters",
    "demo": "demo",
    "disk": "disk",
    "new": "new",
    "run": "run",
    "schema": "schema",
    "size": "size",
    "spark": "spark",
    "status": "live.status",
    "top": "live.top",
    "why": "live.why",
}
"""By its name, the module of this package that makes a command."""
PROGRAM = "batchqueue"
COMPLETE = "_BATCHQUEUE_COMPLETE"
"""The variable by which a shell asks for completions; its scripts set it."""

_EPILOG = """\
exit status:
  0  fine
  1  something is wrong with what was looked at
  2  the command could not do its work
  3  something was left undelivered
"""


class _Main(Group):
    """All commands; a module is imported when its command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Their names."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """One of them."""
        if cmd_name not in COMMANDS:
            return None
        made: click.Command = import_module(f"batchqueue_async.cli.{COMMANDS[cmd_name]}").make()
        return made


def build() -> Group:
    """The command with all others."""
    return _Main(
        PROGRAM,
        help="Run pipelines, watch processes, and look after queues of batchqueue_async.",
        epilog=raw(_EPILOG),
        subcommand_metavar="COMMAND ...",
        no_args_is_help=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
        params=[
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_version,
                help="say the version",
            )
        ],
    )


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001 - click's signature
    if wanted and not ctx.resilient_parsing:
        say(f"{PROGRAM} {sys.modules['batchqueue_async'].__version__}")
        ctx.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status.

    Raises:
        SystemExit: after `--help` and `--version`, and with 2 if the arguments can't be understood.
    """
    program = build()
    if arguments is None and (instruction := os.environ.get(COMPLETE)):
        return shell_complete(program, {}, PROGRAM, COMPLETE, instruction)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with program.make_context(PROGRAM, given) as context:
            status: int = program.invoke(context)
            return status
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.UsageError as error:
        where = PROGRAM if error.ctx is None else error.ctx.command_path
        usage = "" if error.ctx is None else f"{error.ctx.get_usage()}\n"
        complain(f"{usage}{where}: error: {error.format_message()}\n`{where} --help` says what there is")
        sys.exit(error.exit_code)
    except (BatchQueueError, OSError) as error:
        complain(f"{PROGRAM}: {error}")
        return FAILED


if __name__ == "__main__":  # pragma: no cover - `python -m`, in addition to the installed script
    sys.exit(main())
