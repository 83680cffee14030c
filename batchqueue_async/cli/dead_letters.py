"""`batchqueue dead-letters`: what exporters gave up; list it, show it, put it back, delete it, copy it to a file.

What is on disk is read there, whether its process runs or not. A change is made by the process that has the directory
open, on the exporter's own loop, or here where nobody has. What is in memory is asked of its process.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING

from batchqueue_async.cli import disk, letter_places
from batchqueue_async.cli import letters as letters_file
from batchqueue_async.cli.commands import (
    FAILED,
    Argument,
    Arguments,
    command,
    complain,
    flag,
    group,
    option,
    plain,
    raw,
    say,
)
from batchqueue_async.cli.letter_text import shown
from batchqueue_async.durable.disk import files, inspect, recovery
from batchqueue_async.errors import BatchQueueError, ConfigError, LockedError
from batchqueue_async.observe import letter_client
from batchqueue_async.observe.letter_client import LettersCutOffError
from batchqueue_async.observe.letter_requests import LONGEST, PATIENCE, letter_as_json, missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import click

    from batchqueue_async.cli.commands import Group
    from batchqueue_async.cli.letter_places import Place
    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.observe.letter_client import Changed
    from batchqueue_async.observe.letter_requests import Verb

_ABOUT = "list, show, put back, delete or copy what exporters gave up"
_WHERE = (
    "a service's file, the directory of an exporter's send queue, the number or socket of a running process, or the "
    "name of an exporter in one"
)
_EPILOG = """\
exit status:
  0  fine
  1  something is damaged, numbers are not there, or the send queue dropped records
  2  the command could not do its work, or not all of it; it says how much
"""
_SECRETS = "they may hold what others must not see"
_EVERY = 1.0


def make() -> Group:
    """The command with its own."""
    seqs = Argument("seq", "[SEQ]...", "numbers from `list`; all when none is given", type=int, nargs=-1)
    some = Argument("seq", "SEQ...", "numbers from `list`", type=int, nargs=-1, required=True)
    payloads = flag("--payloads", f"show the payloads: {_SECRETS}")
    before = option("--before", type=float, metavar="SECONDS", text="that died before this, since 1970")
    timeout = option(
        "--timeout",
        type=float,
        default=PATIENCE,
        metavar="SECONDS",
        text=f"without progress, as where a send queue has no room, after which it ends; {PATIENCE:g} unless given",
    )
    progress = flag("--progress", "say on standard error how far it is; by itself on a terminal")
    page = [
        option("--limit", type=int, metavar="N", text="stop after N of each exporter"),
        option("--after", type=int, default=0, metavar="SEQ", text="only those with higher numbers"),
    ]
    return group(
        "dead-letters",
        _ABOUT,
        [
            _command("list", _list, "the dead letters, one per line", payloads, *page),
            _command("show", _show, f"dead letters whole, with their payloads: {_SECRETS}", some),
            _command("requeue", _requeue, "put dead letters into the send queue again", seqs, timeout, progress),
            _command("purge", _purge, "delete dead letters", seqs, before, timeout, progress),
            _command("drop", _purge, "the same as purge", seqs, before, timeout, progress),
            _command(
                "export",
                _export,
                "write dead letters to a file, with what is known of them",
                *letters_file.params(),
                about=letters_file.DESCRIPTION,
            ),
        ],
        metavar="VERB",
        epilog=raw(_EPILOG),
    )


def _command(
    name: str, run: Callable[[Arguments], int], text: str, *more: click.Parameter, about: str = ""
) -> click.Command:
    params = [
        Argument("where", "WHERE", _WHERE),
        *more,
        option("--exporter", metavar="NAME", text="this exporter of the file or process alone"),
        flag("--json", "JSON, one document per exporter (list, show: one per line)"),
    ]
    return command(name, run, text, params, about=about, epilog=raw(_EPILOG))


# -- reading -----------------------------------------------------------------------------------------------------------


def _list(arguments: Arguments) -> int:
    if arguments.limit is not None and arguments.limit < 0:
        raise ConfigError(f"--limit {arguments.limit}: is below 0")

    def one(place: Place) -> int:
        damaged: list[str] = []
        found = (letter for letter in _letters(place, damaged) if letter.seq > arguments.after)
        disk.say_letters(found if arguments.limit is None else islice(found, arguments.limit), arguments)
        return disk.say_damaged(damaged)

    return _each(arguments, "list", one)


def _show(arguments: Arguments) -> int:
    def one(place: Place) -> int:
        damaged: list[str] = []
        wanted = set(arguments.seq)
        done: set[int] = set()
        for letter in _letters(place, damaged):
            if letter.seq in wanted:
                done.add(letter.seq)
                say(json.dumps(letter_as_json(letter)) if arguments.json else shown(letter))
                if done == wanted:
                    break
        gone = missing(wanted, done)
        letters_file.say_missing(gone)
        return max(disk.say_damaged(damaged), 1 if gone else 0)

    return _each(arguments, "show", one)


def _export(arguments: Arguments) -> int:
    def one(place: Place) -> int:
        damaged: list[str] = []
        return letters_file.export_letters(_letters(place, damaged), damaged, arguments)

    return _each(arguments, "export", one, alone=True)


def _letters(place: Place, damaged: list[str]) -> Iterator[DeadLetter]:
    """The letters of a place; those on disk are read there, also while a process has it open."""
    if place.path is not None:
        if place.process is not None and not place.path.is_dir():
            raise ConfigError(
                f"{place.path}, which process {place.process.name} has open, is not to be seen from here; read it "
                "where that process runs"
            )
        return inspect.list_dead_letters(place.path, on_damage=damaged.append)
    assert place.process is not None and place.holder is not None  # noqa: S101, PT018 - of what is in memory, both are
    return letter_client.letters(place.process, place.holder)


# -- changing ----------------------------------------------------------------------------------------------------------


def _requeue(arguments: Arguments) -> int:
    return _change(arguments, "requeue", None)


def _purge(arguments: Arguments) -> int:
    return _change(arguments, "purge", arguments.before)


def _change(arguments: Arguments, verb: Verb, before: float | None) -> int:
    if not 0 < arguments.timeout <= LONGEST:
        raise ConfigError(f"--timeout {arguments.timeout:g}: is not between 0 and {LONGEST:g} seconds")

    def one(place: Place) -> int:
        progress = _Progress(shown=arguments.progress or sys.stderr.isatty())
        place = _with_owner(place, verb)
        try:
            changed = _changed(place, arguments, verb, before, progress)
        except LettersCutOffError as error:
            complain(f"batchqueue: {plain(error)}. {_so_far(error.count, verb, begun=error.begun)}")
            return FAILED
        except KeyboardInterrupt:
            complain(f"batchqueue: {_so_far(progress.count, verb, begun=True)}")
            raise
        return disk.say_changed(arguments, verb, changed, process=None if place.process is None else place.process.name)

    return _each(arguments, verb, one)


def _changed(place: Place, arguments: Arguments, verb: Verb, before: float | None, progress: _Progress) -> Changed:
    seqs = list(arguments.seq) or None
    if place.process is not None and place.holder is not None:
        return letter_client.change(
            place.process,
            place.holder,
            verb,
            seqs=seqs,
            before=before,
            timeout=arguments.timeout,
            progress=progress.at,
        )
    assert place.path is not None  # noqa: S101 - what no process has is on disk
    try:
        return disk.change_here(
            place.path, verb, seqs=seqs, before=before, timeout=arguments.timeout, progress=progress.at
        )
    except LockedError as error:
        raise LockedError(
            f"{error}; it has been opened just now: run this again, so that its process is asked"
        ) from None


def _so_far(count: int, verb: Verb, *, begun: bool) -> str:
    """How far a change had come.

    Example:
        >>> _so_far(500, "requeue", begun=True)
        'At least 500 dead letters were put back; some more may be in both places, and are sent twice then'
    """
    if not begun:
        return "Nothing was changed"
    done = "put back" if verb == "requeue" else "deleted"
    again = "; some more may be in both places, and are sent twice then" if verb == "requeue" else ""
    return f"At least {count} dead letters were {done}{again}"


def _with_owner(place: Place, verb: Verb) -> Place:
    """The place, with the process that has its directory open.

    Raises:
        LockedError: somebody has, and can't be asked.
    """
    if place.process is not None or place.path is None:
        return place
    owner = files.held(place.path / recovery.LOCK)
    if owner is None:
        return place
    processes = letter_places.running()
    found = letter_places.holding(place.path, processes)
    if found:
        return letter_places.place_of(*found[0])
    silent = "".join(f"; process {each.name} can't be asked: {each.fault}" for each in processes if each.fault)
    raise LockedError(
        f"{place.path} is open in {owner}, which takes no commands of this user, and nothing was changed{silent}; "
        "serve `unix:` there (`observe.listen`, or `observe.serve`), or stop it and run this again, or let its code "
        f"call Exporter.{verb}_dead_letters()"
    )


class _Progress:
    """How far a change is; said now and then."""

    def __init__(self, *, shown: bool) -> None:
        self.count = 0
        self._shown = shown
        self._next = time.monotonic() + _EVERY

    def at(self, count: int) -> None:
        """Note how many letters have been dealt with."""
        self.count = count
        if self._shown and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            complain(f"{count} dead letters")


# -- each place --------------------------------------------------------------------------------------------------------


def _each(arguments: Arguments, verb: str, act: Callable[[Place], int], *, alone: bool = False) -> int:
    """A verb for every place; one that fails does not keep the others from their turn."""
    found = letter_places.places(arguments.where, arguments.exporter, verb=verb)
    if len(found) > 1 and (alone or vars(arguments).get("seq")):
        names = ", ".join(each.name for each in found)
        what = "FILE: is for the letters of one exporter" if alone else "SEQ: numbers belong to one exporter"
        raise ConfigError(f"{what}; add --exporter, one of {names}")
    code = 0
    for place in found:
        try:
            code = max(code, _one(place, act, headed=len(found) > 1 and not arguments.json, quiet=arguments.json))
        except (BatchQueueError, OSError) as error:
            if len(found) == 1:
                raise
            complain(f"batchqueue: {plain(place.name)}: {error}")
            code = FAILED
        except KeyboardInterrupt:
            complain("batchqueue: interrupted")
            return FAILED
    return code


def _one(place: Place, act: Callable[[Place], int], *, headed: bool, quiet: bool) -> int:
    if place.holder is not None and place.holder.forwards_to is not None and place.path is None:
        text = f"{place.name}: hands its dead letters to exporter {place.holder.forwards_to!r}, and keeps none"
        (complain if quiet else say)(plain(text))
        return 0
    if place.process is None and place.path is not None and not place.path.is_dir():
        if not quiet:
            say(f"{plain(place.name)}: {plain(place.path)} is not there yet")
        return 0
    if headed:
        say(f"{plain(place.name)}:")
    return act(place)
