"""From a DataFrame to Arrow record batches in the driver, bounded, by one of two ways.

*collect* runs one job, as `toArrow()` does, and reads its record batches as they come. It is the fastest, and the JVM
holds what is not read yet: it is for what fits. *stream* runs a job for a few partitions at a time, of as many as the
bytes seen so far say that fit, and the next ones while the rows of these are handled.

The way is chosen by what was seen: Spark's own estimate is right for a table in memory, and wrong by any factor for
files that are compressed. Where it was wrong, the batch goes the other way at once.
"""

from __future__ import annotations

import math
import threading
import uuid
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support import log
from batchqueue_async.errors import ConfigError
from batchqueue_async.spark.micro_batch import RepeatBatchError
from batchqueue_async.spark.requirements import need

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

COLLECT_BYTES = 256 * 1024 * 1024

_UNKNOWN = 1 << 60
"""Spark's statistics say this much or more where they know nothing."""

_DOUBT = 16
"""By how much an estimate may be too low that nothing has confirmed yet: files are compressed."""

_DOUBT_WIDE = 10_000
"""The same where values may be of any length: Spark counts 20 bytes for a text, whatever is in it."""

_FIXED = frozenset({"byte", "short", "integer", "long", "float", "double", "boolean", "date", "timestamp"})

_MARGIN = 2
"""By how much the next batch may be larger than the last one."""

_GROWTH = 8
"""By how much one group of partitions may be larger than the one before, whatever the bytes seen."""


class Collector:
    """Chooses the way for one DataFrame after the other, by what is known of its size.

    Attributes:
        last_bytes: what the last DataFrame had.
        path: the way of the last one: "collect" or "stream".
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.last_bytes: int | None = None
        self.path = ""
        self._last_estimate: int | None = None
        self._too_large = False

    def batches(self, frame: Any, *, ordered: bool) -> Generator[Any]:
        """The record batches of a DataFrame; `ordered` asks for Spark's order, which is the same in each run.

        Raises:
            RepeatBatchError: some were given already when it came out that one job is too small; asked for again, they
                come the other way.
        """
        estimate = estimated_bytes(frame)
        self._choose(estimate, frame)
        if self.path == "collect":
            given = False
            try:
                for batch in self._counted(collected(frame, ordered=ordered), estimate):
                    given = True
                    yield batch
            except GeneratorExit:
                raise
            except Exception as error:
                if not _is_too_large(error):
                    raise
                self._too_large = True
                log.warning("spark_path_changed", sink=self.name, path="stream", bytes=estimate, limit=self.limit)
                if given:
                    raise RepeatBatchError("the batch is larger than one job may collect") from error
            else:
                return
            self.path = "stream"
        yield from self._counted(streamed(frame, self.limit), estimate)
        self._too_large = False

    def _counted(self, found: Generator[Any], estimate: int | None) -> Generator[Any]:
        seen = 0
        with closing(found):
            for batch in found:
                seen += batch.nbytes
                yield batch
        self.last_bytes, self._last_estimate = seen, estimate

    def _choose(self, estimate: int | None, frame: Any) -> None:
        size = self._expected(estimate, frame)
        told, source = (estimate, "spark") if estimate is not None else (self.last_bytes, "last_batch")
        before, self.path = self.path, "collect" if size is not None and size <= self.limit else "stream"
        tell = log.debug if before == self.path else log.info
        tell(
            "spark_path_chosen",
            sink=self.name,
            path=self.path,
            bytes=told,
            known_from=source if told is not None else "nothing",
            limit=self.limit,
        )

    def _expected(self, estimate: int | None, frame: Any) -> int | None:
        """How large a DataFrame may be."""
        if self._too_large:
            return None
        if self.last_bytes is None:
            return None if estimate is None else estimate * _doubt(frame)
        if estimate is not None and self._last_estimate:
            return math.ceil(estimate * self.last_bytes / self._last_estimate)
        return max(self.last_bytes * _MARGIN, estimate or 0)


def _is_too_large(error: BaseException) -> bool:
    """Whether a job failed by the size of its results."""
    try:
        return "maxResultSize" in str(error)
    except Exception:  # noqa: BLE001 - the text of an error of the JVM is asked of the JVM, which may have ended
        return False


def _as_spark_says(error: BaseException) -> BaseException:
    """An error of the JVM as PySpark's own, where it has one for it."""
    java = getattr(error, "java_exception", None)
    if java is None or java.getCause() is None:
        return error
    try:
        with need("pyspark.errors.exceptions.captured").unwrap_spark_exception():
            raise error  # noqa: TRY301 - raised so that PySpark converts it
    except Exception as converted:  # noqa: BLE001 - its class is what PySpark decides
        return converted


def _doubt(frame: Any) -> int:
    names = {field.dataType.typeName() for field in frame.schema.fields}
    return _DOUBT if names <= _FIXED else _DOUBT_WIDE


def estimated_bytes(frame: Any) -> int | None:
    """How large Spark's optimizer thinks the DataFrame is; None where it does not know, as for a streaming batch."""
    plan = getattr(frame, "_jdf", None)
    if plan is None:
        return None  # Spark Connect does not say
    with suppress(AttributeError, TypeError):
        size = int(plan.queryExecution().optimizedPlan().stats().sizeInBytes())
        return size if size < _UNKNOWN else None
    return None


# --- one job


def collected(frame: Any, *, ordered: bool) -> Generator[Any]:
    """The record batches of one job; unless `ordered`, as they come, which holds none of them."""
    opened = None if ordered else _open_collect(frame)
    if opened is None:
        yield from frame.toArrow().to_batches()
        return
    stream, finish = opened
    try:
        yield from stream
    except GeneratorExit:
        raise  # the reader has enough: the job's complaint about that is not of interest
    except BaseException:
        finish()  # raises Spark's own error, if the job failed
        raise
    else:
        finish()


def _open_collect(frame: Any) -> tuple[Iterator[Any], Callable[[], object]] | None:
    """Start the job of `toArrow()` and read it incrementally; None where this PySpark has no such parts.

    PySpark has no public way to read a collect's record batches as they come; without its private parts `toArrow()`
    does the same and holds all of them.
    """
    connect = _connector()
    if connect is None or getattr(frame, "_jdf", None) is None:
        return None

    port, secret, server = frame._jdf.collectAsArrowToPython()  # noqa: SLF001 - PySpark's own
    file, socket = connect((port, secret))

    def finish() -> None:
        with need("pyspark.errors.exceptions.captured").unwrap_spark_exception():
            server.getResult()

    return _read(file, socket), finish


def _connector() -> Callable[[Any], tuple[Any, Any]] | None:
    try:
        need("pyspark.errors.exceptions.captured").unwrap_spark_exception  # noqa: B018 - is it there?
        return cast("Callable[[Any], tuple[Any, Any]]", need("pyspark.util")._create_local_socket)  # noqa: SLF001 - PySpark's own
    except (ImportError, AttributeError):
        return None


def _read(file: Any, socket: Any) -> Generator[Any]:
    arrow, serializers = need("pyarrow"), need("pyspark.serializers")
    with closing(socket), closing(file):
        yield from arrow.ipc.open_stream(file)
        count = serializers.read_int(file)
        if count < 0:
            raise RuntimeError(serializers.UTF8Deserializer().loads(file))
        for _ in range(count):  # the places of the batches in Spark's order
            serializers.read_int(file)


# --- a few partitions at a time


def streamed(frame: Any, limit: int = COLLECT_BYTES) -> Generator[Any]:
    """The record batches in Spark's order, of which about `limit` bytes are held at once."""
    jobs = _Jobs.of(frame)
    if jobs is None:
        yield from one_by_one(frame)
        return
    with closing(jobs):
        yield from jobs.batches(limit)


@dataclass(slots=True)
class _Group:
    """Partitions that one job computes."""

    start: int
    count: int
    thread: Any = None
    socket: Any = None
    file: Any = None
    error: BaseException | None = None


class _Jobs:
    """Runs jobs for groups of a DataFrame's partitions, each in a thread, by the parts that `toArrow` is made of.

    Shuffles are computed by the first job and kept by Spark, so that the others compute their own partitions alone.
    """

    def __init__(self, frame: Any, partitions: Any, schema: Any) -> None:
        self._context = frame.sparkSession.sparkContext
        self._partitions = partitions
        self._schema = schema
        self._count = int(partitions.getNumPartitions())
        self._tag = f"batchqueue-{uuid.uuid4().hex}"
        self._running: _Group | None = None
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def of(cls, frame: Any) -> _Jobs | None:
        """The jobs of a DataFrame; None where this PySpark has no such parts, as Spark Connect."""
        if _connector() is None or getattr(frame, "_jdf", None) is None:
            return None
        try:
            partitions = frame._jdf.toArrowBatchRdd().toJavaRDD()  # noqa: SLF001 - PySpark's own
            schema = need("pyspark.sql.pandas.types").to_arrow_schema(frame.schema, timezone="UTC")
        except (AttributeError, TypeError):
            return None
        return cls(frame, partitions, schema)

    def batches(self, limit: int) -> Generator[Any]:
        """The record batches of all partitions, in order."""
        following = self._start(0, int(self._context.defaultParallelism)) if self._count else None
        seen = done = 0
        while following is not None:
            group = following
            group.thread.join()
            if group.error is not None:
                following = self._smaller(group)
                continue
            end = group.start + group.count
            # Half of the bytes for the group that is read, half for the one that is computed meanwhile.
            size = self._next_size(group, limit // 2, seen, done)
            following = self._start(end, size) if done else None
            for batch in self._read(group):
                seen += batch.nbytes
                yield batch
            done = end
            if following is None:
                following = self._start(end, self._next_size(group, limit // 2, seen, done))

    def _next_size(self, group: _Group, budget: int, seen: int, done: int) -> int:
        fitting = self._count if not seen else budget * done // seen
        return max(1, min(group.count * _GROWTH, fitting))

    def _smaller(self, group: _Group) -> _Group | None:
        """A group again, in a part of it, if its size was what failed."""
        error = cast("BaseException", group.error)
        if not _is_too_large(error):
            raise error
        if group.count == 1:
            raise ConfigError(
                f"partition {group.start} of the DataFrame is larger than spark.driver.maxResultSize; "
                "repartition the DataFrame, or raise the setting"
            ) from error
        return self._start(group.start, group.count // 2)

    def _start(self, start: int, count: int) -> _Group | None:
        count = min(count, self._count - start)
        if count < 1:
            return None
        group = self._running = _Group(start, count)
        # It has this thread's local properties, by which Spark knows the query.
        group.thread = need("pyspark").InheritableThread(target=self._run, args=(group,))
        group.thread.daemon = True
        group.thread.start()
        return group

    def _run(self, group: _Group) -> None:
        context = self._context
        connect = cast("Callable[[Any], tuple[Any, Any]]", _connector())
        try:
            context.addJobTag(self._tag)
            wanted = context._jvm.java.util.ArrayList()  # noqa: SLF001 - PySpark's own
            for number in range(group.start, group.start + group.count):
                wanted.add(number)
            file, socket = connect(context._jvm.PythonRDD.runJob(context._jsc.sc(), self._partitions, wanted))  # noqa: SLF001 - PySpark's own
        except BaseException as error:  # noqa: BLE001 - it is raised where the group is waited for
            group.error = _as_spark_says(error)
            return
        with self._lock:
            if not self._closed:
                group.file, group.socket = file, socket
                return
        file.close()
        socket.close()

    def _read(self, group: _Group) -> Generator[Any]:
        arrow, serializers = need("pyarrow"), need("pyspark.serializers")
        with closing(group.socket), closing(group.file):
            for message in serializers.NoOpSerializer().load_stream(group.file):
                yield arrow.ipc.read_record_batch(arrow.py_buffer(message), self._schema)

    def close(self) -> None:
        """End the job that is under way."""
        with self._lock:
            self._closed = True
            group = self._running
        if group is not None and group.thread.is_alive():
            with suppress(Exception):  # Spark itself may be at its end
                self._context.cancelJobsWithTag(self._tag)
        elif group is not None and group.socket is not None:
            group.file.close()
            group.socket.close()


def one_by_one(frame: Any) -> Generator[Any]:
    """The record batches, partition after partition, by the public parts of PySpark alone."""
    arrow = need("pyarrow")
    packed = frame.mapInArrow(_packer(), "packed binary")
    for row in packed.toLocalIterator():
        yield from arrow.ipc.open_stream(arrow.py_buffer(row.packed))


def _packer() -> Callable[[Iterable[Any]], Iterator[Any]]:
    """A function that travels to the executors whole: they need no batchqueue_async."""

    def pack(batches: Iterable[Any]) -> Iterator[Any]:
        import importlib  # noqa: PLC0415 - on the executor

        arrow = importlib.import_module("pyarrow")
        for batch in batches:
            target = arrow.BufferOutputStream()
            with arrow.ipc.new_stream(target, batch.schema) as writer:
                writer.write_batch(batch)
            packed = arrow.array([target.getvalue().to_pybytes()], arrow.binary())
            yield arrow.RecordBatch.from_arrays([packed], ["packed"])

    return pack
