# ruff: noqa: SIM905 - words on lines
"""The pages of the file: every field has its row, and every key of metrics-governor's has a field of ours."""

from __future__ import annotations

import re

import pytest
from from_tree import ROOT, service_file

from batchqueue_async.service.file.kinds import SINKS, SOURCES
from batchqueue_async.service.file.schema import FILE
from batchqueue_async.service.file.shapes import Struct, Tagged, Things

# The keys of the document's YAML and of its tables; and its flags.
KEYS = (
    "type enabled path max_size max_bytes full_behavior inmemory_blocks chunk_size meta_sync_interval "
    "write_buffer_size compression always_queue workers backoff.enabled backoff.multiplier "
    "circuit_breaker.enabled circuit_breaker.threshold circuit_breaker.reset_timeout pipeline_split.enabled "
    "pipeline_split.preparer_count pipeline_split.sender_count pipeline_split.channel_size "
    "adaptive_workers.enabled adaptive_workers.min_workers adaptive_workers.max_workers max_concurrent_sends "
    "global_send_limit "
).split()
FLAGS = (
    "-queue-enabled -queue-type -queue-path -queue-max-size -queue-max-bytes -queue-full-behavior "
    "-queue-always-queue -queue-workers -queue-inmemory-blocks -queue-chunk-size -queue-meta-sync "
    "-queue-stale-flush -queue-write-buffer-size -queue-compression -queue-retry-interval "
    "-queue-max-retry-delay -queue-backoff-enabled -queue-backoff-multiplier -queue-circuit-breaker-enabled "
    "-queue-circuit-breaker-threshold -queue-circuit-breaker-reset-timeout -queue-memory-percent "
    "-memory-limit-ratio -queue-adaptive-enabled -queue-target-utilization "
).split()
ROW = re.compile(r"^\| `(?P<key>[\w.]+)` \| (?:`(?P<flag>[\w-]+)`)? *\| `(?P<ours>[\w.]+)` \|", re.MULTILINE)


def rows():
    return list(ROW.finditer((ROOT / "docs" / "reference" / "metrics-governor-keys.md").read_text()))


def test_every_key_and_flag_has_a_row():
    assert set(KEYS) <= {row["key"] for row in rows()}
    assert set(FLAGS) == {row["flag"] for row in rows() if row["flag"]}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["key"])
def test_our_field_is_in_the_schema(row):
    here = FILE
    for name in row["ours"].split("."):
        if isinstance(here, Things):
            here = here.of
        else:
            assert isinstance(here, Struct), row["ours"]
            here = here.fields[name].of


def test_the_reference_has_a_row_for_every_field():
    text = service_file()
    for section, field in FILE.fields.items():
        inner = field.of.of if isinstance(field.of, Things) else field.of
        if isinstance(inner, (Struct, Tagged)):
            assert f"## `{section}`" in text
    for name, kind in [*SINKS.items(), *SOURCES.items()]:
        assert f"`{name}`\n" in text
        for each in kind.fields:
            assert f"| `{each}` |" in text
