"""`batchqueue completion`: the script by which a shell completes commands, options, files and processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from batchqueue_async.cli.commands import Argument, command, raw, say

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Arguments, Command

SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_EPILOG = """\
  bash  eval "$(batchqueue completion bash)" in ~/.bashrc
  zsh   eval "$(batchqueue completion zsh)" in ~/.zshrc
  fish  batchqueue completion fish > ~/.config/fish/completions/batchqueue.fish
"""


def make() -> Command:
    """The command."""
    return command(
        "completion",
        _run,
        "print the script by which a shell completes this command's arguments",
        [Argument("shell", "SHELL", ", ".join(SHELLS), type=click.Choice(list(SHELLS)))],
        epilog=raw(_EPILOG),
    )


def _run(arguments: Arguments) -> int:
    from batchqueue_async.cli import main

    say(SHELLS[arguments.shell](main.build(), {}, main.PROGRAM, main.COMPLETE).source())
    return 0
