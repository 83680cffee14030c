"""The map of the package is made of docstrings: each module has a first line that can stand in it alone."""

from __future__ import annotations

import ast
import re

import pytest
from from_tree import PACKAGE, ROOT, fill, folders, map_line, modules, package_map

PATHS = sorted(PACKAGE.rglob("*.py"))
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)
HEADING = re.compile(r"^## (\S+)/$", re.MULTILINE)


def fault_of(text: str | None, whole: str) -> str | None:
    """What keeps a docstring's first line from standing alone."""
    if not text:
        return "has no docstring; its first line says in a sentence what the module is about"
    if not text.endswith("."):
        return f"begins with {text!r}; the first line is a whole sentence, with its full stop"
    rest = whole.splitlines()[1:]
    if rest and rest[0].strip():
        return f"goes on after {text!r}; leave a line empty behind the first"
    return None


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_first_line_of_a_module_can_stand_in_the_map(path):
    wrong = fault_of(map_line(path), ast.get_docstring(ast.parse(path.read_text())) or "")
    assert wrong is None, f"the docstring of {path.relative_to(ROOT)} {wrong}"


def test_no_two_modules_have_the_same_line():
    lines: dict[str, list[str]] = {}
    for path in PATHS:
        lines.setdefault(map_line(path) or "", []).append(path.relative_to(PACKAGE).as_posix())
    same = {line: paths for line, paths in lines.items() if len(paths) > 1}
    assert same == {}, f"these modules say the same of themselves: {same}"


def test_the_map_has_every_folder_and_every_module_once():
    text = package_map()
    assert HEADING.findall(text) == [folder.relative_to(ROOT).as_posix() for folder in folders()]
    assert [name for name, _ in ROW.findall(text)] == [path.stem for folder in folders() for path in modules(folder)]
    assert len(folders()) + sum(len(modules(folder)) for folder in folders()) == len(PATHS)


def test_the_page_gets_the_map():
    page = fill((ROOT / "docs" / "explanation" / "map.md").read_text())
    assert package_map() in page
    with pytest.raises(KeyError, match="mpa"):
        fill("<!-- made from the tree: mpa -->")


@pytest.mark.parametrize(
    ("docstring", "message"),
    [
        ("", "has no docstring"),
        ("One bounded partition", "full stop"),
        ("One bounded partition.\nAnd more.", "leave a line empty"),
        ("One bounded partition.\n\nAnd more.", None),
    ],
)
def test_a_line_that_cannot_stand_alone_is_named(docstring, message):
    wrong = fault_of(docstring.partition("\n")[0], docstring)
    assert wrong is None if message is None else message in (wrong or "")
