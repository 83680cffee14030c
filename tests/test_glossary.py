"""The glossary's names are the code's: each exists where its row says, or is listed here as still to come."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache

import pytest
from from_tree import PACKAGE, ROOT

PAGE = ROOT / "docs" / "contributing" / "glossary.md"
ARCHITECTURE = ROOT / "docs" / "contributing" / "architecture.md"
COLUMNS = ("idea", "in code", "statistics", "log event", "configuration")

# Names that the pages use and the code does not have yet. Whoever brings one removes it here; a test says so.
PENDING = {}


@dataclass
class Names:
    """What some code defines: plain names, the members of classes, and texts, among which the log events are."""

    plain: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        owner, dot, member = name.rpartition(".")
        if dot:
            return member in self.members.get(owner, ())
        return name in self.plain or f"{name}s" in self.plain


def targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [each for target in node.targets for each in (getattr(target, "elts", None) or [target])]
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def defined(source: str, module: str) -> Names:
    """Everything that a module defines: classes, functions, their parameters, variables and attributes."""
    names = Names(plain={module})
    tree = ast.parse(source)
    names.members[module] = {getattr(node, "name", "") for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.plain.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = [each for each in ast.walk(node) if each is not node]
            names.members.setdefault(node.name, set()).update(
                [each.name for each in inside if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)],
                [each.id for item in inside for each in targets(item) if isinstance(each, ast.Name)],
            )
        names.plain |= {each.id for each in targets(node) if isinstance(each, ast.Name)}
        names.plain |= {each.attr for each in targets(node) if isinstance(each, ast.Attribute)}
        if isinstance(node, ast.arg):
            names.plain.add(node.arg)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.texts.add(node.value)
    return names


@cache
def names_of(*parts: str) -> Names:
    """The names of some folders, or of modules of the top level; of the whole package without any."""
    found = Names()
    for path in sorted(PACKAGE.rglob("*.py")):
        top = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if parts and top not in parts:
            continue
        module = path.parent.name if path.stem == "__init__" else path.stem
        names = defined(path.read_text(), module)
        found.plain |= names.plain
        found.texts |= names.texts
        for owner, members in names.members.items():
            found.members.setdefault(owner, set()).update(members)
    return found


@dataclass(frozen=True)
class Entry:
    column: str
    name: str
    parts: tuple[str, ...]


def read(text: str) -> list[Entry]:
    """The names of the page, each with its column and the folders in which it is looked for."""
    entries: list[Entry] = []
    parts: tuple[str, ...] = ()
    for line in text.splitlines():
        if marked := re.fullmatch(r"<!-- names of: (.+) -->", line):
            parts = tuple(marked[1].split(", "))
        if line.startswith("## "):
            parts = ()
        if not line.startswith("| ") or line.startswith("| idea |"):
            continue
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        assert len(cells) == len(COLUMNS), f"a row has {len(COLUMNS)} cells, this one {len(cells)}: {line}"
        assert parts, f"no comment says in which folders the names of this row are: {line}"
        entries += [
            Entry(column, name, parts)
            for column, cell in zip(COLUMNS[1:], cells[1:], strict=True)
            for name in re.findall(r"`([^`]+)`", cell)
        ]
    return entries


def exists(entry: Entry) -> bool:
    if entry.column == "in code":
        return entry.name in names_of(*entry.parts)
    if entry.column == "log event":
        return entry.name in names_of().texts
    assert "." in entry.name, f"{entry.name}: say of which class it is, as in `QueueStats.used`"
    return entry.name in names_of()


def pending(entry: Entry) -> bool:
    places = entry.parts if entry.column == "in code" else (entry.column,)
    return any(entry.name in PENDING.get(place, ()) for place in places)


def test_every_name_of_the_glossary_exists_or_is_pending():
    missing = [
        f"{entry.name} ({entry.column}) is nowhere in {', '.join(entry.parts)}: correct the row, or list it in PENDING"
        for entry in read(PAGE.read_text())
        if not exists(entry) and not pending(entry)
    ]
    assert not missing, "\n".join(missing)


def test_no_name_is_pending_that_has_landed():
    landed = sorted({entry.name for entry in read(PAGE.read_text()) if exists(entry) and pending(entry)})
    assert not landed, f"these have landed; remove them from PENDING in tests/test_glossary.py: {', '.join(landed)}"


def test_every_pending_name_has_a_row():
    entries = read(PAGE.read_text())
    used = {(place, entry.name) for entry in entries for place in (*entry.parts, entry.column)}
    unused = [f"{place}: {name}" for place, names in PENDING.items() for name in names if (place, name) not in used]
    assert not unused, f"no row of the glossary has them: {unused}"


def test_the_architecture_names_classes_that_the_glossary_or_the_code_has():
    known = {entry.name for entry in read(PAGE.read_text())} | names_of().plain
    used = re.findall(r"`([A-Z]\w+|[a-z]+_[a-z_]+)`", ARCHITECTURE.read_text())
    assert used
    assert [name for name in used if name not in known] == []


# --- the comparison itself

SOURCE = """
class Partition:
    size: int
    def __init__(self, limit):
        self.spare, self.used = limit, 0
    def put(self, item): log.info("put")
def submit(): ...
"""


@pytest.mark.parametrize("name", ["Partition", "Partition.put", "Partition.size", "spare", "used", "item", "m.submit"])
def test_what_is_defined_is_found(name):
    assert name in defined(SOURCE, "m")


@pytest.mark.parametrize("name", ["partition", "Partition.gone", "log", "m.put", "n.submit", "info"])
def test_what_is_only_used_or_elsewhere_is_not(name):
    assert name not in defined(SOURCE, "m")


def test_a_row_is_read_with_its_folders():
    page = "## Q\n\n<!-- names of: queue, config -->\n\n| idea | in code | | | |\n| a | `B`, `c` | | `d` | |\n"
    assert read(page) == [
        Entry("in code", "B", ("queue", "config")),
        Entry("in code", "c", ("queue", "config")),
        Entry("log event", "d", ("queue", "config")),
    ]
    with pytest.raises(AssertionError, match="a row has 5 cells"):
        read(page.replace("`d` | |", "`d` |"))
    with pytest.raises(AssertionError, match="in which folders"):
        read(page.replace("<!--", "<!- -"))
