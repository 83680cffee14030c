"""One way in, one way on: a module imports only what stands before it in the way of the data."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "batchqueue_async"

# A package stands for all its modules that have no line of their own; among those any order goes.
ORDER = [
    "errors",
    "log",
    "forks",
    "fault_proxy",
    "testing",
    "policies",
    "queue",
    "queue.selector",
    "queue.balancer",
    "config_file",
    "config",
    "queue.stats",
    "queue.waits",
    "queue.buffer",
    "queue.line",
    "queue.partition",
    "queue.moves",
    "queue.placement",
    "queue.drain",
    "queue.adapters",
    "queue.dispatch",
    "queue.rebalance",
    "queue.closing",
    "queue.producing",
    "queue.delivering",
    "queue.batch_queue",
    "runtime",
    "runtime.asking",
    "runtime.scheduler",
    "runtime.manager",
    "runtime.watchdog",
    "runtime.gate",
    "runtime.routing",
    "runtime.door",
    "runtime.sync_producing",
    "runtime.sync_queue",
    "runtime.bridge",
    "runtime.runner",
    "durable",
    "sinks",
    "export.checks",
    "export.sizing",
    "export.policies",
    "export.config",
    "export.codec",
    "export.stretch",
    "export.memory_queue",
    "export.send_queue",
    "export.breaker",
    "export.gate",
    "export.retry",
    "export.outcome",
    "export.parcel",
    "export.failover",
    "export.scaling",
    "export.stats",
    "export.delivery",
    "export.opening",
    "export.pipeline",
    "export.feeding",
    "export.engine",
    "export.exporter",
    "export",
    "intake",
    "observe",
    "spark",
    "cli",
]


def rank(module: str) -> int:
    """A module's place in the order; packages that have lines for their modules want one for each of them."""
    name = module.removeprefix("batchqueue_async").removeprefix(".")
    if name in ORDER:
        return ORDER.index(name)
    package = name.split(".")[0]
    if package in ORDER and not any(entry.startswith(f"{package}.") for entry in ORDER):
        return ORDER.index(package)
    raise LookupError(f"{module} has no place in ORDER; say where it stands in the way of the data")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules() -> dict[str, Path]:
    found = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: path for name, path in found.items() if name != "batchqueue_async"}


class Imports(ast.NodeVisitor):
    """The package's modules that code imports at run time, anywhere in it."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "batchqueue_async"}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert not node.level, "a relative import"
        module = node.module or ""
        if module.split(".")[0] != "batchqueue_async":
            return
        inner = {f"{module}.{alias.name}" for alias in node.names} & self.known
        self.found |= inner or {module}


def imports(source: str, known: set[str]) -> set[str]:
    visitor = Imports(known)
    visitor.visit(ast.parse(source))
    return visitor.found


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_only_what_stands_before_it(name):
    path = modules()[name]
    later = {other for other in imports(path.read_text(), set(modules())) if rank(other) > rank(name)}
    same_package = name.split(".")[1]
    free = not any(entry.startswith(f"{same_package}.") for entry in ORDER)
    assert {other for other in later if not (free and other.split(".")[1] == same_package)} == set()


def test_every_line_of_the_order_is_a_module_or_a_package_to_come():
    names = {name.removeprefix("batchqueue_async.") for name in modules()}
    to_come = {"durable", "sinks", "export", "intake", "observe", "spark", "cli"}
    assert set(ORDER) - names - to_come == set()
    assert len(ORDER) == len(set(ORDER))


def test_no_module_imports_the_whole_package():
    for name, path in modules().items():
        assert "batchqueue_async" not in imports(path.read_text(), set(modules())), name


def test_the_order_is_really_looked_at():
    known = {"batchqueue_async.log", "batchqueue_async.queue.drain"}
    source = (
        "from typing import TYPE_CHECKING\n"
        "from batchqueue_async import log\n"
        "if TYPE_CHECKING:\n    from batchqueue_async.config import QueueConfig\n"
        "def f():\n    from batchqueue_async.queue.drain import Worker\n    import batchqueue_async.errors\n"
    )
    assert imports(source, known) == {
        "batchqueue_async.log",
        "batchqueue_async.queue.drain",
        "batchqueue_async.errors",
    }
    assert rank("batchqueue_async.queue.drain") > rank("batchqueue_async.queue.partition")
    with pytest.raises(LookupError, match=r"batchqueue_async.queue.new has no place in ORDER"):
        rank("batchqueue_async.queue.new")
