"""`format("batchqueue")`: DataFrames written by the executors, each Python worker through a queue of its own.

Spark runs this code in four kinds of process. One plans the write (`writer`, `streamWriter`), the executors' workers
run `write`, and another process of the driver's machine runs `commit` or `abort`. All that they share is the options,
the messages that `write` returns, and what the sink has staged.

The parameter names below are those of the Data Source API, which passes some of them by name.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError, RetryableError
from batchqueue_async.sinks.base import (
    Attempt,
    BatchKey,
    DeclaringSink,
    LedgerSink,
    PrunableSink,
    SiftingSink,
    StagingSink,
)
from batchqueue_async.sinks.jsonl import JsonLinesSink
from batchqueue_async.spark.arrow_types import arrow_schema
from batchqueue_async.spark.executors.letters import LettersOfBatch, letters_key
from batchqueue_async.spark.executors.options import Options, WriteOptions, as_options, read_options
from batchqueue_async.spark.executors.part_writer import Part, worker
from batchqueue_async.spark.micro_batch import Patience, Retries
from batchqueue_async.spark.rows import table_schema
from batchqueue_async.spark.run_reports import RunReport, add_report
from batchqueue_async.spark.writes.write_notes import IS_IN, rewound

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    from pyspark.sql.types import StructType

    from batchqueue_async.sinks.base import Sink
else:  # PySpark 4.0 has it not; streamWriter says so
    StreamArrowWriter = getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter)


@dataclass(frozen=True)
class PartWritten(WriterCommitMessage):
    """What a task tells the driver: its attempt, and its counters."""

    part: Part


class BatchQueueDataSource(DataSource):
    """Writes through queues on the executors, in batch and streaming jobs, in Append mode.

    Register it once for a session, then write with `format("batchqueue")`::

        spark.dataSource.register(BatchQueueDataSource)
        df.write.format("batchqueue").option("sink", "jsonl").option("path", "/data/out").mode("append").save()

    Options: `sink` ("sqlite", "jsonl", or "package.module:factory"), `rows`, `rows_in_flight`, `bytes_in_flight`,
    `key`, `non_finite`, `on_bad_row`, `dead_letters`, `queue.*` as in `QueueConfig`, `export.*` as in `ExportConfig`,
    and what the sink takes: `path`, `table`, `busy_timeout`; a factory is called with all options as a dict.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "batchqueue"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:  # noqa: FBT001 - Spark's API
        """The writer of a batch job."""
        return BatchWriter(*_checked(self.options, schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: FBT001, N802 - Spark's API
        """The writer of a streaming query."""
        if not hasattr(datasource, "DataSourceStreamArrowWriter"):
            raise ConfigError(
                "format batchqueue: this PySpark has no Arrow writers for streams; "
                "use PySpark 4.1 or newer, or foreachBatch(DriverSink(...))"
            )
        return StreamWriter(*_checked(self.options, schema, overwrite=overwrite))


def _checked(given: Any, schema: Any, *, overwrite: bool) -> tuple[Options, Any]:
    """The options, and the Arrow schema of the table; what is wrong is raised here, where the write is planned."""
    if overwrite:
        raise ConfigError("format batchqueue: it only appends; write with .mode('append'), or outputMode('append')")
    options = as_options(given)
    read = read_options(options)
    read.check(("unknown",) if schema is None else list(schema.names))
    if schema is None:
        return options, None
    return options, table_schema(arrow_schema("format batchqueue", schema), read.rows, read.make())


class BatchWriter(DataSourceArrowWriter):
    """One batch job: planned once, then sent to the executors and to the commit."""

    def __init__(self, options: Options, schema: Any = None) -> None:
        self.options = options
        self.schema = schema
        self.key = BatchKey(f"job-{uuid.uuid4().hex}", 0)

    def write(self, iterator: Iterator[Any]) -> PartWritten:
        """Write one part, on an executor."""
        return PartWritten(worker(self.options).write(_attempt(self.key), iterator, self.schema))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish what the tasks staged."""
        publish(self.options, self.key, messages, self.schema)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - its key is known
        """Drop what the tasks staged; Spark does not repeat the job under this key."""
        discard(self.options, self.key, for_good=True)


class StreamWriter(StreamArrowWriter):
    """One streaming query; the query's id and the batch's come with each task."""

    def __init__(self, options: Options, schema: Any = None) -> None:
        self.options = options
        self.schema = schema

    def write(self, iterator: Iterator[Any]) -> PartWritten:
        """Write one part of a micro-batch, on an executor."""
        run = _context().getLocalProperty("spark.jobGroup.id") or ""
        return PartWritten(worker(self.options).write(_attempt(_stream_key()), iterator, self.schema, run=run))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - the base class's name
        """Publish what the tasks of the micro-batch staged."""
        key = _key_of(messages, batchId)
        if key is not None:
            publish(self.options, key, messages, self.schema)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - the base class's name
        """Drop what the tasks of the micro-batch staged, if one of them came far enough to name the query."""
        key = _key_of(messages, batchId)
        if key is not None:
            discard(self.options, key)


def _parts(messages: Sequence[WriterCommitMessage | None]) -> list[Part]:
    return [message.part for message in messages if isinstance(message, PartWritten)]


def _key_of(messages: Sequence[WriterCommitMessage | None], number: int) -> BatchKey | None:
    return next((BatchKey(part.attempt.key.source, number) for part in _parts(messages)), None)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("format batchqueue: write was called outside of a Spark task")
    return context


def _attempt(key: BatchKey) -> Attempt:
    # Spark counts task attempts anew in each application: what an earlier one staged must not be taken for this one's.
    context = _context()
    return Attempt(key, context.partitionId(), f"{context.taskAttemptId()}-{uuid.uuid4().hex[:12]}")


def _stream_key() -> BatchKey:
    context = _context()
    query, batch = (context.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
    if not query or not batch:
        raise RuntimeError("format batchqueue: Spark does not tell the task its streaming query and batch")
    return BatchKey(query, int(batch))


def _staging(read: WriteOptions) -> StagingSink | None:
    """The sink, if tasks stage in it; an exporter sends to it at once."""
    sink = read.make()
    return sink if isinstance(sink, StagingSink) and read.export is None else None


def publish(
    options: Options, key: BatchKey, messages: Sequence[WriterCommitMessage | None], schema: Any = None
) -> bool:
    """Make a batch visible; False if it had been before."""
    parts = _parts(messages)
    read = read_options(options)
    letters = _letters(read, key, parts)
    attempts = [part.attempt for part in parts]
    fresh = asyncio.run(_publish(_staging(read), key, attempts, schema, letters))
    rows = sum(part.rows for part in parts)
    dead_rows = sum(part.dead_rows for part in parts) + (0 if letters is None else letters.count)
    if not fresh:
        log.warning("spark_batch_skipped", sink=read.sink, batch=str(key), rows=rows, reason=IS_IN)
    elif dead_rows:
        log.warning("spark_rows_dead", sink=read.sink, batch=str(key), rows=dead_rows)
    _report(parts, fresh=fresh, rows=rows, dead_rows=dead_rows)
    log.info(
        "spark_batch_published",
        batch=str(key),
        fresh=fresh,
        parts=len(parts),
        rows=rows,
        bytes=sum(part.bytes for part in parts),
        seconds=round(sum(part.seconds for part in parts), 3),
    )
    return fresh


def _letters(read: WriteOptions, key: BatchKey, parts: Sequence[Part]) -> LettersOfBatch | None:
    sink = read.letters()
    if sink is None:
        return None
    return LettersOfBatch(sink, read.sink, key, [part.attempt for part in parts if part.dead_rows])


def _report(parts: Sequence[Part], *, fresh: bool, rows: int, dead_rows: int) -> None:
    """Let the driver's listeners know what came of a micro-batch."""
    run = next((part.run for part in parts if part.run), "")
    if run and fresh:
        add_report(run, RunReport(batches=1, rows=rows - dead_rows, dead_rows=dead_rows))
    elif run:
        add_report(run, RunReport(skipped=1, skipped_rows=rows))


async def _publish(
    sink: StagingSink | None, key: BatchKey, attempts: Sequence[Attempt], schema: Any, letters: LettersOfBatch | None
) -> bool:
    """Publish, and again while the destination is away, as a `DriverSink` does."""
    retries = Retries(Patience())
    while True:
        try:
            await _declare(sink, schema)
            fresh = await _publish_once(sink, key, attempts, letters)
        except RetryableError as error:
            if not await retries.wait_after(f"format batchqueue: the publication of batch {key}", error):
                raise
        else:
            return fresh


async def _publish_once(
    sink: StagingSink | None, key: BatchKey, attempts: Sequence[Attempt], letters: LettersOfBatch | None
) -> bool:
    if sink is None:
        if letters is not None:
            await letters.publish([])
        return True
    if letters is None:
        fresh = await sink.publish(key, attempts)
    elif isinstance(sink, SiftingSink):
        fresh = await sink.publish_sifted(key, attempts, lambda refused: asyncio.run(letters.publish(refused)))
    else:
        if letters.some:
            await _check_not_past(sink, key)
        await letters.publish([])
        return await _publish_once(sink, key, attempts, None)
    if not fresh:
        await _check_not_past(sink, key)
        if letters is not None:
            await letters.publish([])  # they are in as well: what was staged again goes
    return fresh


async def _check_not_past(sink: StagingSink, key: BatchKey) -> None:
    if await _is_past(sink, key):
        raise rewound("format batchqueue", key)


async def _is_past(sink: StagingSink, key: BatchKey) -> bool:
    """Whether a later batch of the source is in: Spark repeats the last one of a query, and no earlier one."""
    if isinstance(sink, JsonLinesSink):
        return sink.is_published(key._replace(number=key.number + 1))
    if not isinstance(sink, LedgerSink):
        return False
    async with _opened(sink):
        notes = await sink.delivered()
    return any(note.key.source == key.source and note.key.number > key.number for note in notes)


async def _declare(sink: object, schema: Any) -> None:
    if schema is None or not isinstance(sink, DeclaringSink):
        return
    async with _opened(sink):
        await sink.declare(schema)


@asynccontextmanager
async def _opened(sink: Sink) -> AsyncGenerator[None]:
    try:
        await sink.open()
        yield
    finally:
        await sink.close()


def discard(options: Options, key: BatchKey, *, for_good: bool = False) -> None:
    """Drop what was staged for a batch; `for_good` where it never comes again."""
    read = read_options(options)
    asyncio.run(_discard(_staging(read), key, for_good=for_good))
    asyncio.run(_discard(read.letters(), letters_key(key), for_good=for_good))
    log.warning("spark_batch_aborted", batch=str(key))


async def _discard(sink: StagingSink | None, key: BatchKey, *, for_good: bool) -> None:
    if for_good and isinstance(sink, PrunableSink):
        await sink.abandon(key)
    elif sink is not None:
        await sink.discard(key)
