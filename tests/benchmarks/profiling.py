"""cProfile over the library's own cases of one row: which calls an item makes, not what they cost."""

from __future__ import annotations

import cProfile
import pstats
from typing import TYPE_CHECKING

from .loops import quiet_logs

if TYPE_CHECKING:
    from pathlib import Path

    from .model import Row, Sizes


def profile(row: Row, loop: str, sizes: Sizes, output: Path) -> None:
    """Print the calls by their own time, and keep the profile for other viewers."""
    quiet_logs()
    profiler = cProfile.Profile()
    profiler.runcall(row.measure, sizes, loop, 0, True)
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"profile-{row.name}-{loop}.prof"
    profiler.dump_stats(path)
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(30)
    print(f"written to {path}")
