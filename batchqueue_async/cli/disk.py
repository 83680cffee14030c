"""`batchqueue disk`: what a durable queue's directory holds. All but `repair`, `restore`, `requeue`, `purge` only read.

`EXIT` says what the exit status means.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli import letters as letters_file
from batchqueue_async.durable import DurableQueue
from batchqueue_async.durable.disk import inspect

if TYPE_CHECKING:
    import argparse

    from batchqueue_async.cli.main import Commands
    from batchqueue_async.durable.disk.inspect import Overview

_PREVIEW = 60
EXIT = (
    "Exit status: 0 all is well; 1 something is damaged, missing or could not be repaired; "
    "2 the command could not do its work, and says why on standard error."
)
_SECRETS = "show the payloads: they may hold what others must not see"


def register(commands: Commands) -> None:
    """Add `disk` and its own commands."""
    about = "inspect, verify and repair a durable queue's directory"
    disk = commands.add_parser("disk", help=about, description=f"{about[0].upper()}{about[1:]}. {EXIT}")
    actions = disk.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add(actions, "inspect", _inspect, "segments, owner, counts, and what opening would repair")
    _add(actions, "verify", _verify, "read and check every record; status 1 when something is damaged")
    dump = _add(actions, "dump", _dump, "the records, one a line")
    dump.add_argument("--settled", action="store_true", help="also records that are acknowledged and not yet deleted")
    dump.add_argument("--limit", type=int, default=None, metavar="N", help="stop after N records")
    dump.add_argument("--payloads", action="store_true", help=_SECRETS)
    _add(actions, "stats", _stats, "counts alone")
    repair = _add(actions, "repair", _repair, "do what opening the queue would do: cut, seal, quarantine")
    repair.add_argument("--dry-run", action="store_true", help="only say what would be done")
    letters = actions.add_parser(
        "dead-letters",
        help="list or export the dead letters, delete them, or put them into the queue again",
        description=f"The dead letters of a queue. {EXIT}",
    )
    verbs = letters.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = _add(verbs, "list", _list, "the dead letters, one a line")
    listing.add_argument("--payloads", action="store_true", help=_SECRETS)
    requeue = _add(verbs, "requeue", _requeue, "put dead letters into the queue again; needs the queue to be closed")
    purge = _add(verbs, "purge", _purge, "delete dead letters; needs the queue to be closed")
    purge.add_argument("seq", type=int, nargs="*", help="numbers from `list`; all when none is given")
    purge.add_argument(
        "--before", type=float, default=None, metavar="SECONDS", help="that died before this, since 1970"
    )
    export = _add(
        verbs, "export", _list, "write dead letters to a file, with what is known of them", letters_file.DESCRIPTION
    )
    letters_file.add_arguments(export, Path)
    restore = _add(actions, "restore", _restore, "put a segment back from the quarantine; needs the queue to be closed")
    restore.add_argument("name", help="its name in `quarantine/`, as `inspect` shows it")
    requeue.add_argument("seq", type=int, nargs="*", help="numbers from `list`; all when none is given")


def _add(actions: Any, name: str, run: Any, text: str, about: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=about or f"{text[0].upper()}{text[1:]}. {EXIT}"
    )
    parser.add_argument("path", type=Path, metavar="DIRECTORY", help="the queue's directory")
    parser.add_argument("--json", action="store_true", help="JSON, one document (dump and list: one a line)")
    parser.set_defaults(run=run)
    return parser


def _say(text: str) -> None:
    print(text)  # noqa: T201 - a command line speaks by printing


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _inspect(arguments: argparse.Namespace) -> int:
    view = inspect.overview(arguments.path)
    if arguments.json:
        _say(json.dumps(inspect.as_dict(view), indent=2))
        return 0
    _say_counts(view)
    for entry in view.segments:
        state = "sealed" if entry.sealed else "open"
        _say(
            f"  {entry.name}  {entry.first_seq}..{entry.next_seq - 1}  {entry.unsettled} of {entry.records} records"
            f" wait  {entry.bytes} bytes  {state}  {_when(entry.created_at)}"
        )
    for name in view.quarantined:
        _say(f"  quarantine/{name}")
    # While an owner is running, its open segment only looks unfinished.
    for words in () if view.owner else view.repairs:
        _say(f"  opening would: {words}")
    return 0


def _say_counts(view: Overview) -> None:
    owner = f"owned by {view.owner}" if view.owner else "closed"
    _say(f"{view.path}: queue {view.queue_id}, format {view.format}, {owner}")
    _say(
        f"  {view.records} records wait, {view.dead_letters} dead letters, {len(view.segments)} segments, "
        f"{view.disk_bytes} bytes on disk, {view.free_bytes} bytes free, next sequence number {view.next_seq}"
    )


def _stats(arguments: argparse.Namespace) -> int:
    view = inspect.overview(arguments.path)
    if arguments.json:
        counts = inspect.as_dict(view)
        counts["segments"] = len(view.segments)
        counts["quarantined"] = len(view.quarantined)
        counts.pop("repairs")
        _say(json.dumps(counts))
    else:
        _say_counts(view)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    result = inspect.verify(arguments.path)
    if arguments.json:
        _say(json.dumps(inspect.as_dict(result), indent=2))
    else:
        _say(f"{arguments.path}: {result.segments} segments, {result.frames} frames, {result.records} records checked")
        for problem in result.problems:
            _say("  " + "  ".join(f"{key}={value}" for key, value in problem.items()))
    return 1 if result.problems else 0


def _dump(arguments: argparse.Namespace) -> int:
    for at, record in enumerate(inspect.dump(arguments.path, settled=arguments.settled)):
        if arguments.limit is not None and at >= arguments.limit:
            break
        shown = asdict(record)
        _say_record(shown, record.payload, payloads=arguments.payloads, as_json=arguments.json)
    return 0


def _say_record(shown: dict[str, Any], payload: bytes, *, payloads: bool, as_json: bool) -> None:
    shown.pop("payload")
    if isinstance(shown.get("reason"), str) and not as_json:
        # One letter per line, also when its reason holds line breaks.
        shown["reason"] = repr(shown["reason"])
    shown["size"] = len(payload)
    if payloads:
        shown["payload"] = payload.hex() if as_json else repr(payload[:_PREVIEW])
    _say(json.dumps(shown) if as_json else "  ".join(f"{key}={value}" for key, value in shown.items()))


def _repair(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        found = inspect.survey(arguments.path)
        words = [repair.words for repair in found.repairs]
        if arguments.json:
            _say(json.dumps({"repairs": words}, indent=2))
        else:
            _say("\n".join(f"would {entry}" for entry in words) or "nothing to repair")
        return 0
    inspect.survey(arguments.path)
    report = asyncio.run(_open_and_close(arguments.path))
    if arguments.json:
        _say(json.dumps(asdict(report), indent=2))
    else:
        _say(
            "\n".join([*report.repairs, *(f"failed: {entry}" for entry in report.failed_repairs)])
            or "nothing to repair"
        )
    return 1 if report.failed_repairs else 0


async def _open_and_close(path: Path) -> Any:
    async with DurableQueue.open(path) as queue:
        return queue.recovery


def _list(arguments: argparse.Namespace) -> int:
    damaged: list[str] = []
    for letter in inspect.list_dead_letters(arguments.path, on_damage=damaged.append):
        shown = {
            "seq": letter.seq,
            "original_seq": letter.original_seq,
            "attempts": letter.attempts,
            "enqueued_at": letter.enqueued_at,
            "died_at": letter.died_at,
            "reason": letter.reason,
            "payload": b"",
        }
        _say_record(shown, letter.payload, payloads=arguments.payloads, as_json=arguments.json)
    for words in damaged:
        print(f"batchqueue: {words}; not in the list", file=sys.stderr)  # noqa: T201 - as `_say`
    return 1 if damaged else 0


def _requeue(arguments: argparse.Namespace) -> int:
    inspect.survey(arguments.path)
    count = asyncio.run(_put_back(arguments.path, arguments.seq or None))
    _say(json.dumps({"requeued": count}) if arguments.json else f"{count} dead letters put into the queue again")
    return 0


def _purge(arguments: argparse.Namespace) -> int:
    inspect.survey(arguments.path)
    count = asyncio.run(_delete(arguments.path, arguments.seq or None, arguments.before))
    _say(json.dumps({"purged": count}) if arguments.json else f"{count} dead letters deleted")
    return 0


async def _delete(path: Path, seqs: list[int] | None, before: float | None) -> int:
    async with DurableQueue.open(path) as queue:
        return await queue.purge_dead_letters(seqs, before=before)


def _restore(arguments: argparse.Namespace) -> int:
    name = inspect.restore(arguments.path, arguments.name)
    _say(json.dumps({"restored": name}) if arguments.json else f"{name} is back; open or repair the queue")
    return 0


async def _put_back(path: Path, seqs: list[int] | None) -> int:
    async with DurableQueue.open(path) as queue:
        return await queue.requeue_dead_letters(seqs)
