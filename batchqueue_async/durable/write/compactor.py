"""Compaction in the background: one segment at a time, in small steps between the reads of consumers. On the loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from batchqueue_async._support import log
from batchqueue_async.durable.disk.compaction import Refusal, Rewrite

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from batchqueue_async.durable.disk.files import Files
    from batchqueue_async.durable.io_thread import Runner
    from batchqueue_async.durable.state.compaction import CompactionPlan
    from batchqueue_async.durable.write.pump import GroupCommit

_TICK = 1.0
# Between two steps, unless somebody waits for room: consumers and producers have the disk for most of the time.
_PAUSE = 0.02


class Compactor:
    """Carries out what `CompactionPlan` decides.

    Reading and copying run on the reading thread, a step at a time. Only putting the copy in its place is the writer's,
    in a round: so it is in order with everything else that happens to the files.
    """

    def __init__(
        self,
        plan: CompactionPlan,
        pump: GroupCommit,
        runner: Runner,
        *,
        files: Files,
        path: Path,
        on_swapped: Callable[[list[int]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._plan = plan
        self._pump = pump
        self._runner = runner
        self._files = files
        self._path = path
        self._on_swapped = on_swapped
        self._number: int | None = None
        self._rewrite: Rewrite | None = None
        self._pressed = False
        self._tick: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a segment is being compacted."""
        return self._number is not None

    def look(self) -> None:
        """After each round: is there something to do?"""
        if self._number is not None or self._closed or not self._plan.waiting:
            return
        if self._pressed or self._pump.starved:
            self._begin(self._plan.any())
        else:
            passed = self._plan.passed()
            self._begin(self._plan.quiet() if passed is None else passed)
        if self._number is None and self._tick is None:
            self._tick = self._loop.call_later(_TICK, self._on_tick)

    def press(self) -> bool:
        """Somebody needs room now: whether compaction may give some."""
        self._pressed = self._plan.waiting or self._number is not None
        self.look()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self._step()
        return self._number is not None

    def _on_tick(self) -> None:
        self._tick = None
        if self._number is None and not self._closed:
            self._plan.tick()
            self.look()

    def _begin(self, number: int | None) -> None:
        while number is not None:
            task = self._plan.task(number)
            if task is not None:
                self._number = number
                self._rewrite = Rewrite(self._files, self._path, task)
                self._submit(self._rewrite.measure, self._measured)
                return
            number = self._plan.any() if self._pressed else None
        self._pressed = False

    def _submit(self, call: Callable[[], Any], take: Callable[[Any], None]) -> None:
        def landed(result: Any, error: BaseException | None) -> None:
            if self._closed:
                return
            if error is None:
                take(result)
            else:
                self._failed(error)

        self._runner.submit(call, done=landed)

    def _measured(self, last: bool) -> None:  # noqa: FBT001 - the result of a step
        rewrite = self._rewrite
        if rewrite is None:
            return
        if not last:
            self._submit(rewrite.measure, self._measured)
        elif self._plan.has_room(rewrite.size):
            self._step()
        else:
            self._give_up(later=True)

    def _step(self) -> None:
        self._pause = None
        if self._rewrite is not None and not self._closed:
            self._submit(self._rewrite.copy, self._copied)

    def _copied(self, last: bool) -> None:  # noqa: FBT001 - the result of a step
        rewrite, number = self._rewrite, self._number
        if rewrite is None or number is None:
            return
        if last:
            self._pump.swap(number, self._swapped)
        elif self._pressed:
            self._step()
        else:
            self._pause = self._loop.call_later(_PAUSE, self._step)

    def _swapped(self, went: bool) -> None:  # noqa: FBT001 - the result of a round
        rewrite, number = self._rewrite, self._number
        if rewrite is None or number is None:
            return
        if not went:
            self._plan.undone(number)
            self._give_up(later=True)
            return
        result = rewrite.result()
        self._number = self._rewrite = None
        self._plan.done(result)
        # An open descriptor would go on reading the old file, and keep its room.
        self._on_swapped([number])

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, Refusal):
            log.warning("durable_compaction_failed", path=str(self._path), segment=self._number, error=repr(error))
        self._give_up(later=False)

    def _give_up(self, *, later: bool) -> None:
        rewrite, number = self._rewrite, self._number
        self._number = self._rewrite = None
        if rewrite is None or number is None:
            return
        self._runner.submit(rewrite.abandon, done=_ignore)
        if later:
            self._plan.defer(number)
        else:
            self._plan.refused(number)
        # What else may be worth it, on another turn of the loop: there may be many.
        self._loop.call_soon(self.look)

    def close(self) -> None:
        """Leave what is under way undone."""
        self._closed = True
        for timer in (self._tick, self._pause):
            if timer is not None:
                timer.cancel()
        if self._rewrite is not None:
            self._runner.submit(self._rewrite.abandon, done=_ignore)
            self._number = self._rewrite = None


def _ignore(_result: object, _error: BaseException | None) -> None:
    """What is left behind is removed by the next opening."""
