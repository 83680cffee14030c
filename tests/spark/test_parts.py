"""The parts that need no Spark, in this process: ways to the driver, rows, ledgers, keys and closed queues."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pytest

import batchqueue_async as bq
from batchqueue_async.sinks.base import Attempt, BatchKey
from batchqueue_async.spark import BatchQueueDataSource, collect, requirements
from batchqueue_async.spark import rows as rows_module
from batchqueue_async.spark.executors import data_source
from batchqueue_async.spark.executors.options import as_options
from batchqueue_async.spark.executors.part_writer import Worker
from batchqueue_async.spark.micro_batch import RepeatBatchError
from batchqueue_async.spark.rows import converter
from batchqueue_async.spark.writes.ledger import FileLedger

BATCH = pa.RecordBatch.from_pydict({"value": [1, 2], "name": ["a", None]})


# --- the door, and the API


def test_pandas_is_looked_for_and_not_imported(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    with pytest.raises(bq.ConfigError, match=r"needs pandas.*pip install 'batchqueue-async\[spark\]'"):
        requirements.check()
    code = "import sys, batchqueue_async.spark.executors.part_writer; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("writer", [data_source.BatchWriter, data_source.StreamWriter])
@pytest.mark.parametrize("method", ["write", "commit", "abort"])
def test_parameters_have_the_names_of_the_api(writer, method):
    """Spark passes some of them by name."""
    ours, theirs = (list(inspect.signature(getattr(kind, method)).parameters) for kind in (writer, writer.__base__))
    assert ours == theirs


# --- to the driver


def test_record_batches_are_packed_one_by_one():
    packed = list(collect._packer()(iter([BATCH, BATCH.slice(1)])))
    assert [each.schema.names for each in packed] == [["packed"], ["packed"]]
    found = [pa.ipc.open_stream(each["packed"][0].as_buffer()).read_all().to_pylist() for each in packed]
    assert found == [BATCH.to_pylist(), BATCH.to_pylist()[1:]]


@pytest.mark.parametrize("given", [0, 1])
def test_s_11_a_batch_that_is_too_large_for_one_job_goes_the_other_way_at_once(monkeypatch, given):
    """Spark's estimate was wrong: once rows were given, the batch is asked for again, else nobody sees it."""

    def too_large(frame, *, ordered):
        yield from [BATCH] * given
        raise RuntimeError("bigger than spark.driver.maxResultSize")

    monkeypatch.setattr(collect, "collected", too_large)
    monkeypatch.setattr(collect, "streamed", lambda frame, limit: (each for each in [BATCH, BATCH]))
    monkeypatch.setattr(collect, "estimated_bytes", lambda frame: 80)
    collector = collect.Collector("test", 1 << 20)
    collector.last_bytes = 80
    if given:
        with pytest.raises(RepeatBatchError):
            list(collector.batches(SimpleNamespace(), ordered=False))
    assert list(collector.batches(SimpleNamespace(), ordered=False)) == [BATCH, BATCH]
    assert collector.path == "stream"


def test_a_spark_without_the_private_parts_is_known(monkeypatch):
    monkeypatch.delattr("pyspark.util._create_local_socket")
    assert collect._connector() is None


# --- rows


class ByName(msgspec.Struct, kw_only=True):
    name: str | None
    value: int


@dataclasses.dataclass
class Turned:
    name: str | None
    value: int


@pytest.mark.parametrize("kind", [ByName, Turned])
def test_columns_find_their_fields_by_name(kind):
    extended = BATCH.append_column("more", pa.array([0, 0]))
    assert converter(kind)(extended) == [kind(name="a", value=1), kind(name=None, value=2)]


@pytest.mark.parametrize("rows", ["dict", "tuple"])
def test_values_are_plain_python_ones(rows):
    columns = {
        "i": pa.array([1, None], pa.int32()),
        "f": pa.array([0.5, 1.5], pa.float32()),
        "b": [True, False],
        "t": pa.array([0, None], pa.timestamp("us")),
        "l": [[1], None],
        "s": pa.array(["x", None], pa.large_string()),
    }
    first = converter(rows)(pa.RecordBatch.from_pydict(columns))[0]
    values = list(first.values()) if rows == "dict" else list(first)
    assert [type(value).__name__ for value in values] == ["int", "float", "bool", "datetime", "list", "str"]


@pytest.mark.parametrize("rows", ["batch", "dict", "tuple"])
def test_a_schema_is_looked_at_once_for_all_record_batches_of_a_stream(monkeypatch, rows):
    looked_at = []
    monkeypatch.setattr(rows_module, "check_type", lambda field: looked_at.append(field.name))
    written = pa.BufferOutputStream()
    with pa.ipc.new_stream(written, BATCH.schema) as stream:
        for _ in range(3):
            stream.write_batch(BATCH)
    convert = converter(rows)
    for batch in pa.ipc.open_stream(written.getvalue()):  # each has its own object for the schema
        convert(batch)
    assert looked_at == ["value", "name"]
    convert(BATCH.rename_columns(["other", "name"]))
    assert looked_at[2:] == ["other", "name"]


def test_a_schema_that_differs_in_what_marks_a_variant_is_another_one():
    plain = [pa.field("value", pa.binary()), pa.field("metadata", pa.binary())]
    marked = [plain[0], plain[1].with_metadata({"variant": "true"})]
    value = [{"value": b"\x00", "metadata": b"\x01\x00\x00"}]  # the null of a variant
    convert = converter("dict")
    kinds = [pa.struct(plain), pa.struct(marked)]
    found = [convert(pa.RecordBatch.from_arrays([pa.array(value, kind)], ["v"]))[0]["v"] for kind in kinds]
    assert found == [value[0], None]


# --- ledgers


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not one"), ('{"version": 9, "delivered": {}}', "has version 9, and 1 is known")]
)
def test_a_ledger_that_is_none_is_refused(tmp_path, text, message):
    (tmp_path / "ledger").write_text(text)
    with pytest.raises(bq.ConfigError, match=f"{message}.*move the file away"):
        FileLedger(tmp_path / "ledger")


def test_a_ledger_remembers_each_source(tmp_path):
    ledger = FileLedger(tmp_path / "new" / "ledger")
    ledger.note(BatchKey("a", 3))
    ledger.note(BatchKey("b", 1))
    again = FileLedger(tmp_path / "new" / "ledger")
    found = [again.is_delivered(BatchKey(*each)) for each in (("a", 2), ("a", 3), ("a", 4), ("b", 1), ("c", 0))]
    assert found == [True, True, False, True, False]
    assert (tmp_path / "new" / "ledger").stat().st_mode & 0o777 == 0o600


# --- tasks


def test_a_task_of_a_stream_names_its_query_and_batch(monkeypatch, tmp_path):
    properties = {"sql.streaming.queryId": "query", "streaming.sql.batchId": "7"}
    context = SimpleNamespace(partitionId=lambda: 2, taskAttemptId=lambda: 11, getLocalProperty=properties.get)
    monkeypatch.setattr(data_source, "_context", lambda: context)
    source = BatchQueueDataSource({"sink": "jsonl", "path": str(tmp_path / "out")})
    writer = source.streamWriter(None, False)
    first, second = (writer.write(iter([BATCH])).part.attempt for _ in range(2))
    assert (first.key, first.part) == (BatchKey("query", 7), 2)
    assert first.name.startswith("11-")
    assert first.name != second.name  # Spark counts its attempts anew in each application
    batch_writer = source.writer(None, False)
    assert batch_writer.write(iter([BATCH])).part.attempt.key == batch_writer.key
    del properties["streaming.sql.batchId"]
    with pytest.raises(RuntimeError, match="does not tell the task"):
        writer.write(iter([BATCH]))


def test_rows_that_a_closed_queue_did_not_take_fail_their_part():
    worker = Worker(as_options({"sink": "spark_sinks:no_op_factory"}))
    worker._queue.shutdown()
    with pytest.raises(bq.DeliveryError, match="the queue was closed amid the batch"):
        worker.write(Attempt(BatchKey("query", 0), 0, "a"), iter([BATCH]))
