"""Phrases that no native engineer would write stay out of documents, docstrings, comments, errors and log texts.

The list is short on purpose: its phrases were found often, and read as translated. The habits behind it are in
`docs/contributing/style.md`.
"""

from __future__ import annotations

import ast
import re
import tokenize
from typing import TYPE_CHECKING

import pytest
from from_tree import PACKAGE, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNITS = r"(?:batch|byte|call|entry|item|key|kilobyte|line|message|module|partition|place|record|request|row|span|write)"
# What to look for, and what to write instead.
PHRASES = {
    r"\bbeside\b": "with, next to, compared with, concurrently with",
    r"\bso many\b": "a number of, that number of",
    r"\bby chance\b": "random, at random",
    r"\bby and by\b": "in the background, later, gradually",
    r"\bfor good\b": "permanently",
    r"\bwhatever\b": "any, everything that, whichever",
    r"\bwithout more ado\b": "by default, at once",
    r"\bmend(?:s|ed|ing)?\b": "fix, correct",
    r"\b(?:a|no) faults? of (?:ours|this library)\b": "a bug, a bug in this library",
    r"\b(?:is|are|was|were|be|been|being|gets?|have|has) told\b": "is notified, logged, reported; or say what happens",
    r"\btells? (?:of|what|which|where|when|how|all|apart|about)\b": "says, reports, shows, explains",
    r"(?<!there )\b(?:is|are) (?-i:none)\b": "is not a ..., there is no ...",
    r"(?<!there )(?<!\bif )\b(?:is|are) no (?!longer\b|more\b|less\b|better\b|worse\b)": "is not a ...",
    r"\b(?:such|of|no|the|and|tells?) doubles\b|\bdoubles and\b|^#+ doubles": "duplicates",
    r"\blose and double\b": "neither lose nor duplicate",
    rf"\b(?:a|an|one) {UNITS} an? {UNITS}\b": "one ... per ...",
    rf"\b(?:\w+seconds|bytes) an? {UNITS}\b": "per",
    r"\bgo(?:es)? home\b": "return",
    r"\bstands? in line\b|\bin line for\b": "wait for",
    r"^#+ what .+ is$": "a topic or a task as the title",
    r"^#+ how sure\b": "a topic or a task as the title",
    r"\band what else there is\b": "alternatives",
    r"\bnobody wants to know\b": "do nothing",
    r"\bpauses and alarms\b": "pauses, and an error is logged",
}

# Pages that quote the phrases.
QUOTING = {"docs/contributing/style.md"}

# Folders (and modules of the top level) whose texts have not been read again yet. Whoever has, removes the line.
PENDING = {
    "bridge",
    "durable",
    "durable/disk",
    "durable/read",
    "durable/state",
    "durable/write",
    "export",
    "export/control",
    "export/delivery",
    "export/send_queue",
    "leases",
    "queue",
    "runtime",
    "sinks",
    "sinks/_shared",
    "sinks/grpc",
    "sinks/http",
    "sinks/kafka",
    "sinks/otlp",
    "sinks/postgres",
    "sinks/sqlite",
    "spark",
}


def page_text(text: str) -> str:
    """The prose of a page: code blocks and code spans blanked, with every character at its place."""
    blank = lambda found: re.sub(r"[^\n]", " ", found[0])  # noqa: E731
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", blank, text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", blank, text)


def code_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, other strings and comments of a module, each with its line."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    with path.open("rb") as file:
        yield from (
            (token.start[0], token.string)
            for token in tokenize.tokenize(file.readline)
            if token.type == tokenize.COMMENT
        )


def found_in(text: str) -> list[tuple[int, str, str]]:
    """Each phrase found: how many lines into the text, itself, and what to write instead."""
    text = re.sub(r"^ +", "", text, flags=re.MULTILINE)
    joined = re.sub(r"(?<=\S)\n(?=[^\s#|])", " ", text)
    return sorted(
        (text.count("\n", 0, match.start()), match[0], instead)
        for pattern, instead in PHRASES.items()
        for match in re.finditer(pattern, joined, re.IGNORECASE | re.MULTILINE)
    )


def pages() -> list[Path]:
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    found += sorted((ROOT / "docs").rglob("*.md"))
    return [path for path in found if "_build" not in path.parts and path.relative_to(ROOT).as_posix() not in QUOTING]


def part_of(path: Path) -> str:
    """The folder of a module as PENDING names it, or the module itself at the top level."""
    within = path.relative_to(PACKAGE)
    return within.parent.as_posix() if len(within.parts) > 1 else within.stem


def parts() -> list[str]:
    return sorted({part_of(path) for path in PACKAGE.rglob("*.py")})


def hits_of(part: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line + within}: {phrase!r}; rather: {instead}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if part_of(path) == part
        for line, text in code_texts(path)
        for within, phrase, instead in found_in(text)
    ]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_reads_as_plain_english(path):
    hits = found_in(page_text(path.read_text()))
    assert not hits, "\n".join(
        f"{path.relative_to(ROOT)}:{line + 1}: {phrase!r}; rather: {to}" for line, phrase, to in hits
    )


@pytest.mark.parametrize("part", [part for part in parts() if part not in PENDING])
def test_a_folder_reads_as_plain_english(part):
    hits = hits_of(part)
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("part", sorted(PENDING))
def test_a_folder_that_reads_well_is_not_pending(part):
    assert part in parts(), f"{part} is gone; remove it from PENDING in tests/test_prose.py"
    assert hits_of(part), f"{part} reads well; remove it from PENDING in tests/test_prose.py"


# --- the search itself


@pytest.mark.parametrize(
    "text",
    [
        "It runs beside\nthe handler.",
        "The value is no number.",
        "sink=3 is none: it needs send().",
        "One line a record.",
        "a message a record",
        "some bytes a write",
        "Whoever waits is told so.",
        "It tells what is left.",
        "## What a lease is",
        "tells doubles",
        "## Doubles",
        "Without more\nado it leaves.",
        "by\n  chance",
    ],
)
def test_a_phrase_is_found(text):
    assert len(found_in(text)) == 1, found_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "There is no room.",
        "where there is none",
        "The loop is no longer running.",
        "besides the others",
        "The delay doubles each time.",
        "One record per line. A record has a key.",
        "## What is retried",
        "You can't tell the difference.",
        "- a list\n- by the way\n- chance",
    ],
)
def test_plain_english_passes(text):
    assert found_in(text) == []


def test_code_is_not_prose_and_keeps_its_lines():
    text = "a\n```python\nx = 'is no number'\n```\nand `is none` of it, beside\nthat"
    assert found_in(page_text(text)) == [(4, "beside", PHRASES[r"\bbeside\b"])]
