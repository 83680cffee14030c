"""Which processes a command asks: those that are named, or all of this user that have a socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from click.shell_completion import CompletionItem

from batchqueue_async.cli.commands import FAILED, FINE, WRONG, Argument, option
from batchqueue_async.errors import BatchQueueError, ConfigError
from batchqueue_async.observe.client import OpsClient, find_processes
from batchqueue_async.sinks.secrets import Secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    import click

    from batchqueue_async.cli.commands import Arguments

_TARGET = "a process's number, its socket, or its URL; all processes of this user when none is given"
NOBODY = (
    "no process of this user can be asked; a program can while it is in `with observe.serve():` (see `pip install "
    "'batchqueue-async[service]'`), and another user's by its URL"
)


def params() -> list[click.Parameter]:
    """The arguments that say whom to ask."""
    return [
        Argument("target", "[TARGET]", _TARGET, required=False, shell_complete=_complete),
        option("--token", metavar="REFERENCE", text="what a URL may ask for, as env:NAME or file:/path"),
    ]


def _complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(str(each.pid), help=str(each.path))
        for each in find_processes()
        if str(each.pid).startswith(incomplete)
    ]


class Asked(NamedTuple):
    """A process to ask."""

    name: str
    client: OpsClient


def asked(arguments: Arguments) -> list[Asked]:
    """The processes to ask; none where none is named and none is there.

    Raises:
        ConfigError: the target or the token can't be what was given.
    """
    token = _token(arguments.token)
    if arguments.target is not None:
        return [Asked(str(arguments.target), OpsClient(arguments.target, token=token))]
    return [Asked(str(each.pid), OpsClient(each.path, token=token)) for each in find_processes()]


def _token(reference: str | None) -> str | None:
    if reference is None:
        return None
    if not reference.startswith(("env:", "file:")):
        raise ConfigError(
            "--token: is not env:NAME or file:/path; a token itself could be read in the list of processes"
        )
    token = Secret(reference).reveal()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"--token {reference}: holds what no header may; a token is one line of ASCII")
    return token


class Answer(NamedTuple):
    """What a process said; `said` is empty where it did not answer, for the reason `error`."""

    name: str
    said: Mapping[str, Any]
    error: str = ""

    @property
    def code(self) -> int:
        """The exit status for it."""
        if self.error:
            return FAILED
        status = self.said["status"]
        return FINE if status["state"] == "ok" and status["live"] and status["ready"] else WRONG


def answers(arguments: Arguments) -> list[Answer]:
    """What `/status` says of each process.

    Raises:
        BatchQueueError: there is nobody to ask.
    """
    found = [_ask(each) for each in asked(arguments)]
    if not found:
        raise BatchQueueError(NOBODY)
    return found


def _ask(process: Asked) -> Answer:
    try:
        said = process.client.status()
    except BatchQueueError as error:
        return Answer(process.name, {}, str(error))
    if not (isinstance(said, dict) and {"sentence", "why", "status"} <= said.keys()):
        return Answer(process.name, {}, f"{process.client.target}: answers, and not as batchqueue_async's status does")
    return Answer(process.name, said)
