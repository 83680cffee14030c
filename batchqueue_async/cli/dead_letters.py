"""`batchqueue dead-letters`: what a service's exporters, or a directory, gave up; list it, put it back, delete it.

The pages of a running process only read, so `requeue` and `purge` work on a directory that nobody has open, and refuse
any other without a change. While the service runs, its code can call `Exporter.requeue_dead_letters`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from batchqueue_async.cli import disk
from batchqueue_async.cli.commands import PATH, Argument, Arguments, command, flag, group, option, raw, say
from batchqueue_async.errors import ConfigError, LockedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

    from batchqueue_async.cli.commands import Group

_ABOUT = "list, put back or delete what exporters gave up"
_WHERE = "a service's file, or the directory of an exporter's send queue"
_EPILOG = """\
exit status:
  0  fine
  1  something is damaged
  2  the command could not do its work; so it is while a process has the directory open, but for `list`
"""


def make() -> Group:
    """The command with its own."""
    seqs = Argument("seq", "[SEQ]...", "numbers from `list`; all when none is given", type=int, nargs=-1)
    before = option("--before", type=float, metavar="SECONDS", text="that died before this, since 1970")
    payloads = flag("--payloads", "show the payloads: they may hold what others must not see")
    return group(
        "dead-letters",
        _ABOUT,
        [
            _command("list", _list, "the dead letters, one per line; a service may be running", payloads),
            _command("requeue", _requeue, "put dead letters into the send queue again, for the next start", seqs),
            _command("purge", _purge, "delete dead letters", seqs, before),
        ],
        metavar="VERB",
        epilog=raw(_EPILOG),
    )


def _command(name: str, run: Callable[[Arguments], int], text: str, *more: click.Parameter) -> click.Command:
    params = [
        Argument("where", "WHERE", _WHERE, type=PATH),
        *more,
        option("--exporter", metavar="NAME", text="this exporter of the file alone"),
        flag("--json", "JSON, one document (list: one per line)"),
    ]
    return command(name, run, text, params, epilog=raw(_EPILOG))


def directories(where: Path, exporter: str | None) -> dict[str, Path]:
    """The directories of send queues, by exporter.

    Raises:
        ConfigError: there is none, or not the one that is named.
    """
    if where.is_dir():
        if exporter is not None:
            raise ConfigError(f"--exporter {exporter}: {where} is a directory, and belongs to one; leave it out")
        return {where.name: where}
    from batchqueue_async.service.file.reading import read_service

    spec = read_service(where, secrets=False)
    paths = {name: each.values.get("path") for name, each in spec.exporters.items()}
    kept = {name: Path(path) for name, path in paths.items() if path is not None}
    if exporter is not None and exporter not in kept:
        said = "keeps its records in memory" if exporter in paths else "is not in the file"
        known = f"there are {', '.join(kept)}" if kept else "no exporter of the file has a path"
        raise ConfigError(f"--exporter {exporter}: {said}; {known}")
    if not kept:
        raise ConfigError(
            f"{where}: no exporter has a path, so dead letters are in memory alone; set path to keep them"
        )
    return kept if exporter is None else {exporter: kept[exporter]}


def _each(arguments: Arguments, verb: Callable[[Arguments], int]) -> int:
    """A verb for every directory, as `batchqueue disk dead-letters` has it."""
    code = 0
    found = directories(arguments.where, arguments.exporter)
    if len(found) > 1 and vars(arguments).get("seq"):
        raise ConfigError(f"SEQ: numbers belong to one exporter; add --exporter, one of {', '.join(found)}")
    for name, path in found.items():
        if not path.is_dir():
            if not arguments.json:
                say(f"{name}: {path} is not there yet")
            continue
        if len(found) > 1 and not arguments.json:
            say(f"{name}:")
        try:
            code = max(code, verb(Arguments(**vars(arguments), path=path)))
        except LockedError as error:
            raise LockedError(f"{name}: {error}") from error
    return code


def _list(arguments: Arguments) -> int:
    return _each(arguments, disk.list_letters)


def _requeue(arguments: Arguments) -> int:
    return _each(arguments, disk.requeue_letters)


def _purge(arguments: Arguments) -> int:
    return _each(arguments, disk.purge_letters)
