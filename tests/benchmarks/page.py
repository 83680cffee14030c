"""The page of figures: one named run of the bench as a document, with its plot. `make bench-page` writes both.

python -m tests.benchmarks.page [bench-results/results.json]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from .report import format_value
from .rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "figures.md"
PLOT = ROOT / "docs" / "images" / "figures.svg"
# What the plot shows: a call for each item, a call that waits, and lists of a thousand, beside what people use instead.
PLOTTED = ("nowait", "produce", "many")
LOOP = "uvloop"

HEAD = """\
# Figures of one run

These are the figures of one run, as it printed them, on {when}: commit `{commit}`, Python {python}, {cpus} processors
of {machine}, load average {load} at its end, the hot path {path}. `make bench-page` wrote this page from the run's
JSON. [The benchmarks](benchmarks.md) says what is measured and how to read it; your machine has figures of its own.

```console
$ {command}
```

![What an item costs on its way through a queue, ours and others](../images/figures.svg)

The machine's noise: the reference case of a row, which never changes, differed by {least:.0%} to {most:.0%} between
runs. A smaller difference means nothing.

## Targets

A ratio is that of the run's own two sides. `NO` is a target that was missed; the hot path in Python has the same ones.

"""


def page(results: dict[str, Any], commit: str) -> str:
    """The document."""
    noise = [row["noise"]["between_runs"] for row in results["rows"] if row["noise"]]
    head = HEAD.format(
        when=results["when"].partition("T")[0],
        commit=commit,
        command=command(results),
        python=results["python"].split()[0],
        cpus=results["cpus"],
        machine=" ".join(results["platform"].split("-")[:1]),
        load=f"{results['load_average'][0]:.1f}" if results["load_average"] else "unknown",
        path="compiled" if results["accelerated"] else "in Python",
        least=min(noise, default=0.0),
        most=max(noise, default=0.0),
    )
    checks = [check for row in results["rows"] for check in row["checks"]]
    targets = table(("row", "what", "loop", "figure", "baseline", "ratio", "target", "met"), map(target, checks))
    parts = [head + targets]
    for row in results["rows"]:
        if row["runs"] and row["loop"] == LOOP:
            parts += [f"\n## `{row['name']}`: {row['title']}\n\n{cases(row)}"]
    others = {name: version for name, version in results["packages"].items() if name != "batchqueue-async"}
    versions = ", ".join(f"{name} {version}" for name, version in others.items())
    return "\n".join([*parts, f"\nVersions: {versions}.\n"])


def command(results: dict[str, Any]) -> str:
    """What makes such a run."""
    names = list(dict.fromkeys(row["name"] for row in results["rows"]))
    loops = {row["loop"] for row in results["rows"]}
    options = [f"--loop {loop}" for loop in loops if len(loops) == 1]
    if names != [row.name for row in ROWS]:
        options += [f"--only {name}" for name in names]
    return f'make bench BENCH="{" ".join(options)}"' if options else "make bench"


def target(check: dict[str, Any]) -> tuple[str, ...]:
    """A line of the targets."""
    ratio = check["ratio"]
    wanted = f"{check['target']:g} x" if ratio is not None else format_value(check["target"], check["unit"])
    return (
        check["row"],
        check["what"],
        check["loop"],
        format_value(check["figure"], check["unit"]),
        format_value(check["reference"], check["unit"]),
        f"{ratio:.2f} x" if ratio is not None else "-",
        f"{'at least' if check['bound'] == '>=' else 'at most'} {wanted}",
        "yes" if check["met"] else "NO",
    )


def medians(row: dict[str, Any], case: str) -> list[float]:
    """Of each run."""
    return [statistics.median(run[case]) for run in row["runs"]]


def cases(row: dict[str, Any]) -> str:
    """All cases of a row."""
    lines = []
    for case in row["runs"][0]:
        found = medians(row, case)
        unit = row["unit"] if "load" not in case.partition(": ")[2] else "ratio"
        spread = f"{format_value(min(found), unit)} to {format_value(max(found), unit)}"
        lines.append((case, format_value(statistics.median(found), unit), spread))
    return table((f"on {row['loop']}", "median", "of the runs"), lines)


def table(head: tuple[str, ...], lines: Any) -> str:
    """A table of the document."""
    rows = [head, ("---",) * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def draw(results: dict[str, Any], path: Path) -> None:
    """The plot: no more than fits a page, always the same bytes for the same run."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.hashsalt": "figures", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot as plt

    rows = [row for row in results["rows"] if row["name"] in PLOTTED and row["loop"] == LOOP and row["runs"]]
    bars = [len(row["runs"][0]) for row in rows]
    figure, axes = plt.subplots(
        len(rows), 1, figsize=(8, 0.6 * len(rows) + 0.2 * sum(bars)), layout="constrained", height_ratios=bars
    )
    for axis, row in zip(axes, rows, strict=True):
        names = list(row["runs"][0])
        colours = ["#2a6fbb" if name.startswith("batchqueue") else "#9aa0a6" for name in names]
        axis.barh(names, [statistics.median(medians(row, name)) * 1e9 for name in names], color=colours)
        axis.bar_label(axis.containers[0], fmt="%.0f", padding=3)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.margins(x=0.1)
        axis.set_title(row["title"], loc="left")
    axes[-1].set_xlabel("nanoseconds an item, median, from its producer to its handler (logarithmic)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Write the page and its plot from the JSON of a run."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bench-results" / "results.json"
    results = json.loads(source.read_text(encoding="utf-8"))
    if results["settings"].get("quick"):
        sys.exit(f"{source} is of a run with --quick, whose figures mean nothing; run `make bench` first")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    PAGE.write_text(page(results, commit), encoding="utf-8")
    draw(results, PLOT)
    print(f"written: {PAGE.relative_to(ROOT)}, {PLOT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
