"""Parts of the pages that are read from the tree when the documents are built, so that they can't go stale.

A page has a comment `<!-- made from the tree: NAME -->` where a part goes. `python docs/from_tree.py map` prints one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "batchqueue_async"
TESTS = ROOT / "tests"

MARK = re.compile(r"^<!-- made from the tree: (.+) -->$", re.MULTILINE)
# A test that proves a fault's absence begins with the fault's id: test_bq_a_..., test_dq_3_..., test_c_18_...
FAULT_TEST = re.compile(r"test_(?:(?P<letters>bq)_(?P<letter>[a-z])|(?P<list>dq|ex|in|c|d|x|s)_(?P<number>\d+))_\w+")


def map_line(path: Path) -> str | None:
    """The first line of a module's docstring; None where there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return docstring.splitlines()[0] if docstring else None


def folders(package: Path = PACKAGE) -> list[Path]:
    """Every folder of the package, each before those within it."""
    return sorted({path.parent for path in package.rglob("*.py")})


def modules(folder: Path) -> list[Path]:
    """The modules of one folder, without the `__init__`, whose line is the folder's."""
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def cell(text: str) -> str:
    """A text as the cell of a table."""
    return text.replace("|", "\\|")


def package_map(package: Path = PACKAGE) -> str:
    """Each folder with its line, and a table of its modules with theirs."""
    lines: list[str] = []
    for folder in folders(package):
        lines += [
            f"## {folder.relative_to(package.parent).as_posix()}/",
            "",
            map_line(folder / "__init__.py") or "",
            "",
        ]
        if found := modules(folder):
            lines += ["| module | what it is about |", "|---|---|"]
            lines += [f"| `{path.stem}` | {cell(map_line(path) or '')} |" for path in found]
            lines.append("")
    return "\n".join(lines)


def fault_id(test: str) -> str | None:
    """The id of the fault that a test is named by: `BQ-a` of `test_bq_a_no_item_is_lost`."""
    found = FAULT_TEST.fullmatch(test)
    if not found:
        return None
    return f"{(found['letters'] or found['list']).upper()}-{found['letter'] or found['number']}"


def functions(tests: Path) -> Iterator[tuple[Path, str]]:
    """Every test function with its file."""
    for path in sorted(tests.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path.relative_to(tests.parent), node.name


def proofs(tests: Path = TESTS) -> dict[str, dict[Path, list[str]]]:
    """The tests of each fault that has any, by file."""
    found: defaultdict[str, defaultdict[Path, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, name in functions(tests):
        if identity := fault_id(name):
            found[identity][path].append(name)
    return {identity: dict(by_file) for identity, by_file in found.items()}


def fault_order(identity: str) -> tuple[int, int, str]:
    """Sorts ids as the register lists them."""
    letters, _, rest = identity.partition("-")
    return ["BQ", "DQ", "EX", "C", "D", "X", "S", "IN"].index(letters), int(rest) if rest.isdigit() else 0, rest


def fault_tests(tests: Path = TESTS) -> str:
    """The tests that are named by a fault, as a list of definitions."""
    lines: list[str] = []
    for identity, by_file in sorted(proofs(tests).items(), key=lambda entry: fault_order(entry[0])):
        lines.append(identity)
        for path, names in by_file.items():
            lines.append(f": `{path.as_posix()}`: {', '.join(f'`{name}`' for name in names)}")
        lines.append("")
    return "\n".join(lines)


def metrics() -> str:
    """The table of metrics, by kind of component: names for Prometheus and OpenTelemetry, labels, and what they say."""
    from batchqueue_async.observe.table import METRICS  # noqa: PLC0415 - the map needs nothing of the package

    lines: list[str] = []
    component = ""
    for metric in METRICS:
        if metric.of.name != component:
            component = metric.of.name
            shown = ", ".join(f"`{name}`" for name, _ in metric.of.labels) or "none"
            lines += ["", f"## Per {component}", "", f"Labels: {shown}.", ""]
            lines += ["| Prometheus | OpenTelemetry | kind | label of its own | |", "|---|---|---|---|---|"]
        suffix = ".count`, `.sum" if metric.kind == "histogram" else ""
        own = f"`{metric.by}`" if metric.by else ""
        lines.append(
            f"| `{metric.name}` | `{metric.otel_name}{suffix}` | {metric.kind} | {own} | {cell(metric.help)} |"
        )
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """The help of every command, each before its own."""
    import click  # noqa: PLC0415 - as above

    from batchqueue_async.cli.main import build  # noqa: PLC0415 - as above

    def helps(command: click.Command, name: str, above: click.Context | None) -> Iterator[str]:
        context = click.Context(command, above, name, max_content_width=100, terminal_width=100)
        context.help_option_names = ["-h", "--help"]
        yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
        if isinstance(command, click.Group):
            for each in command.list_commands(context):
                found = command.get_command(context, each)
                if found is not None:
                    yield from helps(found, each, context)

    return "\n".join(helps(build(), "batchqueue", None))


PARTS: dict[str, Callable[[], str]] = {
    "map": package_map,
    "tests by fault": fault_tests,
    "metrics": metrics,
    "command line": command_line,
}


def fill(text: str) -> str:
    """A page with its parts in place; a name that is unknown is an error."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), text)


if __name__ == "__main__":
    sys.stdout.write(PARTS[" ".join(sys.argv[1:]) or "map"]() + "\n")
