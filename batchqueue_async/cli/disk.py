"""`batchqueue disk`: what a durable queue's directory holds. All but `repair`, `restore`, `requeue`, `purge` only read.

`EXIT` says what the exit status means.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli import letters as letters_file
from batchqueue_async.cli.commands import PATH, Argument, command, complain, flag, group, option, say
from batchqueue_async.durable import DurableQueue
from batchqueue_async.durable.disk import inspect
from batchqueue_async.errors import LockedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    import click

    from batchqueue_async.cli.commands import Arguments, Group
    from batchqueue_async.durable.disk.inspect import Overview

_PREVIEW = 60
EXIT = (
    "Exit status: 0 all is well; 1 something is damaged, missing or could not be repaired; "
    "2 the command could not do its work, and says why on standard error."
)
_SECRETS = "show the payloads: they may hold what others must not see"


def make() -> Group:
    """The command with its own."""
    about = "inspect, verify and repair a durable queue's directory"
    seqs = Argument("seq", "[SEQ]...", "numbers from `list`; all when none is given", type=int, nargs=-1)
    payloads = flag("--payloads", _SECRETS)
    before = option("--before", type=float, metavar="SECONDS", text="that died before this, since 1970")
    name = Argument("name", "NAME", "its name in `quarantine/`, as `inspect` shows it")
    letters = group(
        "dead-letters",
        "list or export the dead letters, delete them, or put them into the queue again",
        [
            _command("list", list_letters, "the dead letters, one per line", payloads),
            _command(
                "requeue", requeue_letters, "put dead letters into the queue again; needs the queue to be closed", seqs
            ),
            _command("purge", purge_letters, "delete dead letters; needs the queue to be closed", seqs, before),
            _command(
                "export",
                letters_file.export,
                "write dead letters to a file, with what is known of them",
                *letters_file.params(),
                about=letters_file.DESCRIPTION,
            ),
        ],
        metavar="VERB",
        about=f"The dead letters of a queue. {EXIT}",
    )
    actions = [
        _command("inspect", _inspect, "segments, owner, counts, and what opening would repair"),
        _command("verify", _verify, "read and check every record; status 1 when something is damaged"),
        _command(
            "dump",
            _dump,
            "the records, one per line",
            flag("--settled", "also records that are acknowledged and not yet deleted"),
            option("--limit", type=int, metavar="N", text="stop after N records"),
            payloads,
        ),
        _command("stats", _stats, "counts alone"),
        _command(
            "repair",
            _repair,
            "do what opening the queue would do: cut, seal, quarantine",
            flag("--dry-run", "only say what would be done"),
        ),
        letters,
        _command("restore", _restore, "put a segment back from the quarantine; needs the queue to be closed", name),
    ]
    return group("disk", about, actions, metavar="ACTION", about=f"{about[0].upper()}{about[1:]}. {EXIT}")


def _command(
    name: str, run: Callable[[Arguments], int], text: str, *more: click.Parameter, about: str = ""
) -> click.Command:
    params = [
        Argument("path", "DIRECTORY", "the queue's directory", type=PATH),
        *more,
        flag("--json", "JSON, one document (dump and list: one per line)"),
    ]
    return command(name, run, text, params, about=about or f"{text[0].upper()}{text[1:]}. {EXIT}")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _inspect(arguments: Arguments) -> int:
    view = inspect.overview(arguments.path)
    if arguments.json:
        say(json.dumps(inspect.as_dict(view), indent=2))
        return 0
    _say_counts(view)
    for entry in view.segments:
        state = "sealed" if entry.sealed else "open"
        say(
            f"  {entry.name}  {entry.first_seq}..{entry.next_seq - 1}  {entry.unsettled} of {entry.records} records"
            f" wait  {entry.bytes} bytes  {state}  {_when(entry.created_at)}"
        )
    for name in view.quarantined:
        say(f"  quarantine/{name}")
    # While an owner is running, its open segment only looks unfinished.
    for words in () if view.owner else view.repairs:
        say(f"  opening would: {words}")
    return 0


def _say_counts(view: Overview) -> None:
    owner = f"owned by {view.owner}" if view.owner else "closed"
    say(f"{view.path}: queue {view.queue_id}, format {view.format}, {owner}")
    say(
        f"  {view.records} records wait, {view.dead_letters} dead letters, {len(view.segments)} segments, "
        f"{view.disk_bytes} bytes on disk, {view.free_bytes} bytes free, next sequence number {view.next_seq}"
    )


def _stats(arguments: Arguments) -> int:
    view = inspect.overview(arguments.path)
    if arguments.json:
        counts = inspect.as_dict(view)
        counts["segments"] = len(view.segments)
        counts["quarantined"] = len(view.quarantined)
        counts.pop("repairs")
        say(json.dumps(counts))
    else:
        _say_counts(view)
    return 0


def _verify(arguments: Arguments) -> int:
    result = inspect.verify(arguments.path)
    if arguments.json:
        say(json.dumps(inspect.as_dict(result), indent=2))
    else:
        say(f"{arguments.path}: {result.segments} segments, {result.frames} frames, {result.records} records checked")
        for problem in result.problems:
            say("  " + "  ".join(f"{key}={value}" for key, value in problem.items()))
    return 1 if result.problems else 0


def _dump(arguments: Arguments) -> int:
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
    say(json.dumps(shown) if as_json else "  ".join(f"{key}={value}" for key, value in shown.items()))


def _repair(arguments: Arguments) -> int:
    if arguments.dry_run:
        found = inspect.survey(arguments.path)
        words = [repair.words for repair in found.repairs]
        if arguments.json:
            say(json.dumps({"repairs": words}, indent=2))
        else:
            say("\n".join(f"would {entry}" for entry in words) or "nothing to repair")
        return 0
    inspect.survey(arguments.path)
    report = asyncio.run(_open_and_close(arguments.path))
    if arguments.json:
        say(json.dumps(asdict(report), indent=2))
    else:
        say(
            "\n".join([*report.repairs, *(f"failed: {entry}" for entry in report.failed_repairs)])
            or "nothing to repair"
        )
    return 1 if report.failed_repairs else 0


async def _open_and_close(path: Path) -> Any:
    async with DurableQueue.open(path) as queue:
        return queue.recovery


def list_letters(arguments: Arguments) -> int:
    """Say the dead letters of a directory, one per line."""
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
        complain(f"batchqueue: {words}; not in the list")
    return 1 if damaged else 0


def requeue_letters(arguments: Arguments) -> int:
    """Put dead letters of a directory into its queue again."""
    inspect.survey(arguments.path)
    count = asyncio.run(_put_back(arguments.path, list(arguments.seq) or None))
    say(json.dumps({"requeued": count}) if arguments.json else f"{count} dead letters put into the queue again")
    return 0


def purge_letters(arguments: Arguments) -> int:
    """Delete dead letters of a directory."""
    inspect.survey(arguments.path)
    count = asyncio.run(_delete(arguments.path, list(arguments.seq) or None, arguments.before))
    say(json.dumps({"purged": count}) if arguments.json else f"{count} dead letters deleted")
    return 0


def _restore(arguments: Arguments) -> int:
    name = inspect.restore(arguments.path, arguments.name)
    say(json.dumps({"restored": name}) if arguments.json else f"{name} is back; open or repair the queue")
    return 0


@asynccontextmanager
async def _own(path: Path, *calls: str) -> AsyncGenerator[DurableQueue]:
    """The queue, which nobody else has open; else the error names the calls that its owner may make."""
    try:
        async with DurableQueue.open(path) as queue:
            yield queue
    except LockedError as error:
        owner = inspect.overview(path).owner or "another process"
        raise LockedError(
            f"{path} is open in {owner}, and nothing was changed; stop that, run this again, and start it, or let its "
            f"code call {' or '.join(calls)}"
        ) from error


async def _put_back(path: Path, seqs: list[int] | None) -> int:
    async with _own(path, "Exporter.requeue_dead_letters()", "DurableQueue.requeue_dead_letters()") as queue:
        return await queue.requeue_dead_letters(seqs)


async def _delete(path: Path, seqs: list[int] | None, before: float | None) -> int:
    async with _own(path, "DurableQueue.purge_dead_letters()") as queue:
        return await queue.purge_dead_letters(seqs, before=before)
