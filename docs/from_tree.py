"""Parts of the pages that are read from the tree when the documents are built, so that they can't go stale.

A page has a comment `<!-- made from the tree: NAME -->` where a part goes. `python docs/from_tree.py map` prints one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "batchqueue_async"
TESTS = ROOT / "tests"

LONGEST_DEFAULT = 40
MARK = re.compile(r"^<!-- made from the tree: (.+) -->$", re.MULTILINE)
# A test that proves a fault's absence begins with the fault's id: test_bq_a_..., test_dq_3_..., test_c_18_...
FAULT_TEST = re.compile(r"test_(?:(?P<letters>bq)_(?P<letter>[a-z])|(?P<list>dq|ex|in|c|d|x|s|w)_(?P<number>\d+))_\w+")


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
    return ["BQ", "DQ", "EX", "C", "D", "X", "S", "IN", "W"].index(letters), int(rest) if rest.isdigit() else 0, rest


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


def service_file() -> str:  # noqa: C901 - a table is made of many small cases
    """The fields of a service file, a table for each section and each kind, as the shapes that check it have them."""
    from batchqueue_async._support.checks import Rule  # noqa: PLC0415 - as above
    from batchqueue_async.service.file.json_schema import of_rule  # noqa: PLC0415 - as above
    from batchqueue_async.service.file.kinds import SINKS, SOURCES  # noqa: PLC0415 - as above
    from batchqueue_async.service.file.schema import FILE  # noqa: PLC0415 - as above
    from batchqueue_async.service.file.shapes import Field, Struct, Tagged, Things  # noqa: PLC0415 - as above

    lines: list[str] = []

    def words(schema: dict[str, Any]) -> str:
        if "enum" in schema:
            return ", ".join(f"`{each}`" for each in schema["enum"])
        text = str(schema)
        for mark, said in (("ms|us", "time"), ("kmgt", "size"), ("env:", "reference"), ("additionalProp", "mapping")):
            if mark in text:
                return said
        kinds = {
            "integer": "whole number",
            "number": "number",
            "boolean": "true, false",
            "array": "list",
            "object": "mapping",
        }
        return next((said for name, said in kinds.items() if f"'{name}'" in text), "text")

    def value(field: Field) -> str:
        of = field.of
        if isinstance(of, Rule):
            return words(of_rule(of))
        return (
            f"[{of.what}](#{of.what.replace(' ', '-')})" if isinstance(of, Struct) and of.what in known else "mapping"
        )

    def table(title: str, shape: Struct, texts: dict[str, str], level: str = "###", about: str = "") -> None:
        lines.extend(["", f"{level} {title}", "", *([about, ""] if about else [])])
        lines.extend(["| field | value | default | reload | |", "|---|---|---|---|---|"])
        for name, field in shape.fields.items():
            known_default = field.default is not None and len(str(field.default)) <= LONGEST_DEFAULT
            default = "needed" if field.needed else f"`{field.default}`" if known_default else ""
            text = cell((field.text or texts.get(name, "")).removesuffix("."))
            live = "in place" if field.live else ""
            lines.append(f"| `{name}` | {value(field)} | {cell(default)} | {live} | {text} |")

    known: dict[str, Struct] = {}

    def collect(shape: Any) -> None:
        if isinstance(shape, Struct):
            for field in shape.fields.values():
                if isinstance(field.of, Struct) and field.of.what not in known:
                    known[field.of.what] = field.of
                collect(field.of)
        elif isinstance(shape, Things):
            collect(shape.of)
        elif isinstance(shape, Tagged):
            for each in shape.kinds.values():
                collect(each)

    for each in FILE.fields.values():
        collect(each.of)
    of: Any
    for section, field in FILE.fields.items():
        of = field.of.of if isinstance(field.of, Things) else field.of
        if isinstance(of, Struct):
            table(f"`{section}`", of, {}, "##", f"{field.text[0].upper()}{field.text[1:]}.")
        elif isinstance(of, Tagged):
            lines.extend(
                ["", f"## `{section}`", "", f"{field.text[0].upper()}{field.text[1:]}; `type` says of which kind."]
            )
            kinds = SINKS if section == "sinks" else SOURCES
            for name, shape in of.kinds.items():
                kind = kinds.get(name)
                extra = "" if kind is None or not kind.extra else f" Needs `batchqueue-async[{kind.extra}]`."
                text = "A sink that code makes" if kind is None else f"{kind.text[0].upper()}{kind.text[1:]}"
                table(f"{section[:-1]} `{name}`", shape, {} if kind is None else kind.texts(), about=f"{text}.{extra}")
    lines.extend(["", "## Parts"])
    for what, shape in known.items():
        table(what, shape, {})
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "map": package_map,
    "tests by fault": fault_tests,
    "metrics": metrics,
    "command line": command_line,
    "service file": service_file,
}


def fill(text: str) -> str:
    """A page with its parts in place; a name that is unknown is an error."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), text)


if __name__ == "__main__":
    sys.stdout.write(PARTS[" ".join(sys.argv[1:]) or "map"]() + "\n")
