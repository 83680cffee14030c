"""The command: each row several times, medians, and the targets of the speed table."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from . import steps, subjects


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each target; a row has name, value, unit, target and whether it is met."""
    rate = statistics.median(subjects.throughput(options.batches) for _ in range(options.rounds))
    booked = min(subjects.bookkeeping(options.batches * 10) for _ in range(options.rounds))
    memory = statistics.median(subjects.idle_latency(None, options.times)[0])
    with subjects.scratch() as name:
        disk, sync = map(statistics.median, subjects.idle_latency(Path(name) / "queue", options.times))
    drained, formula = subjects.recovery(options.records, options.batch)
    used, refused = steps.throttled()
    found = [
        ("memory exporter to a no-op sink, 1 KB records, batches of 500", rate / 1e6, "M records/s", ">=", 1.0),
        ("retry bookkeeping of a batch that succeeds", booked * 1e6, "us", "<", 2.0),
        ("idle latency p50, memory", memory * 1e3, "ms", "<", 0.2),
        (f"idle latency p50, durable, beyond an fdatasync of {sync * 1e3:.2f} ms", (disk - sync) * 1e3, "ms", "<", 1.0),
        (f"drain after an outage, of the formula's {formula:.0f} batches/s", drained / formula, "x", ">=", 0.9),
        ("throttled destination, 100 requests/s allowed, 8 workers: used", used, "requests/s", ">=", 95.0),
        ("throttled destination: refused", refused * 100, "%", "<", 5.0),
        *(
            (f"longest step of the loop: {name}", steps.longest(scenario, options.rounds) * 1e3, "ms of CPU", "<", 5.0)
            for name, scenario in (
                (f"{steps.DELAYED:,} delayed batches", steps.delayed),
                (f"settling {steps.SETTLED:,} records", steps.settling),
                (f"{steps.FAILED_OVER:,} batches in a failover", steps.failed_over),
            )
        ),
    ]
    return [
        {
            "name": name,
            "value": value,
            "unit": unit,
            "target": f"{sign} {target}",
            "met": value >= target if sign == ">=" else value < target,
        }
        for name, value, unit, sign, target in found
    ]


def main(arguments: list[str]) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="make bench-export", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often the fast rows run; the median counts")
    parser.add_argument("--batches", type=int, default=4_000, help="batches of one run")
    parser.add_argument("--times", type=int, default=500, help="samples of a latency")
    parser.add_argument("--records", type=int, default=100_000, help="the backlog of an outage")
    parser.add_argument("--batch", type=int, default=100, help="records of a batch of it")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="also write JSON")
    options = parser.parse_args(arguments)
    rows = measure(options)
    print(f"Python {sys.version.split()[0]}")
    for row in rows:
        met = "met" if row["met"] else "MISSED"
        print(f"{row['name']:75} {row['value']:8.3f} {row['unit']:12} target {row['target']:8} {met}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"python": sys.version.split()[0], "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
