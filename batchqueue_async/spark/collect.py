"""From a DataFrame to Arrow record batches in the driver, a few at a time, by one of two ways.

*collect* runs one job, as `toArrow()` does, and reads its record batches as they come. It is the fastest, and the JVM
holds what is not read yet: it is for what fits. *stream* packs record batches on the executors and fetches one
partition after the other, so that neither process holds more than one; it costs a pass through Python workers.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support import log
from batchqueue_async.spark.requirements import need

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

_UNKNOWN = 1 << 60
"""Spark's statistics say this much or more where they know nothing."""


class Collector:
    """Chooses the way for one DataFrame after the other, by its size as far as Spark or the last one tells it."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.last_bytes: int | None = None
        self.path = ""

    def batches(self, frame: Any, *, ordered: bool) -> Generator[Any]:
        """The record batches of a DataFrame; `ordered` asks for Spark's order, which is the same in each run."""
        size, source = estimated_bytes(frame), "spark"
        if size is None:
            size, source = self.last_bytes, "last_batch"
        fits = size is not None and size <= self.limit
        before, self.path = self.path, "collect" if fits else "stream"
        tell = log.debug if before == self.path else log.info
        tell(
            "spark_path_chosen",
            sink=self.name,
            path=self.path,
            bytes=size,
            known_from=source if size is not None else "nothing",
            limit=self.limit,
        )
        seen = 0
        with closing(collected(frame, ordered=ordered) if fits else streamed(frame)) as found:
            try:
                for batch in found:
                    seen += batch.nbytes
                    yield batch
            except GeneratorExit:
                raise
            except Exception as error:
                if fits and "maxResultSize" in str(error):
                    self.last_bytes = _UNKNOWN  # the next attempt takes the other way
                raise
        self.last_bytes = seen


def estimated_bytes(frame: Any) -> int | None:
    """How large Spark's optimizer thinks the DataFrame is; None where it does not know, as for a streaming batch."""
    plan = getattr(frame, "_jdf", None)
    if plan is None:
        return None  # Spark Connect does not tell
    with suppress(AttributeError, TypeError):
        size = int(plan.queryExecution().optimizedPlan().stats().sizeInBytes())
        return size if size < _UNKNOWN else None
    return None


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

    port, secret, server = frame._jdf.collectAsArrowToPython()
    file, socket = connect((port, secret))

    def finish() -> None:
        with need("pyspark.errors.exceptions.captured").unwrap_spark_exception():
            server.getResult()

    return _read(file, socket), finish


def _connector() -> Callable[[Any], tuple[Any, Any]] | None:
    try:
        need("pyspark.errors.exceptions.captured").unwrap_spark_exception  # noqa: B018 - is it there?
        return cast("Callable[[Any], tuple[Any, Any]]", need("pyspark.util")._create_local_socket)
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


def streamed(frame: Any) -> Generator[Any]:
    """The record batches, partition after partition."""
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
