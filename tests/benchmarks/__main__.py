"""The command: measures rows run by run, each run in a process of its own, and reports."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from .loops import LOOP_FACTORIES
from .model import QUICK, Samples, Sizes
from .peers import missing_peers
from .plot import write_plot
from .profiling import profile
from .report import Outcome, as_json, case_table, noise_lines, verdict_table, write_json
from .rows import ROWS, row_named

ROOT = Path(__file__).resolve().parents[2]
MINIMUM_RUNS = 5  # a median of fewer is no median
RUN_TIMEOUT = 300.0


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status tells of failed measurements, never of missed targets."""
    options = _options(arguments)
    if options.profile is not None:
        loop = next(iter(LOOP_FACTORIES)) if options.loop == "both" else options.loop
        profile(row_named(options.profile), loop, QUICK if options.quick else Sizes(), options.output)
        return 0
    loops = list(LOOP_FACTORIES) if options.loop == "both" else [options.loop]
    rows = [row_named(name) for name in options.only] if options.only else list(ROWS)
    outcomes = [Outcome(row=row, loop=loop) for row in rows for loop in loops]
    for name, why in missing_peers().items():
        print(f"without {name}: {why}")
    load_before = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    started = time.perf_counter()
    for row in rows:
        _measure_row([outcome for outcome in outcomes if outcome.row is row], options)
    settings = {
        "runs": options.runs,
        "quick": options.quick,
        "load_average_before": load_before,
        "seconds": round(time.perf_counter() - started, 1),
    }
    return _report(outcomes, settings, options)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=names, metavar="ROW", help=f"one of {', '.join(names)}")
    parser.add_argument("--loop", choices=[*LOOP_FACTORIES, "both"], default="both", help="the event loop (both)")
    parser.add_argument("--runs", type=int, default=MINIMUM_RUNS, help="runs of each row, at least 5 (5)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, any number of runs: figures mean nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "bench-results", help="directory (bench-results)")
    parser.add_argument("--profile", choices=names, metavar="ROW", help="profile the library's cases of one row")
    options = parser.parse_args(arguments)
    if options.runs < (1 if options.quick else MINIMUM_RUNS):
        parser.error(f"--runs={options.runs} is below {MINIMUM_RUNS}: a median needs more runs; or add --quick")
    return options


def _measure_row(outcomes: list[Outcome], options: argparse.Namespace) -> None:
    """All runs of a row, the loops in turns."""
    print(f"\n{outcomes[0].row.name}: {outcomes[0].row.title}", flush=True)
    for run in range(options.runs):
        for outcome in outcomes:
            if outcome.error is not None:
                continue
            started = time.perf_counter()
            try:
                outcome.runs.append(_run_apart(outcome, run, quick=options.quick))
            except RuntimeError as error:
                outcome.error = str(error)
                print(f"  FAILED on {outcome.loop}: {error}", flush=True)
            else:
                took = time.perf_counter() - started
                print(f"  run {run + 1} of {options.runs} on {outcome.loop}: {took:.1f} s", flush=True)
    for outcome in outcomes:
        if outcome.runs:
            print(f" on {outcome.loop}:\n  " + case_table(outcome).replace("\n", "\n  "), flush=True)


def _run_apart(outcome: Outcome, run: int, *, quick: bool) -> Samples:
    size = "quick" if quick else "full"
    command = [sys.executable, "-m", f"{__package__}.worker", outcome.row.name, outcome.loop, str(run), size]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"run {run + 1} did not end within {error.timeout:.0f} s") from error
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        raise RuntimeError(f"run {run + 1} ended with {done.returncode}: {(done.stderr.splitlines() or ['?'])[-1]}")
    samples: Samples = json.loads(done.stdout.splitlines()[-1])
    return samples


def _report(outcomes: list[Outcome], settings: dict[str, object], options: argparse.Namespace) -> int:
    print(f"\n{verdict_table(outcomes)}")
    print("\nThe machine's noise, seen on what was measured beside:")
    print("\n".join(noise_lines(outcomes)))
    if options.quick:
        print("\n--quick: these sizes show that every row runs; the figures and verdicts mean nothing")
    write_json(options.output / "results.json", as_json(outcomes, **settings))
    why_not = write_plot(options.output / "results.svg", outcomes)
    print(f"\nwritten to {options.output}: results.json" + ("" if why_not else ", results.svg"))
    if why_not:
        print(why_not)
    return 1 if any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
