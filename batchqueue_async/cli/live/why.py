"""`batchqueue why`: what is wrong with processes, since when, and what to do, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchqueue_async.cli.commands import command, plain, raw, say
from batchqueue_async.cli.live import processes
from batchqueue_async.cli.live.status import EPILOG, say_silent

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Arguments, Command


def make() -> Command:
    """The command."""
    text = "what is wrong, since when, and what to do"
    return command("why", _run, text, processes.params(), epilog=raw(EPILOG))


def _run(arguments: Arguments) -> int:
    found = processes.answers(arguments)
    for each in found:
        if each.error:
            say_silent(each)
            continue
        before = f"process {each.said['pid']}: " if len(found) > 1 else ""
        for text in each.said["why"]:
            say(f"{before}{plain(text)}")
    return max(each.code for each in found)
