"""`batchqueue disk`: what a durable queue's directory holds. All but `repair`, `restore`, `requeue`, `purge` only read.

`EXIT` says what the exit status means.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli import letters as letters_file
from batchqueue_async.cli.commands import PATH, Argument, command, complain, flag, group, option, say
from batchqueue_async.durable import DurableQueue
from batchqueue_async.durable.disk import inspect
from batchqueue_async.errors import LockedError
from batchqueue_async.observe.letter_client import Changed, LettersCutOffError
from batchqueue_async.observe.letter_requests import PATIENCE, Stall, missing, stalled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
    from pathlib import Path

    import click

    from batchqueue_async.cli.commands import Arguments, Group
    from batchqueue_async.durable.dead_letters import DeadLetter
    from batchqueue_async.durable.disk.inspect import Overview
    from batchqueue_async.observe.letter_requests import Verb

_PREVIEW = 60
_GLANCE = 0.25
_DONE: dict[Verb, str] = {"requeue": "put into the queue again", "purge": "deleted"}
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
    say_letters(inspect.list_dead_letters(arguments.path, on_damage=damaged.append), arguments)
    return say_damaged(damaged)


def say_letters(letters: Iterable[DeadLetter], arguments: Arguments) -> None:
    """Say dead letters, one per line."""
    for letter in letters:
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


def say_damaged(damaged: Sequence[str]) -> int:
    """Say what could not be read; the exit status."""
    for words in damaged:
        complain(f"batchqueue: {words}; not in the list")
    return 1 if damaged else 0


def requeue_letters(arguments: Arguments) -> int:
    """Put dead letters of a directory into its queue again."""
    return _change(arguments, "requeue", None)


def purge_letters(arguments: Arguments) -> int:
    """Delete dead letters of a directory."""
    return _change(arguments, "purge", arguments.before)


def _change(arguments: Arguments, verb: Verb, before: float | None) -> int:
    seqs = list(arguments.seq) or None
    try:
        changed = change_here(arguments.path, verb, seqs=seqs, before=before)
    except LockedError as error:
        line = shlex.join(["batchqueue", "dead-letters", verb, str(arguments.path)])
        raise LockedError(
            f"{error}; `{line}` asks the process that has it, and its code can call DurableQueue.{verb}_dead_letters()"
        ) from None
    return say_changed(arguments, verb, changed)


def say_changed(arguments: Arguments, verb: Verb, changed: Changed, *, process: str | None = None) -> int:
    """Say what became of a change; the exit status. A process is named if it has done it."""
    letters_file.say_missing(changed.missing)
    if changed.dropped:
        complain(
            f"batchqueue: the send queue was full, and dropped {changed.dropped} records meanwhile, as its overflow "
            "says; put fewer back at once"
        )
    if arguments.json:
        said: dict[str, Any] = {f"{verb}d": changed.count}
        if process is not None:
            said["process"] = int(process)
        if changed.missing:
            said["missing"] = list(changed.missing)
        if changed.dropped:
            said["dropped"] = changed.dropped
        say(json.dumps(said))
    else:
        by = "" if process is None else f", by process {process}"
        say(f"{changed.count} dead letters {_DONE[verb]}{by}")
    return 1 if changed.missing or changed.dropped else 0


def change_here(
    path: Path,
    verb: Verb,
    *,
    seqs: Sequence[int] | None,
    before: float | None,
    timeout: float = PATIENCE,
    progress: Callable[[int], object] | None = None,
) -> Changed:
    """Put dead letters of a directory back, or delete them; nobody may have it open.

    Raises:
        LockedError: somebody has.
        LettersCutOffError: nothing went on for `timeout` seconds.
    """
    inspect.survey(path)
    done: set[int] = set()
    count = 0

    def came(numbers: Sequence[int]) -> None:
        nonlocal count
        count += len(numbers)
        if seqs is not None:
            done.update(numbers)
        if progress is not None:
            progress(count)

    async def act() -> None:
        async with _own(path) as queue:
            if verb == "requeue":
                work = asyncio.ensure_future(queue.requeue_dead_letters(seqs, progress=came))
            else:
                work = asyncio.ensure_future(queue.purge_dead_letters(seqs, before=before, progress=came))
            stall = Stall(time.monotonic())
            try:
                while not (await asyncio.wait((work,), timeout=_GLANCE))[0]:
                    if stall.seconds(count, time.monotonic()) >= timeout:
                        raise LettersCutOffError(stalled(str(path), timeout), count, begun=True)
            finally:
                work.cancel()
                await asyncio.wait((work,))
            work.result()

    asyncio.run(act())
    return Changed(count, missing(seqs, done))


def _restore(arguments: Arguments) -> int:
    name = inspect.restore(arguments.path, arguments.name)
    say(json.dumps({"restored": name}) if arguments.json else f"{name} is back; open or repair the queue")
    return 0


@asynccontextmanager
async def _own(path: Path) -> AsyncGenerator[DurableQueue]:
    """The queue, which nobody else has open."""
    try:
        async with DurableQueue.open(path) as queue:
            yield queue
    except LockedError as error:
        owner = inspect.overview(path).owner or "another process"
        raise LockedError(f"{path} is open in {owner}, and nothing was changed") from error
