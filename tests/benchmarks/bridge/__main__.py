"""The command: all subjects in turns, several rounds in one process, medians, and the ratios of the speed table."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from functools import partial
from typing import TYPE_CHECKING

from batchqueue_async import accelerated

from . import subjects

if TYPE_CHECKING:
    from collections.abc import Callable

PEERS = ("janus", "culsans")


def measure(rounds: int, items: int) -> dict[str, float]:
    """Median seconds per item of each subject; the subjects take turns, so that noise meets all of them alike."""
    runs: dict[str, Callable[[], float]] = {
        "in loop": partial(subjects.in_loop, items),
        "bridge": partial(subjects.bridge, items),
        "bridge, 8 threads": partial(subjects.bridge, items, 8),
        "in loop, bulk": partial(subjects.in_loop_bulk, items * 10),
        "bridge, bulk": partial(subjects.bridge_bulk, items * 10),
        "in loop, mixed": partial(subjects.in_loop_bulk, items * 10, mixed=True),
        "32 threads, mixed": partial(subjects.bridge_bulk, items * 10, mixed=True),
    }
    for peer in PEERS:
        if importlib.util.find_spec(peer) is not None:
            runs[peer] = partial(getattr(subjects, peer), max(1_000, items // 10))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(run())
    return {name: statistics.median(each) for name, each in samples.items()}


def report(medians: dict[str, float], latencies: list[float]) -> list[str]:
    """The table: what was measured, and each target with its ratio."""
    lines = [f"{name:20} {seconds * 1e9:9.0f} ns/item" for name, seconds in medians.items()]
    bridge = medians["bridge"]
    ratios = [
        (f"{peer} / bridge", medians[peer] / bridge, f"at least {target}")
        for peer, target in (("janus", 30 if accelerated else 15), ("culsans", 8))
        if peer in medians
    ]
    ratios += [
        ("bridge / in loop", bridge / medians["in loop"], "at most 2.5"),
        ("bulk / in loop bulk", medians["bridge, bulk"] / medians["in loop, bulk"], "at most 1.5"),
        ("8 threads' rate / one's", bridge / medians["bridge, 8 threads"], f"at least {0.9 if accelerated else 0.8}"),
        ("32 threads, mixed / loop", medians["in loop, mixed"] / medians["32 threads, mixed"], "at least 0.5"),
        ("idle latency p50, us", statistics.median(latencies) * 1e6, "under 50"),
    ]
    return [*lines, "", *(f"{name:24} {value:8.2f}   target: {target}" for name, value, target in ratios)]


def main(arguments: list[str]) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="make bench-bridge", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how often each subject runs; its median counts")
    parser.add_argument("--items", type=int, default=300_000, help="items of one run")
    options = parser.parse_args(arguments)
    print(f"Python {sys.version.split()[0]}, {options.rounds} rounds of {options.items} items, bound {subjects.BOUND}")
    medians = measure(options.rounds, options.items)
    print("\n".join(report(medians, subjects.latency(500))))


if __name__ == "__main__":
    main(sys.argv[1:])
