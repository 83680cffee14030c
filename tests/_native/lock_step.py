"""Run random programs against a queue, and print what each made of them: for two processes to be compared."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import queue_programs
from queue_actors import draw_options
from queue_world import World

import batchqueue_async as bq

if TYPE_CHECKING:
    import random


def calm_options(rng: random.Random) -> dict[str, Any]:
    """The same programs without hashes that raise by chance: how often a type is hashed is nobody's business."""
    return {**draw_options(rng), "moody_hash": False}


class Recorder(World):
    """Notes which handler got what, in which order."""

    log: list[str]

    def call_begins(self, handler: Any, batch: Any) -> Any:
        self.log = [*getattr(self, "log", []), f"{handler.label}{batch}"]
        return super().call_begins(handler, batch)


def trace(seed: int) -> str:
    """The handler calls of a seed, and the counts in the end."""
    world = queue_programs.run_seed(seed)
    stats = world.queue.stats()
    counts = [stats.attempted, stats.accepted, stats.refused, stats.dropped, stats.handled, stats.failed]
    return f"{seed} {counts} {stats.unhandled} {getattr(world, 'log', [])}"


if __name__ == "__main__":
    logging.getLogger("batchqueue_async").setLevel(logging.CRITICAL)
    queue_programs.draw_options = calm_options
    queue_programs.World = Recorder  # type: ignore[misc]
    sys.stdout.write(f"accelerated {bq.accelerated}\n")
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        sys.stdout.write(f"{trace(number)}\n")
