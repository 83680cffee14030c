"""Runs the code of the documents: each page as one program, and the examples in the docstrings.

The ```python blocks of a page are one program, run from a directory of its own with warnings as errors; lines keep
their numbers, so that a traceback points into the page. Words after the language say more:

    ```python notest                    shown, not run
    ```python needs=pyspark,java        the page is skipped where one of these is neither a module nor a command
"""

from __future__ import annotations

import doctest
import importlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "batchqueue_async"
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)")
FUTURE = "from __future__ import annotations"
# Python reports these on stderr and still exits with 0.
SILENT_FAILURES = ("Exception ignored", "was never retrieved", "was never awaited", "was destroyed but it is pending")


class PageError(Exception):
    pass


@dataclass
class Page:
    lines: list[str] = field(default_factory=list)  # as many as the page has, those outside the code empty
    needs: set[str] = field(default_factory=set)

    @property
    def code(self) -> str:
        return "\n".join(self.lines) + "\n"


def is_run(number: int, info: str, page: Page) -> bool:
    """Tell whether a block is run, and note what it needs; a typo in its words must not make it pass unrun."""
    language, *words = info.split() or [""]
    if language in {"py", "python3", "pycon", "{code-block}", "{code}"} and (language[0] != "{" or "python" in words):
        raise PageError(f"line {number}: ```{info}: code is checked only in ```python blocks; write ```python")
    if language != "python":
        return False
    for word in words:
        if word.startswith("needs="):
            page.needs.update(word.removeprefix("needs=").split(","))
        elif word != "notest":
            raise PageError(f"line {number}: ```{info}: unknown word {word!r}; there are notest and needs=module,...")
    return "notest" not in words


def read_page(text: str) -> Page:
    page = Page()
    fence: re.Match[str] | None = None
    run = False
    for number, line in enumerate(text.splitlines(), 1):
        page.lines.append("")
        found = FENCE.fullmatch(line.rstrip())
        if fence is None:
            if found:
                fence, run = found, is_run(number, found["info"].strip(), page)
        elif found and found["ticks"].startswith(fence["ticks"]) and not found["info"].strip():
            fence = None
        elif run and line.strip() == FUTURE:
            page.lines[0] = FUTURE  # Python wants it first, and a page may show it in any block
        elif run:
            page.lines[-1] = line.removeprefix(fence["indent"])
    if fence is not None:
        raise PageError(f"the block ```{fence['info'].strip()} is never closed")
    return page


def run_page(path: Path, directory: Path) -> None:
    page = read_page(path.read_text())
    for module in sorted(page.needs):
        if find_spec(module) is None and shutil.which(module) is None:
            pytest.skip(f"needs {module}")
    program = directory / f"{path.stem.replace('-', '_')}.py"
    program.write_text(page.code)
    command = [sys.executable, "-W", "error", str(program)]
    # Variables that steer the suite begin as those of a configuration do.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BATCHQUEUE_")}
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=300, check=False)
    failed = done.returncode != 0 or any(words in done.stderr for words in SILENT_FAILURES)
    assert not failed, f"{path}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if "_build" not in path.parts and "```" in path.read_text()]


def modules_with_examples() -> list[str]:
    found = [path.relative_to(ROOT) for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text()]
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in found]


@pytest.mark.timeout(330)  # a page that starts Spark on a busy machine
@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_page(path, tmp_path):
    run_page(path, tmp_path)


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstrings(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(PACKAGE.name):
            raise
        pytest.skip(f"needs {error.name}")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


# --- the runner itself


def run_text(tmp_path: Path, *lines: str) -> None:
    path = tmp_path / "a-page.md"
    path.write_text("\n".join(lines))
    run_page(path, tmp_path)


def test_a_page_is_one_program(tmp_path):
    run_text(tmp_path, "# T", "```python", "x = 1", "```", "- then", "  ```python", "  if x:", "      y = x", "  ```")
    run_text(tmp_path, "# T", "```python", "x = 1", "```", "", "```python", FUTURE, "y: Unknown = x", "```")


def test_an_error_is_reported_at_its_line_of_the_page(tmp_path):
    with pytest.raises(AssertionError, match=r'a_page\.py", line 7'):
        run_text(tmp_path, "# T", "```python", "x = 1", "```", "text", "```python", "assert x == 2", "```")


def test_other_blocks_are_not_run(tmp_path):
    run_text(tmp_path, "```bash", "make", "```", "```python notest", "boom", "```", "````", "```python", "boom", "````")


@pytest.mark.parametrize(
    "code",
    [
        "import warnings; warnings.warn('old')",
        "async def f(): ...\nf()",
        "class A:\n    def __del__(self): 1 / 0\nA()",
        "import asyncio\nasync def f(): 1 / 0\nasync def g(): asyncio.ensure_future(f())\nasyncio.run(g())",
    ],
    ids=["warning", "never awaited", "in a finalizer", "in a lost task"],
)
def test_a_failure_that_python_only_reports_fails_the_page(tmp_path, code):
    with pytest.raises(AssertionError, match="exit code"):
        run_text(tmp_path, "```python", code, "```")


def test_what_a_page_needs_skips_it(tmp_path):
    with pytest.raises(pytest.skip.Exception, match="needs no_such_module"):
        run_text(tmp_path, "```python needs=asyncio,no_such_module", "```")


@pytest.mark.parametrize("info", ["python no-test", "python skip", "py", "pycon", "{code-block} python"])
def test_a_block_that_would_pass_unrun_by_mistake_is_refused(info):
    with pytest.raises(PageError, match="line 1"):
        read_page(f"```{info}\nboom\n```")


def test_an_open_block_is_refused():
    with pytest.raises(PageError, match="never closed"):
        read_page("```python\nx = 1\n")
