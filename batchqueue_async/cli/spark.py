"""`batchqueue spark`: what Spark's queries and jobs noted as delivered, and what their tasks staged.

Exit status: 0 all is well, 1 something was found that needs a look (`staging list`: what is a week old) or there was
nothing to do (`reset`, `prune`), 2 the command could not do its work.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from batchqueue_async._support.redaction import without_credentials
from batchqueue_async._support.units import parse_seconds
from batchqueue_async.cli.commands import Argument, command, flag, group, option, say
from batchqueue_async.errors import ConfigError
from batchqueue_async.sinks.base import BatchKey, LedgerSink, PrunableSink, Sink
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.sinks.sqlite.sink import SqliteSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchqueue_async.cli.commands import Arguments, Group
    from batchqueue_async.sinks.base import Delivered, StagedPart

_OLD = 7 * 24 * 3600.0
_TARGET = "a SQLite file, a directory of JSON lines, a ledger file, or a PostgreSQL DSN (env:NAME and file:/path too)"
_EXIT = "exit status: 0 all is well, 1 something old is staged or nothing was there to do, 2 it could not be done"
_SQLITE = b"SQLite format 3\0"
_DATABASE = ("postgresql://", "postgres://", "env:", "file:")


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """An age as seconds."""
    found = parse_seconds(value)
    if found is None:
        raise click.BadParameter(f'{value!r} is not a time; give one such as "12h" or "30d"', ctx, param)
    return found


def make() -> Group:
    """The command with its own."""
    ledger = group(
        "ledger",
        "which batches of which queries are in, so that they are not delivered again",
        [
            _command("list", _list_ledger, "each source, its last batch, and when that was noted"),
            _command(
                "reset",
                _reset_ledger,
                "forget a source: what its query repeats is delivered again",
                option("--source", required=True, text="a name from `list`; with all of its writes and parts"),
            ),
            _command("prune", _prune_ledger, "forget the sources that noted nothing for long", *_age("90d")),
        ],
        metavar="ACTION",
        epilog=_EXIT,
    )
    staging = group(
        "staging",
        "what tasks wrote and nobody has published",
        [
            _command("list", _list_staging, "each part; status 1 when one was not changed for a week"),
            _command(
                "reset",
                _reset_staging,
                "drop what is staged for a source; its job must have ended",
                option("--source", required=True, text="a source from `list`"),
                option("--batch", type=int, metavar="N", text="this batch alone; all when none is given"),
            ),
            _command("prune", _prune_staging, "drop what was not changed for long", *_age("7d")),
        ],
        metavar="ACTION",
        epilog=_EXIT,
    )
    text = "list, reset and prune what Spark's queries delivered and staged"
    return group("spark", text, [ledger, staging], metavar="THING", epilog=_EXIT)


def _command(name: str, run: Callable[[Arguments], int], text: str, *more: click.Parameter) -> click.Command:
    params = [
        Argument("target", "TARGET", _TARGET),
        option("--table", default="rows", text="the table of a database (rows)"),
        option("--namespace", metavar="SCHEMA", text="the schema of the table, in PostgreSQL"),
        *more,
        flag("--json", "JSON, one document"),
    ]
    return command(name, run, text, params, epilog=_EXIT)


def _age(default: str) -> list[click.Parameter]:
    text = f'such as "12h" or "30d" ({default})'
    return [
        option("--older-than", callback=_seconds, default=default, metavar="AGE", text=text),
        flag("--dry-run", "only say what would go"),
    ]


# --- targets


def _sink(arguments: Arguments) -> Sink:
    """The sink that the target belongs to."""
    target: str = arguments.target
    if target.startswith(_DATABASE):
        # Only here is what it needs asked for.
        postgres: Any = importlib.import_module("batchqueue_async.sinks.postgres")
        made: Sink = postgres.PostgresSink(target, arguments.table, namespace=arguments.namespace)
        return made
    path = Path(target)
    if path.is_dir():
        return JsonLinesSink(path)
    if _starts_with(target, _SQLITE):
        return SqliteSink(path, arguments.table)
    raise ConfigError(f"{target!r} is neither a SQLite file nor a directory nor a DSN; give one of them")


def _starts_with(target: str, mark: bytes) -> bool:
    path = Path(target)
    if not path.exists():
        raise ConfigError(f"{without_credentials(target)!r} does not exist; give {_TARGET}")
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


class _FileNotes:
    """A ledger file, asked as a sink is."""

    def __init__(self, path: str) -> None:
        self._ledger: Any = importlib.import_module("batchqueue_async.spark.writes.ledger").FileLedger(path)

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def delivered(self) -> list[Delivered]:
        """Its notes."""
        found: list[Delivered] = self._ledger.notes()
        return found

    async def forget(self, sources: list[str]) -> int:
        """Take back notes."""
        return int(self._ledger.forget(sources))


def _notes(arguments: Arguments) -> Any:
    """What keeps the notes of the target."""
    path = Path(arguments.target)
    if not arguments.target.startswith(_DATABASE) and not path.is_dir() and not _starts_with(arguments.target, _SQLITE):
        return _FileNotes(arguments.target)
    sink = _sink(arguments)
    if not isinstance(sink, LedgerSink):
        raise ConfigError(
            f"{arguments.target!r} has no ledger: the name of each published batch says that it is in; to have one "
            "delivered again, remove its directory"
        )
    return sink


def _staged(arguments: Arguments) -> PrunableSink:
    sink = _sink(arguments)
    if not isinstance(sink, PrunableSink):
        raise ConfigError(f"{arguments.target!r}: nothing is staged for such a target; give {_TARGET}")
    return sink


# --- the ledger


class _Kept(NamedTuple):
    notes: list[Delivered]
    gone: list[Delivered]


async def _ask_ledger(arguments: Arguments, choose: Any, *, dry: bool = False) -> _Kept:
    """The notes, and those that `choose` takes, which are taken back."""
    keeper = _notes(arguments)
    try:
        await keeper.open()
        notes: list[Delivered] = await keeper.delivered()
        gone = [each for each in notes if choose(each)]
        if gone and not dry:
            await keeper.forget([each.key.source for each in gone])
    finally:
        await keeper.close()
    return _Kept([each for each in notes if each not in gone], gone)


def _none(_: Delivered) -> bool:
    return False


def _list_ledger(arguments: Arguments) -> int:
    notes = asyncio.run(_ask_ledger(arguments, _none)).notes
    _show(arguments, [_note(each) for each in notes], "no batch is noted")
    return 0


def _reset_ledger(arguments: Arguments) -> int:
    source: str = arguments.source

    def chosen(note: Delivered) -> bool:
        # Its further writes and its claim come after a slash, the checkpoint of a name after an at sign.
        return note.key.source == source or note.key.source.startswith((f"{source}/", f"{source}@"))

    gone = asyncio.run(_ask_ledger(arguments, chosen)).gone
    _show(arguments, [_note(each) for each in gone], f"no source is {source!r}; `list` shows them", "forgotten: ")
    return 0 if gone else 1


def _prune_ledger(arguments: Arguments) -> int:
    before = time.time() - arguments.older_than

    def chosen(note: Delivered) -> bool:
        return note.noted is not None and note.noted < before

    gone = asyncio.run(_ask_ledger(arguments, chosen, dry=arguments.dry_run)).gone
    words = "would be forgotten: " if arguments.dry_run else "forgotten: "
    _show(arguments, [_note(each) for each in gone], "nothing is that old", words)
    return 0 if gone else 1


def _note(note: Delivered) -> dict[str, Any]:
    return {"source": note.key.source, "batch": note.key.number, "noted": _when(note.noted)}


# --- what is staged


def _list_staging(arguments: Arguments) -> int:
    parts = asyncio.run(_ask_staging(arguments))
    _show(arguments, [_part(each) for each in parts], "nothing is staged")
    old = time.time() - _OLD
    return 1 if any(each.changed is not None and each.changed < old for each in parts) else 0


def _reset_staging(arguments: Arguments) -> int:
    def chosen(key: BatchKey) -> bool:
        return key.source == arguments.source and arguments.batch in {None, key.number}

    parts = asyncio.run(_drop(arguments, chosen))
    _show(arguments, [_part(each) for each in parts], f"nothing is staged for {arguments.source!r}", "dropped: ")
    return 0 if parts else 1


def _prune_staging(arguments: Arguments) -> int:
    parts = asyncio.run(_prune(arguments))
    words = "would be dropped: " if arguments.dry_run else "dropped: "
    _show(arguments, [_part(each) for each in parts], "nothing is that old", words)
    return 0 if parts else 1


async def _ask_staging(arguments: Arguments) -> list[StagedPart]:
    return await _staged(arguments).staged()


async def _drop(arguments: Arguments, chosen: Any) -> list[StagedPart]:
    sink = _staged(arguments)
    parts = [each for each in await sink.staged() if chosen(each.key)]
    for key in dict.fromkeys(each.key for each in parts):
        await sink.discard(key)
    return parts


async def _prune(arguments: Arguments) -> list[StagedPart]:
    sink = _staged(arguments)
    before = await sink.staged()
    if arguments.dry_run:
        limit = time.time() - arguments.older_than
        newest: dict[BatchKey, float] = {}
        for each in before:
            newest[each.key] = max(newest.get(each.key, 0.0), time.time() if each.changed is None else each.changed)
        return [each for each in before if newest[each.key] < limit]
    gone = await sink.prune(arguments.older_than)
    return [each for each in before if each.key in gone]


def _part(part: StagedPart) -> dict[str, Any]:
    found = part._asdict()
    key = found.pop("key")
    return {"source": key.source, "batch": key.number, **found, "changed": _when(part.changed)}


# --- output


def _show(arguments: Arguments, rows: list[dict[str, Any]], nothing: str, words: str = "") -> None:
    if arguments.json:
        say(json.dumps(rows, indent=2))
    elif not rows:
        say(f"{without_credentials(arguments.target)}: {nothing}")
    for row in [] if arguments.json else rows:
        say(words + "  ".join(f"{name}={'unknown' if value is None else value}" for name, value in row.items()))


def _when(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
