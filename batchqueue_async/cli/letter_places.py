"""Where the dead letters are that a command means: in a directory, or in the memory of a running process."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batchqueue_async.cli.commands import plain
from batchqueue_async.errors import BatchQueueError, ConfigError
from batchqueue_async.observe.client import OpsClient, find_processes
from batchqueue_async.observe.letter_client import ask, ask_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from batchqueue_async.observe.letter_client import LetterProcess
    from batchqueue_async.observe.letter_requests import LetterHolder


class Place(NamedTuple):
    """The dead letters of one exporter or durable queue.

    Attributes:
        name: how a heading names it.
        path: its directory; None in memory.
        process: who has it open; None where that was not asked.
        holder: what that process calls it.
    """

    name: str
    path: Path | None
    process: LetterProcess | None = None
    holder: LetterHolder | None = None


def running() -> list[LetterProcess]:
    """The processes of this user, and what they have open."""
    return ask_all([(str(each.pid), each.path) for each in find_processes()])


def places(where: str, exporter: str | None, *, verb: str) -> list[Place]:
    """What a command means by its first argument.

    Raises:
        ConfigError: there is nothing of that name, or more than one.
    """
    path = Path(where)
    if path.is_dir():
        if exporter is not None:
            raise ConfigError(f"--exporter {exporter}: {where} is a directory, and belongs to one; leave it out")
        return [Place(path.name, path)]
    if path.is_socket():
        return of_process(ask(where, path), exporter)
    if path.exists() or os.sep in where:
        return of_file(path, exporter, verb)
    if where.isdecimal():
        target = OpsClient(int(where)).target
        return of_process(ask(where, Path(target)), exporter)
    return of_name(where, exporter, running(), verb)


def of_file(path: Path, exporter: str | None, verb: str) -> list[Place]:
    """The exporters of a service's file that have directories.

    Raises:
        ConfigError: none has, or not the one that is named.
    """
    from batchqueue_async.service.file.reading import read_service

    spec = read_service(path, secrets=False)
    paths = {name: each.values.get("path") for name, each in spec.exporters.items()}
    kept = {name: Path(each) for name, each in paths.items() if each is not None}
    if exporter is not None and exporter not in kept:
        if exporter in paths:
            line = shlex.join(["batchqueue", "dead-letters", verb, exporter])
            raise ConfigError(
                f"--exporter {exporter}: keeps its records in memory; while its process runs, `{line}` asks that"
            )
        known = f"there are {', '.join(kept)}" if kept else "no exporter of the file has a path"
        raise ConfigError(f"--exporter {exporter}: is not in the file; {known}")
    if not kept:
        raise ConfigError(
            f"{path}: no exporter has a path, so dead letters are in memory alone; set path to keep them, or give the "
            "running process's number, or the exporter's name"
        )
    return [Place(name, each) for name, each in kept.items() if exporter in {None, name}]


def of_process(process: LetterProcess, exporter: str | None) -> list[Place]:
    """What a process has open.

    Raises:
        BatchQueueError: it can't be asked.
        ConfigError: it has nothing, or not the exporter that is named.
    """
    if process.fault:
        raise BatchQueueError(process.fault)
    found = [each for each in process.holders if exporter in {None, each.name}]
    if not found:
        known = plain(", ".join(each.name for each in process.holders))
        if exporter is None:
            raise ConfigError(f"process {process.name}: has neither an exporter nor a durable queue open")
        raise ConfigError(
            f"--exporter {exporter}: process {process.name} has none of that name open; "
            f"{f'there are {known}' if known else 'there is none'}"
        )
    return [place_of(process, each) for each in found]


def of_name(name: str, exporter: str | None, processes: Sequence[LetterProcess], verb: str) -> list[Place]:
    """The one exporter of that name in all running processes.

    Raises:
        ConfigError: there is none, or more than one.
    """
    found = [(process, each) for process in processes for each in process.holders if each.name == name]
    if not found:
        silent = "".join(f"; process {each.name} can't be asked: {each.fault}" for each in processes if each.fault)
        raise ConfigError(
            f"{name}: can't be read (No such file or directory), and no running process of this user has an exporter "
            f"of that name; give a file, a directory, a process's number or an exporter's name{silent}"
        )
    if exporter is not None:
        raise ConfigError(f"--exporter {exporter}: {name} is an exporter already; leave one of them out")
    if len(found) > 1:
        raise ConfigError(f"{name}: {_several(found, verb)}")
    return [place_of(*found[0])]


def _several(found: Sequence[tuple[LetterProcess, LetterHolder]], verb: str) -> str:
    """Which ones have a name, and how to name one of them."""
    ways: list[str] = []
    for process, each in found:
        line = ["batchqueue", "dead-letters", verb, process.name, f"--exporter={each.name}"]
        ways.append(f"`{shlex.join(line)}`")
    return f"{len(found)} exporters have that name; say which: {plain(', '.join(ways))}"


def place_of(process: LetterProcess, holder: LetterHolder) -> Place:
    """What a process has open, as a place."""
    return Place(holder.name, None if holder.path is None else Path(holder.path), process, holder)


def holding(
    path: Path, processes: Iterable[LetterProcess], same: Callable[[str, Path], bool] | None = None
) -> list[tuple[LetterProcess, LetterHolder]]:
    """The processes that have a directory open, by this name of it or another."""
    alike = same or _same
    return [
        (process, each)
        for process in processes
        for each in process.holders
        if each.path is not None and alike(each.path, path)
    ]


def _same(one: str, other: Path) -> bool:
    try:
        return other.samefile(one)
    except OSError:
        return False
