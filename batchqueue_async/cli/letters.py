"""`export` of `batchqueue dead-letters`: the letters into a file that only its owner can read."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

import click

from batchqueue_async.cli.commands import PATH, Argument, complain, flag, option, say
from batchqueue_async.durable.disk import inspect
from batchqueue_async.errors import BatchQueueError, ConfigError
from batchqueue_async.observe.letter_requests import letter_as_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from batchqueue_async.cli.commands import Arguments
    from batchqueue_async.durable.dead_letters import DeadLetter

DESCRIPTION = """\
Write dead letters to a file, which is made with mode 0600 and appears whole or not at all. Nothing in the queue
changes, and its owner may be running. Exit status: 0 all of them are in the file; 1 some are damaged, which are named,
and the file holds the others; 2 nothing was written."""
_EVERY = 1.0
_NAMED = 20


def params() -> list[click.Parameter]:
    """What `export` takes besides the queue's directory."""
    return [
        Argument("output", "FILE", "the file to make", type=PATH),
        Argument("seq", "[SEQ]...", "numbers from `list`; all when none is given", type=int, nargs=-1),
        option(
            "--format",
            type=click.Choice(("jsonl", "raw")),
            default="jsonl",
            text="jsonl: one JSON object per line with everything that is known, the payload as base64; "
            "raw: the payloads alone, one per line (refused when a payload holds a line break)",
        ),
        flag("--force", "replace FILE when it is there"),
        flag("--progress", "say on standard error how far it is; by itself on a terminal"),
    ]


def export(arguments: Arguments) -> int:
    """Run the command; its exit status."""
    damaged: list[str] = []
    return export_letters(inspect.list_dead_letters(arguments.path, on_damage=damaged.append), damaged, arguments)


def export_letters(found: Iterable[DeadLetter], damaged: list[str], arguments: Arguments) -> int:
    """Write letters to a file; the exit status. `damaged` says in words what could not be read, once all are."""
    wanted = set(arguments.seq) or None
    letters = (letter for letter in found if wanted is None or letter.seq in wanted)
    progress = _Progress(wanted, shown=arguments.progress or sys.stderr.isatty())
    _write(arguments.output, _lines(letters, raw=arguments.format == "raw"), progress, force=arguments.force)
    for words in damaged:
        complain(f"batchqueue: {words}; not in the file")
    missing = sorted(progress.missing)
    say_missing(missing)
    count = {"exported": progress.count, "bytes": progress.size, "damaged": damaged, "missing": missing}
    say(
        json.dumps(count)
        if arguments.json
        else f"{progress.count} dead letters, {progress.size} bytes, written to {arguments.output}"
    )
    return 1 if damaged or missing else 0


def say_missing(missing: Sequence[int]) -> None:
    """Say which numbers are not there."""
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        complain(f"batchqueue: no dead letters with the numbers {', '.join(map(str, missing[:_NAMED]))}{more}")


def _lines(letters: Iterator[DeadLetter], *, raw: bool) -> Iterator[tuple[int, bytes]]:
    """Each letter's number and its line."""
    for letter in letters:
        if not raw:
            yield letter.seq, (json.dumps(letter_as_json(letter)) + "\n").encode()
        elif b"\n" in letter.payload:
            raise ConfigError(
                f"dead letter {letter.seq}: its payload holds a line break, so its lines would not be payloads "
                "any more; use --format jsonl"
            )
        else:
            yield letter.seq, letter.payload + b"\n"


class _Progress:
    """How far it is; said now and then."""

    def __init__(self, wanted: set[int] | None, *, shown: bool) -> None:
        self.missing = set(wanted or ())
        self._shown = shown
        self._next = time.monotonic() + _EVERY
        self.count = self.size = 0

    def add(self, seq: int, size: int) -> None:
        self.missing.discard(seq)
        self.count += 1
        self.size += size
        if self._shown and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            complain(f"{self.count} dead letters, {self.size} bytes")


def _write(output: Path, lines: Iterator[tuple[int, bytes]], progress: _Progress, *, force: bool) -> None:
    """Everything into a file next to `output`, which then takes its place: a half of an export is nobody's."""
    if os.path.lexists(output) and not force:
        raise BatchQueueError(f"{output}: is there already; give another name, or --force to replace it")
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(part, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _copy(file, lines, progress)
        if force:
            part.replace(output)
        else:
            # A name that has come up meanwhile is not overwritten.
            os.link(part, output)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
    descriptor = os.open(output.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(file: BinaryIO, lines: Iterator[tuple[int, bytes]], progress: _Progress) -> None:
    for seq, line in lines:
        file.write(line)
        progress.add(seq, len(line))
    file.flush()
    os.fsync(file.fileno())
