"""`batchqueue top`: processes in a terminal, every two seconds.

A thread per process reads the frames of its live page, so that one that does not answer holds up no other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from batchqueue_async.cli.commands import FAILED, FINE, WRONG, command, flag, raw
from batchqueue_async.cli.live import processes
from batchqueue_async.errors import BatchQueueError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchqueue_async.cli.commands import Arguments, Command
    from batchqueue_async.cli.live.processes import Asked

_TEXT = "watch processes in a terminal; Ctrl-C ends it"
_EPILOG = """\
exit status:
  0  it was ended, or, with --once, every process is fine
  1  with --once: something is degraded or down
  2  nobody could be asked, or one did not answer
"""
_EVERY = 2.0
_LOOKS = 3
"""After this number of screens, and when one ended, it looks which processes there are: a connection to each."""
_LOOK_EVERY = 0.05
_WIDE = 200
_MOST_WAITED = 2
SILENT = 5.0
"""Seconds without a frame after which a process counts as one that does not answer."""


def make() -> Command:
    """The command."""
    once = flag("--once", "show one frame and end; by itself where the output is not a terminal")
    return command("top", _run, _TEXT, [*processes.params(), once], epilog=raw(_EPILOG))


class FrameReader:
    """Reads the frames of one process, in a thread of its own.

    Attributes:
        name: what the process was asked for by.
        frame: its last frame.
        frames: how many there were.
        error: why there are no more; empty while there are, and where the process ended in order.
        ended: whether there will be no more.
    """

    def __init__(self, process: Asked) -> None:
        self.name = process.name
        self.frame: dict[str, Any] | None = None
        self.frames = 0
        self.error = ""
        self.ended = False
        self._client = process.client
        threading.Thread(target=self._read, name=f"batchqueue-top-{self.name}", daemon=True).start()

    def _read(self) -> None:
        try:
            for frame in self._client.frames(timeout=SILENT):
                self.frame = frame
                self.frames += 1
            if not self.frames:
                self.error = f"{self._client.target}: ended before it answered"
        except BatchQueueError as error:
            self.error = str(error)
        finally:
            # Last: who sees it may read the others.
            self.ended = True

    @property
    def compared(self) -> bool:
        """Whether there is a frame with rates, or will be none.

        A first frame, and a component that was not in the one before, have nothing to be compared with.
        """
        if self.ended:
            return True
        frame = self.frame
        if frame is None:
            return False
        moves = frame["queues"] or frame["exporters"]
        return not moves or frame["cards"]["in"] is not None or self.frames > _MOST_WAITED


def _run(arguments: Arguments) -> int:
    try:
        from rich.console import Console

        from batchqueue_async.cli.live.top_view import screen
    except ImportError as error:
        raise ConfigError("batchqueue top: needs rich; run: pip install 'batchqueue-async[service]'") from error
    terminal = sys.stdout.isatty()
    # What is not a terminal has no width: nothing is to be cut off there.
    console = Console(highlight=False, width=None if terminal or "COLUMNS" in os.environ else _WIDE)
    readers = [FrameReader(each) for each in processes.asked(arguments)]
    if not readers:
        raise BatchQueueError(processes.NOBODY)
    if arguments.once or not terminal:
        _wait(readers)
        console.print(screen(readers), crop=terminal)
        return _code(readers)
    return _watch(console, arguments, readers)


def _wait(readers: Sequence[FrameReader]) -> None:
    """Until each has frames to show, or does not answer."""
    end = time.monotonic() + SILENT
    while time.monotonic() < end and not all(each.compared for each in readers):
        time.sleep(_LOOK_EVERY)


def _code(readers: Sequence[FrameReader]) -> int:
    if any(each.frame is None for each in readers):
        return FAILED
    return FINE if all(each.frame and each.frame["state"] == "ok" for each in readers) else WRONG


def _watch(console: Any, arguments: Arguments, readers: list[FrameReader]) -> int:
    from rich.live import Live

    from batchqueue_async.cli.live.top_view import screen

    try:
        _wait(readers)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            drawn = 0
            while arguments.target is None or not readers[0].ended:
                live.update(screen(readers), refresh=True)
                drawn += 1
                time.sleep(_EVERY)
                if arguments.target is None and (drawn % _LOOKS == 0 or any(each.ended for each in readers)):
                    readers[:] = _now(arguments, readers)
    except KeyboardInterrupt:
        return FINE
    # Only a process that was named can get here: where none was, others may begin.
    if readers[0].frame is None:
        raise BatchQueueError(readers[0].error)
    console.print(screen(readers))
    console.print(f"process {readers[0].name} ended", markup=False)
    return FINE


def _now(arguments: Arguments, readers: Sequence[FrameReader]) -> list[FrameReader]:
    """The readers of the processes that are there now."""
    known = {each.name: each for each in readers if not each.ended}
    return [known.get(each.name) or FrameReader(each) for each in processes.asked(arguments)]
