"""The table of configuration fields says what `QueueConfig` says, and the guide to files what is printed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from public_names import INTERNAL, NOT_PUBLIC, PAGES
from test_docs import ROOT, read_page

import batchqueue_async as bq
from batchqueue_async import config

ROW = re.compile(r"^\| `(\w+)` \| `([^`]*)` \| (?:`([^`]*)`|not in a file) \| .+ \|$", re.MULTILINE)

# Fields that don't go alone, and what they need.
PARTNERS = {"buffer_bytes": "size_of: len, ", "size_of": "buffer_bytes: 1MiB, "}


def rows():
    return ROW.findall((ROOT / "docs" / "reference" / "configuration-fields.md").read_text())


def shown(value):
    return "HandlerRetry()" if value == bq.HandlerRetry() else str(value)


def test_every_field_is_listed_with_its_default():
    listed = [(name, default) for name, default, _ in rows()]
    public = [field for field in fields(bq.QueueConfig) if not field.name.startswith("_")]
    assert listed == [(field.name, shown(field.default)) for field in public]


def test_every_value_for_a_file_is_one(tmp_path):
    path = tmp_path / "queues.yaml"
    for name, _, value in rows():
        if not value:
            assert name in config._FROM_CODE
            continue
        path.write_text(f"queues: {{q: {{{PARTNERS.get(name, '')}{name}: {value}}}}}")
        assert isinstance(bq.load_config(path, environ={})["q"], bq.QueueConfig)


def test_the_guide_to_files_prints_what_it_shows(tmp_path):
    text = (ROOT / "docs" / "how-to" / "configure-from-a-file.md").read_text()
    program = tmp_path / "guide.py"
    program.write_text(read_page(text).code)
    command, path = [sys.executable, str(program)], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout == "".join(re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


BY_HAND = {
    path
    for page in ("sinks.md", "spark-pipeline-fields.md")
    for path in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", (ROOT / "docs/reference" / page).read_text(), re.MULTILINE)
}


def is_alias(value):
    """A name for a type, or a table: shown where it is used."""
    return not inspect.isclass(value) and not inspect.isroutine(value)


def public_modules():
    """Every module that lists its names, but for those that only their neighbours import."""
    for module in pkgutil.walk_packages(bq.__path__, "batchqueue_async."):
        path = ROOT.joinpath(*module.name.split("."))
        file = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
        private = any(part.startswith("_") for part in module.name.split(".")[1:])
        if not private and module.name not in NOT_PUBLIC and "\n__all__ = " in file.read_text():
            yield module.name


def imported(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs {error.name}")


@pytest.mark.parametrize("name", sorted(public_modules()))
def test_every_public_name_has_a_place_in_the_reference(name):
    on_pages = [(module, each) for _, names in PAGES.values() for module, listed in names.items() for each in listed]
    on_pages += [tuple(path.rsplit(".", 1)) for path in BY_HAND]
    found = imported(name)
    # These have pages of their own, made from their `__all__`.
    for module in ("batchqueue_async.testing", "batchqueue_async.intake", "batchqueue_async.service"):
        on_pages += [(module, each) for each in imported(module).__all__]
    for each in found.__all__:
        value = getattr(found, each)
        of_the_package = each in bq.__all__ and getattr(bq, each) is value
        assert (
            is_alias(value)
            or of_the_package
            or any(shown == each and getattr(imported(module), shown) is value for module, shown in on_pages)
        ), f"{name}.{each} is on no page; add it to docs/public_names.py"


def test_what_the_reference_leaves_out_exists():
    for each in INTERNAL:
        owner, member = each.split(".")
        assert hasattr(getattr(bq, owner), member), f"{each} is gone; remove it from docs/public_names.py"


@pytest.mark.parametrize("module", sorted({module for _, names in PAGES.values() for module in names}))
def test_every_name_of_a_page_exists_and_has_a_docstring(module):
    found = imported(module)
    for listed in (names[module] for _, names in PAGES.values() if module in names):
        for each in listed:
            value = getattr(found, each)
            assert not isinstance(value, type) or value.__doc__, f"{module}.{each} has no docstring"
