"""The table of configuration fields says what `QueueConfig` says."""

from __future__ import annotations

import re
from dataclasses import fields

from test_docs import ROOT

import batchqueue_async as bq
from batchqueue_async import config

ROW = re.compile(r"^\| `(\w+)` \| `([^`]*)` \| (?:`([^`]*)`|not in a file) \| .+ \|$", re.MULTILINE)


def rows():
    return ROW.findall((ROOT / "docs" / "reference" / "configuration-fields.md").read_text())


def shown(value):
    return value.name if isinstance(value, bq.BufferStrategy) else str(value)


def test_every_field_is_listed_with_its_default():
    listed = [(name, default) for name, default, _ in rows()]
    assert listed == [(field.name, shown(field.default)) for field in fields(bq.QueueConfig)]


def test_every_value_for_a_file_is_one(tmp_path):
    path = tmp_path / "queues.yaml"
    for name, _, value in rows():
        if not value:
            assert name in config._FROM_CODE
            continue
        path.write_text(f"queues: {{q: {{{name}: {value}}}}}")
        assert isinstance(bq.load_config(path, environ={})["q"], bq.QueueConfig)
