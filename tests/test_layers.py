"""One way in, one way on: a folder imports only what stands before it in the way of the data, for types too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "batchqueue_async"

_BASE = ("errors", "_support")
_CORE = (*_BASE, "policies", "config_file", "config")

# Each folder (or module of the top level), and what else of the package it may know. Every folder has a line.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "_support": ("errors",),
    "fault_proxy": ("errors",),
    "policies": (*_BASE, "_native"),
    "config_file": _BASE,
    "config": (*_BASE, "policies", "config_file"),
    "queue": (*_CORE, "_native"),
    "runtime": (*_CORE, "queue"),
    "bridge": (*_CORE, "_native", "queue", "runtime"),
    # The frame is named for a type alone.
    "leases": (*_BASE, "durable.state"),
    "durable.disk": (*_BASE, "durable", "durable.state", "leases"),
    "durable.state": (*_BASE, "durable", "durable.disk", "durable.write", "leases"),
    "durable.write": (*_BASE, "durable", "durable.disk", "durable.state", "durable.read", "leases"),
    "durable.read": (*_BASE, "durable", "durable.disk", "durable.state", "durable.write", "leases"),
    "durable": (
        *_BASE,
        "policies",
        "durable.disk",
        "durable.state",
        "durable.write",
        "durable.read",
        "leases",
        "queue",
    ),
    "sinks": (*_BASE, "sinks._shared"),
    "sinks._shared": (*_BASE, "sinks"),
    **{f"sinks.{name}": (*_BASE, "sinks", "sinks._shared") for name in ("sqlite", "postgres", "kafka", "http", "grpc")},
    "sinks.otlp": (*_BASE, "sinks", "sinks._shared", "sinks.grpc", "sinks.http"),
    **{f"sinks.{name}": (*_BASE, "sinks", "sinks._shared", "sinks.http") for name in ("clickhouse", "opensearch")},
    "export.control": (*_BASE, "policies", "export"),
    "export.send_queue": (*_BASE, "durable", "durable.disk", "leases", "export"),
    "export.delivery": (
        *_CORE,
        "queue",
        "sinks",
        "leases",
        "durable",
        "export",
        "export.control",
        "export.send_queue",
    ),
    "export": (
        *_CORE,
        "queue",
        "sinks",
        "leases",
        "durable",
        "export.control",
        "export.send_queue",
        "export.delivery",
    ),
    "intake": (
        *_CORE,
        "queue",
        "sinks",
        "sinks._shared",
        "export",
        "export.control",
        "intake.amqp",
        "intake.kafka",
        "intake.nats",
        "intake.redis",
    ),
    **{f"intake.{name}": (*_BASE, "sinks._shared", "intake") for name in ("amqp", "nats", "redis")},
    "intake.kafka": (*_CORE, "export", "intake", "sinks", "sinks._shared", "sinks.kafka"),
    "testing": (*_CORE, "fault_proxy", "intake", "queue", "sinks"),
    "_native": (),
    "spark": (
        *_CORE,
        "queue",
        "runtime",
        "bridge",
        "durable",
        "export",
        "sinks",
        "sinks._shared",
        "sinks.postgres",
        "sinks.sqlite",
        "spark.writes",
    ),
    "spark.writes": (*_BASE, "sinks", "sinks._shared", "spark"),
    "spark.executors": (*_CORE, "bridge", "export", "sinks", "sinks._shared", "sinks.sqlite", "spark", "spark.writes"),
    "spark.pipelines": (*_CORE, "sinks", "sinks._shared", "spark", "spark.executors", "spark.writes"),
    # It reads what registers itself, and names the classes of views for types.
    "observe": (*_CORE, "queue", "runtime", "bridge", "durable", "export", "sinks"),
    "service.file": (*_CORE, "durable", "export", "intake", "sinks", "sinks._shared"),
    "service": (
        *_CORE,
        "queue",
        "runtime",
        "durable",
        "export",
        "sinks",
        "sinks.http",
        "intake",
        "observe",
        "service.file",
        "spark.pipelines",
    ),
    "cli": (
        *_CORE,
        "runtime",
        "durable",
        "durable.disk",
        "export",
        # How an exporter writes a record, which a person wants to read.
        "export.send_queue",
        "observe",
        "service",
        "service.file",
        "sinks",
        "sinks.sqlite",
        "spark.pipelines",
    ),
    "cli.live": (*_BASE, "cli", "observe", "sinks"),
}

# Single modules that look ahead, each with its reason.
EXCEPTIONS: dict[str, set[str]] = {
    # Names of the package; `SparkPipeline` is imported when it is asked for.
    "spark": {"spark.executors.data_source", "spark.pipelines.pipeline"},
    # `bridge()` is where a user gets one: the bridge is imported when it is called, and for the answer's type.
    "queue.batch_queue": {"bridge.sync_queue"},
    # Documented import paths of names that live in a folder by now.
    "sinks.http_formats": {"sinks.http.formats"},
    "sinks.otlp_request": {"sinks.otlp.request"},
    "sinks.remote_write": {"sinks.http.remote_write"},
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules() -> dict[str, Path]:
    found = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: path for name, path in found.items() if name != "batchqueue_async"}


def folder_of(module: str) -> str:
    """The folder that a module stands in, or the module itself at the top level."""
    name = module.removeprefix("batchqueue_async").removeprefix(".")
    while name:
        if name in MAY_IMPORT:
            return name
        name = name.rpartition(".")[0]
    raise LookupError(f"{module} has no line in MAY_IMPORT; say what its folder may know")


class Imports(ast.NodeVisitor):
    """The package's modules that code imports, anywhere in it and for types too."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.found: set[str] = set()

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
def test_a_module_imports_only_what_its_folder_may_know(name):
    here = folder_of(name)
    used = imports(modules()[name].read_text(), set(modules()))
    ahead = {
        other.removeprefix("batchqueue_async.") for other in used if folder_of(other) not in {here, *MAY_IMPORT[here]}
    }
    assert ahead == EXCEPTIONS.get(name.removeprefix("batchqueue_async."), set())


def test_every_folder_has_a_line_and_every_line_a_folder():
    folders = {name_of(path.parent / "__init__.py") for path in PACKAGE.rglob("*.py")} - {"batchqueue_async"}
    top = {name_of(path) for path in PACKAGE.glob("*.py")} - {"batchqueue_async"}
    assert {name.removeprefix("batchqueue_async.") for name in folders | top} == set(MAY_IMPORT)


def test_no_module_imports_the_whole_package():
    for name, path in modules().items():
        assert "batchqueue_async" not in imports(path.read_text(), set(modules())), name


def test_imports_are_really_looked_at():
    known = {"batchqueue_async._support.log", "batchqueue_async.queue.drain"}
    source = (
        "from typing import TYPE_CHECKING\n"
        "from batchqueue_async._support import log\n"
        "if TYPE_CHECKING:\n    from batchqueue_async.config import QueueConfig\n"
        "def f():\n    from batchqueue_async.queue.drain import DrainTask\n    import batchqueue_async.errors\n"
    )
    assert imports(source, known) == {
        "batchqueue_async._support.log",
        "batchqueue_async.config",
        "batchqueue_async.queue.drain",
        "batchqueue_async.errors",
    }
    with pytest.raises(LookupError, match=r"batchqueue_async.new has no line in MAY_IMPORT"):
        folder_of("batchqueue_async.new")
