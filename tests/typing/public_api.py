"""Type-only uses of the public API: checked by mypy and pyright, never run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, assert_type

import batchqueue_async as bq
from batchqueue_async.sinks.memory import MemorySink

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Span:
    name: str


@dataclass
class ErrorSpan(Span):
    code: int


async def handle(batch: list[Span]) -> None: ...


async def handle_sequence(batch: Sequence[Span]) -> int:
    return len(batch)


class Writer:
    async def consume(self, batch: list[Span], /) -> None: ...

    async def on_idle(self) -> None: ...


class SequenceWriter:
    async def consume(self, batch: Sequence[Span], /) -> object: ...


def log_error(batch: Sequence[Span], error: BaseException) -> None: ...


async def log_error_async(batch: Sequence[Span], error: BaseException) -> None: ...


class Even:
    def assign(self, throughput: Sequence[int], owners: Sequence[int], workers: int) -> list[int] | None:
        return None


def by_name(item: Span, partition_count: int, /) -> int:
    return len(item.name) % partition_count


def configurations() -> None:
    every: bq.QueueConfig[Span] = bq.QueueConfig(
        workers=bq.WorkerPolicy.cpu_cores_with_base(1, 0.25),
        partitions=bq.PartitionPolicy.adaptive(multiplier=25),
        selector=by_name,
        buffer_size=10,
        strategy=bq.BufferStrategy.DROP_OLDEST,
        block_timeout=None,
        fallback=handle,
        on_error=log_error,
        max_batch=10,
        linger=0.5,
        min_idle=0.001,
        max_idle=0.1,
        handler_timeout=1.0,
        drain_timeout=5,
        balancer=bq.throughput_weighted(skip_ratio=1.2),
        balance_interval=1,
    )
    assert_type(every.selector, bq.Selector[Span] | None)
    bq.QueueConfig[Span](consumer=handle, selector=bq.by_key(lambda span: span.name))
    bq.QueueConfig[Span](consumer=handle_sequence, on_error=log_error_async, selector=bq.round_robin())
    bq.QueueConfig[Span](consumer=Writer(), balancer=Even(), selector=bq.type_hash())
    bq.QueueConfig[Span](consumer=SequenceWriter(), scheduler=bq.SharedScheduler("IO", bq.WorkerPolicy.io_bound()))
    bq.QueueConfig[Span](consumer=bq.in_thread(print))
    configs = bq.load_config("queues.yaml", overrides={"spans": {"max_batch": 5}})
    assert_type(configs["spans"].max_batch, int)

    texts = bq.QueueConfig[Span](
        linger="50ms",
        block_timeout="1m",
        overflow="drop_oldest",
        buffer_bytes="16MiB",
        size_of=lambda span: len(span.name),
        feeds="rows",
        log_errors="full",
        retry=bq.HandlerRetry(initial="100ms", max_attempts=3),
    )
    assert_type(texts.linger, float)
    assert_type(texts.block_timeout, float | None)
    assert_type(texts.strategy, bq.BufferStrategy)
    assert_type(texts.overflow, Literal["block", "reject", "drop_oldest", "drop_newest"])
    assert_type(texts.buffer_bytes, int | None)
    assert_type(texts.feeds, tuple[str, ...])
    assert_type(texts.make_selector(), bq.Selector[Span])
    assert_type(replace(texts, feeds=["rows", "logs"]), bq.QueueConfig[Span])
    bq.QueueConfig[Span](linger=[1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bq.QueueConfig[Span](overflow="wait")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bq.QueueConfig[Span](max_bacth=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    texts.linger = 1.0  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(bq.DurableConfig(max_bytes="1GiB").max_bytes, int | None)
    assert_type(bq.ExportConfig(send_timeout="30s").send_timeout, float)
    assert_type(bq.RetryPolicy(initial="1s").initial, float)


def faults() -> None:
    try:
        bq.QueueConfig[Span](max_batch=0).validate("spans")
    except bq.ConfigError as error:
        assert_type(error.faults, tuple[bq.ConfigFault, ...])
        assert_type(error.faults[0].value, str | None)


def arithmetic() -> None:
    assert_type(bq.WorkerPolicy.cpu_cores(0.5).resolve(), int)
    assert_type(bq.PartitionPolicy.worker_multiply(2).resolve(4, weight=7.5), int)
    assert_type(bq.throughput_weighted().assign([1], [0], 1), list[int] | None)


async def queues() -> None:
    async with bq.BatchQueueManager() as manager:
        config: bq.QueueConfig[Span] = bq.QueueConfig(consumer=Writer())
        queue = manager.create("spans", config)
        assert_type(queue, bq.BatchQueue[Span])
        assert_type(manager.get_or_create("spans", config), bq.BatchQueue[Span])
        assert_type(queue.config, bq.QueueConfig[Span])
        assert_type(await queue.produce(ErrorSpan("a", 1)), bool)
        assert_type(queue.produce_nowait(Span("a")), bool)
        assert_type(await queue.produce_many(Span(name) for name in "abc"), int)
        assert_type(queue.produce_many_nowait((Span("a"),)), int)
        await queue.deliver([Span("a")])
        await queue.flush(timeout=1)
        await queue.produce("no span")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        assert_type(manager.names(), list[str])
        assert_type(manager.scheduler("IO"), bq.Scheduler | None)
        assert_type(await manager.shutdown("spans", timeout=1.0), bq.ShutdownReport)
        assert_type(await manager.shutdown_all(), dict[str, bq.ShutdownReport])


async def handlers(queue: bq.BatchQueue[Span]) -> None:
    queue.add_handler(Span, handle, weight=0.05)
    # A handler of the base class takes them too: mypy sees that of objects, pyright of functions.
    queue.add_handler(ErrorSpan, handle)  # type: ignore[arg-type]
    queue.add_handler(ErrorSpan, Writer())  # pyright: ignore[reportArgumentType, reportCallIssue]
    queue.add_handler(Span, handle, max_batch=10, linger=0.5, timeout=5.0)
    queue.add_handler(str, handle)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    queue.add_handler(str, Writer())  # type: ignore[misc]  # pyright: ignore[reportArgumentType, reportCallIssue]
    queue.add_handler("Span", handle)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]

    @queue.handler(str)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    async def spans(batch: list[Span]) -> None: ...

    @queue.handler(ErrorSpan, weight=2)
    async def errors(batch: list[ErrorSpan]) -> int:
        return len(batch)

    assert_type(await errors([ErrorSpan("a", 1)]), int)
    assert_type(queue.remove_handler(Span), bool)


async def blocks(queue: bq.BatchQueue[Span]) -> None:
    async with queue as same:
        assert_type(same, bq.BatchQueue[Span])
    assert_type(queue.peek(), bq.QueueStats)
    assert_type(bq.registered("queue"), list[bq.Registered])


async def numbers(queue: bq.BatchQueue[Span]) -> None:
    stats = queue.stats()
    assert_type(stats, bq.QueueStats)
    assert_type(stats.used_ratio, float)
    assert_type(stats.top(3), tuple[bq.PartitionStats, ...])
    assert_type(stats.workers[0].busy, float)
    assert_type(stats.queue_latency.p99, float)
    report = await queue.shutdown()
    assert_type(report.elapsed, float)
    try:
        await queue.deliver([])
    except bq.DeliveryError as error:
        for items, reason in error.failures:
            assert_type(len(items), int)
            assert_type(reason, BaseException)
    except bq.RetryableError as error:
        assert_type(error.retry_after, float | None)


def threads(queue: bq.BatchQueue[Span]) -> None:
    door = queue.bridge()
    assert_type(door, bq.SyncQueue[Span])
    assert_type(door.produce(Span("a"), timeout=1.0), bool)
    assert_type(door.produce_many([Span("a")]), int)
    with bq.SyncBridge() as bridge:
        config: bq.QueueConfig[Span] = bq.QueueConfig(consumer=Writer())
        assert_type(bridge.get_or_create("spans", config), bq.SyncQueue[Span])


async def durable(path: str) -> None:
    config = bq.DurableConfig(max_bytes=1 << 20, overflow="reject", durability="interval")
    async with bq.DurableQueue.open(path, config, name="spool") as queue:
        assert_type(queue, bq.DurableQueue)
        assert_type(await queue.put(b"x", durability="os"), int)
        assert_type(await queue.put_many([b"x"]), range)
        lease = await queue.lease(max_records=1, max_bytes=1, wait=0)
        assert_type(lease, bq.Lease)
        assert_type([record.attempts for record in lease.records], list[int])
        assert_type(await lease.nack(delay=1.5, seqs=[1]), int)
        assert_type(await lease.dead_letter("why"), int)
        assert_type(queue.recovery, bq.RecoveryReport)
        assert_type(queue.stats(), bq.DurableStats)
        assert_type(await queue.dead_letters(), list[bq.DeadLetter])
        await queue.put("text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    bq.DurableConfig(overflow="explode")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def exports() -> None:
    config = bq.ExportConfig(
        path="spool",
        max_records=10,
        overflow="block",
        batch=bq.BatchPolicy(max_records=5, linger=0),
        retry=bq.RetryPolicy(initial=1, max_attempts=3, budget=bq.RetryBudget(burst=5)),
        breaker=bq.BreakerPolicy(threshold=2),
        workers=bq.WorkerPolicy.fixed(2),
        adaptive=bq.AdaptivePolicy(max_workers=4),
        split=bq.SplitPolicy(preparers=1, prepare=lambda batch: [str(record) for record in batch]),
        ordering="key",
        key=lambda record: record["id"],
        on_dead_letter=lambda records, reason: (len(records), reason.upper()),
    )
    async with bq.Exporter(MemorySink(), config, name="spans") as exporter:
        await exporter.consume([{"id": 1}])
        await exporter.flush(timeout=1.0)
        assert_type(exporter.stats(), bq.ExporterStats)
        assert_type(exporter.stats().latency, float | None)
        bq.QueueConfig[Span](consumer=exporter)
    assert_type(await exporter.shutdown(), bq.ExportReport)
    bq.ExportConfig(ordering="newest")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
