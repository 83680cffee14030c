"""One run of one row in this process, as `python -m tests.benchmarks.worker ROW LOOP RUN quick|full`; prints JSON.

A process of its own for each run: what one run leaves behind (heap, hash seed, warmed code) reaches no other.
"""

from __future__ import annotations

import gc
import json
import sys

from .loops import quiet_logs
from .model import QUICK, Sizes
from .rows import row_named


def main(arguments: list[str]) -> None:
    """Measure, and print the samples as the last line."""
    name, loop, run, size = arguments
    quiet_logs()
    gc.enable()
    samples = row_named(name).measure(QUICK if size == "quick" else Sizes(), loop, int(run), False)
    print(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1:])
