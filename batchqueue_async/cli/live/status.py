"""`batchqueue status`: how processes and their components are, once, for people and scripts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli.commands import command, complain, flag, plain, raw, say
from batchqueue_async.cli.live import processes
from batchqueue_async.observe.words import duration

if TYPE_CHECKING:
    from batchqueue_async.cli.commands import Arguments, Command
    from batchqueue_async.cli.live.processes import Answer

EPILOG = """\
exit status:
  0  every process that was asked is fine
  1  something is degraded, down, or not ready
  2  nobody could be asked, or one did not answer
"""


def make() -> Command:
    """The command."""
    return command(
        "status",
        _run,
        "how processes and their components are",
        [*processes.params(), flag("--json", "JSON, one document: a list with an object per process")],
        epilog=raw(EPILOG),
    )


def _run(arguments: Arguments) -> int:
    found = processes.answers(arguments)
    if arguments.json:
        say(json.dumps([dict(each.said) or {"target": each.name, "error": each.error} for each in found], indent=2))
    else:
        for each in found:
            _show(each)
    return max(each.code for each in found)


def say_silent(answer: Answer) -> None:
    """Say that a process did not answer."""
    complain(f"batchqueue: {plain(answer.error)}")


def _show(answer: Answer) -> None:
    if answer.error:
        say_silent(answer)
        return
    said, status = answer.said, answer.said["status"]
    ready = "ready" if status["ready"] else "not ready"
    up = duration(max(0.0, status["at"] - said["started"]))
    live = "" if status["live"] else ", not live"
    say(f"process {said['pid']}: {status['state']}, {ready}{live}, {status['phase']} for {up}")
    say(f"  {plain(said['sentence'])}")
    rows = [_row(each, status["at"]) for each in status["components"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _row(component: dict[str, Any], now: float) -> tuple[str, str, str, str]:
    since = f"for {duration(max(0.0, now - component['since']))}"
    return component["state"], plain(component["component"]), since, plain(component["problem"])
