"""The table of configuration fields says what `QueueConfig` says, and the guide to files what is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields

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
