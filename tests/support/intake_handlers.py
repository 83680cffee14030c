"""Handlers of consumers under test, what they are given, and the law of their counts."""

from __future__ import annotations

import asyncio
import os

import pytest

REPEATS = int(os.environ.get("BATCHQUEUE_INTAKE_REPEATS", "1"))


def repeated(test):
    """A scenario of `make chaos-intake`, which runs it many times: each is a test of its own, with its own time."""
    if REPEATS > 1:
        test = pytest.mark.parametrize("repetition", range(1, REPEATS + 1))(pytest.mark.usefixtures("repetition")(test))
    return pytest.mark.repeated(test)


def adds_up(stats):
    parts = stats.acked + stats.retried + stats.dead_lettered + stats.released + stats.stale
    return stats.received == parts + stats.buffered + stats.waiting + stats.in_flight


class Recorder:
    """A handler that knows what it was given, how many ran at once, and can be slow or fail."""

    def __init__(self, delay=0.0, fail=None):
        self.delay, self.fail = delay, fail
        self.seen, self.done = [], []
        self.active = self.most = 0
        self.keys = {}

    async def __call__(self, message):
        self.seen.append(message.body)
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            if self.delay:
                await asyncio.sleep(self.delay(message) if callable(self.delay) else self.delay)
            error = self.fail(message) if self.fail else None
            if error is not None:
                raise error
            self.done.append(message.body)
        finally:
            self.active -= 1


def bodies(count):
    return [b"%d" % number for number in range(count)]
