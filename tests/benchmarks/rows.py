"""The rows of the benchmark and their targets: one place to read what is promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import quiet, rebalance, skywalking
from .bursts import BASELINE, Case, Workload, baseline, make_workload, measure_cases
from .model import Check, Row, Samples, Sizes
from .peers import ASYNCIO_PUT, nowait_peers, waiting_peers
from .subjects import consumer_case, handlers_case, selector_case

if TYPE_CHECKING:
    from collections.abc import Callable

NOWAIT = "batchqueue produce_nowait"
NOWAIT_TYPED = "batchqueue produce_nowait, handler by type"
PRODUCE = "batchqueue await produce"
PRODUCE_CROWD = "batchqueue await produce, 8 producers"
PRODUCE_TYPED = "batchqueue await produce, handler by type"
FEW = "batchqueue produce_nowait, 100 types"
MANY = "batchqueue produce_nowait, 2,000 types"
FEW_BASELINE = f"{BASELINE}, 100 types"
MANY_BASELINE = f"{BASELINE}, 2,000 types"
TURNS = "batchqueue produce_nowait, round_robin()"
KEYS = "batchqueue produce_nowait, by_key(id)"
MANY_TURNS = "batchqueue produce_many by 1,000, round_robin()"
MANY_KEYS = "batchqueue produce_many by 1,000, by_key(id)"
MANY_ONE = "batchqueue produce_many by 1,000, one type"
MANY_MIXED = "batchqueue produce_many by 1,000, 100 types"
MANY_NOWAIT_ONE = "batchqueue produce_many_nowait by 1,000, one type"
MANY_NOWAIT_MIXED = "batchqueue produce_many_nowait by 1,000, 100 types"


def _workloads(sizes: Sizes, names: set[str]) -> dict[str, Workload]:
    makers: dict[str, Callable[[], Workload]] = {
        "one": lambda: make_workload(sizes.burst, 1, sizes.chunk),
        "stream": lambda: make_workload(sizes.stream, 1, sizes.chunk),
        "few": lambda: make_workload(sizes.burst, sizes.few_types, sizes.chunk, "Few"),
        "many": lambda: make_workload(sizes.burst, sizes.many_types, sizes.chunk, "Many"),
        "few-large": lambda: make_workload(sizes.large_burst, sizes.few_types, sizes.chunk, "Few"),
        "many-large": lambda: make_workload(sizes.large_burst, sizes.many_types, sizes.chunk, "Many"),
    }
    return {name: makers[name]() for name in names}


def _throughput(cases: Callable[[], list[Case]]) -> Callable[[Sizes, str, int, bool], Samples]:
    def measure(sizes: Sizes, loop: str, _run: int, subjects_only: bool) -> Samples:
        chosen = [case for case in cases() if case.subject or not subjects_only]
        return measure_cases(chosen, _workloads(sizes, {case.workload for case in chosen}), sizes, loop)

    return measure


def _types(few: str, many: str) -> list[Case]:
    return [
        baseline(FEW_BASELINE, few),
        handlers_case(FEW, "produce_nowait", few),
        baseline(MANY_BASELINE, many),
        handlers_case(MANY, "produce_nowait", many),
    ]


TYPES_CHECKS = (
    Check(what="100 types, x baseline", subject=FEW, reference=FEW_BASELINE, bound="<=", target=7.0),
    Check(what="2,000 types, x baseline", subject=MANY, reference=MANY_BASELINE, bound="<=", target=7.0),
    Check(what="2,000 types, x 100 types", subject=MANY, reference=FEW, bound="<=", target=1.3),
)

ROWS: tuple[Row, ...] = (
    Row(
        name="nowait",
        title="produce_nowait, one type, to a no-op handler, in bursts of 10,000",
        unit="s/item",
        reference=BASELINE,
        measure=_throughput(
            lambda: [
                baseline(),
                consumer_case(NOWAIT, "produce_nowait"),
                handlers_case(NOWAIT_TYPED, "produce_nowait", "one"),
                *nowait_peers(),
            ]
        ),
        checks=(
            Check(what="consumer, x baseline", subject=NOWAIT, reference=BASELINE, bound="<=", target=5.0),
            Check(
                what="consumer, faster than asyncio.Queue",
                subject=NOWAIT,
                reference=ASYNCIO_PUT,
                bound=">=",
                target=6.0,
                faster=True,
            ),
            Check(what="handler by type, x baseline", subject=NOWAIT_TYPED, reference=BASELINE, bound="<=", target=5.0),
            Check(
                what="handler by type, faster than asyncio.Queue",
                subject=NOWAIT_TYPED,
                reference=ASYNCIO_PUT,
                bound=">=",
                target=6.0,
                faster=True,
            ),
        ),
    ),
    Row(
        name="produce",
        title="await produce, one type, to a no-op handler, in bursts of 10,000",
        unit="s/item",
        reference=BASELINE,
        measure=_throughput(
            lambda: [
                baseline(),
                consumer_case(PRODUCE, "produce"),
                handlers_case(PRODUCE_TYPED, "produce", "one"),
                *waiting_peers(),
            ]
        ),
        checks=(
            Check(
                what="consumer, faster than asyncio.Queue",
                subject=PRODUCE,
                reference=ASYNCIO_PUT,
                bound=">=",
                target=4.0,
                faster=True,
            ),
            Check(
                what="handler by type, faster than asyncio.Queue",
                subject=PRODUCE_TYPED,
                reference=ASYNCIO_PUT,
                bound=">=",
                target=4.0,
                faster=True,
            ),
        ),
    ),
    Row(
        name="stream",
        title="await produce, one type, 30,000 items without a pause: the producers meet the full buffer",
        unit="s/item",
        reference=BASELINE,
        measure=_throughput(
            lambda: [
                baseline(),
                consumer_case(PRODUCE, "produce", "stream"),
                consumer_case(PRODUCE_CROWD, "produce, 8 producers", "stream"),
                *waiting_peers("stream"),
            ]
        ),
        checks=(
            Check(what="8 producers, x one", subject=PRODUCE_CROWD, reference=PRODUCE, bound="<=", target=2.0),
            Check(
                what="consumer, faster than asyncio.Queue",
                subject=PRODUCE,
                reference=ASYNCIO_PUT,
                bound=">=",
                target=4.0,
                faster=True,
            ),
        ),
    ),
    Row(
        name="types",
        title="produce_nowait through type_hash and a handler for each type, in bursts of 10,000",
        unit="s/item",
        reference=FEW_BASELINE,
        measure=_throughput(lambda: _types("few", "many")),
        checks=TYPES_CHECKS,
    ),
    Row(
        name="types-large",
        title="the same in bursts of 100,000 (50 items a type at 2,000 types, instead of 5)",
        unit="s/item",
        reference=FEW_BASELINE,
        measure=_throughput(lambda: _types("few-large", "many-large")),
        checks=TYPES_CHECKS,
    ),
    Row(
        name="many",
        title="produce_many by 1,000, in bursts of 10,000",
        unit="s/item",
        reference=BASELINE,
        measure=_throughput(
            lambda: [
                baseline(),
                consumer_case(MANY_ONE, "produce_many"),
                consumer_case(MANY_NOWAIT_ONE, "produce_many_nowait"),
                baseline(FEW_BASELINE, "few"),
                handlers_case(MANY_MIXED, "produce_many", "few"),
                handlers_case(MANY_NOWAIT_MIXED, "produce_many_nowait", "few"),
            ]
        ),
        checks=(
            Check(what="one type, x baseline", subject=MANY_ONE, reference=BASELINE, bound="<=", target=1.0),
            Check(
                what="100 types mixed, x baseline", subject=MANY_MIXED, reference=FEW_BASELINE, bound="<=", target=3.5
            ),
        ),
    ),
    Row(
        name="selectors",
        title="one consumer, 16 partitions: in turns, and by a key that costs next to nothing, in bursts of 10,000",
        unit="s/item",
        reference=BASELINE,
        measure=_throughput(
            lambda: [
                baseline(),
                selector_case(TURNS, "produce_nowait", "in turns"),
                selector_case(KEYS, "produce_nowait", "by key"),
                selector_case(MANY_TURNS, "produce_many", "in turns"),
                selector_case(MANY_KEYS, "produce_many", "by key"),
            ]
        ),
        checks=tuple(
            Check(what=f"{what}, x baseline", subject=subject, reference=BASELINE, bound="<=", target=target)
            for what, subject, target in (
                ("in turns", TURNS, 4.0),
                ("by key", KEYS, 6.0),
                ("in turns, bulk", MANY_TURNS, 2.0),
                ("by key, bulk", MANY_KEYS, 4.0),
            )
        ),
    ),
    Row(
        name="sparse",
        title="sparse traffic: an item each 20 ms, defaults, produce to handler",
        unit="s",
        reference=quiet.SPARSE_REFERENCE,
        measure=quiet.measure_sparse,
        checks=(
            Check(what="p50", subject=quiet.SPARSE, bound="<", target=0.0002, percentile=50.0, pooled=True),
            Check(what="p99", subject=quiet.SPARSE, bound="<", target=0.002, percentile=99.0, pooled=True),
        ),
    ),
    Row(
        name="idle",
        title="1,000 idle queues, defaults, share of one core",
        unit="core",
        reference=quiet.IDLE_REFERENCE,
        measure=quiet.measure_idle,
        checks=(Check(what="share of a core", subject=quiet.IDLE, bound="<", target=0.01),),
    ),
    Row(
        name="memory",
        title="memory of an idle queue with 16 partitions (20 KB: 20,000 bytes)",
        unit="bytes",
        reference=quiet.MEMORY_REFERENCE,
        measure=quiet.measure_memory,
        checks=(Check(what="bytes a queue", subject=quiet.MEMORY, bound="<", target=20_000.0),),
    ),
    Row(
        name="skywalking",
        title="the shape of SkyWalking's benchmark: 32 producers, 8 drain tasks, 16 partitions, counting handlers",
        unit="items/s",
        reference=None,
        measure=skywalking.measure_skywalking,
        checks=(
            # Java's figures on both cores of a machine on which this runs on one: 21, 14 and 7.5 million a second.
            Check(what="500 types", subject=skywalking.case_name(500, "by item"), bound=">=", target=21e6),
            Check(what="1,000 types", subject=skywalking.case_name(1_000, "by item"), bound=">=", target=21e6),
            Check(what="2,000 types", subject=skywalking.case_name(2_000, "by item"), bound=">=", target=18.75e6),
            Check(what="500, bulk", subject=skywalking.case_name(500, "by thousands"), bound=">=", target=42e6),
            Check(what="1,000, bulk", subject=skywalking.case_name(1_000, "by thousands"), bound=">=", target=42e6),
            Check(what="2,000, bulk", subject=skywalking.case_name(2_000, "by thousands"), bound=">=", target=30e6),
        ),
    ),
    Row(
        name="rebalance",
        title="rebalancing: 100 types (20 at 24x, 30 at 8x, 20 at 4x, 30 at 1x), 4 workers, handlers that await",
        unit="items/s",
        reference=None,  # the placement differs from run to run by intent, so its spread is no noise
        measure=rebalance.measure_rebalance,
        checks=(
            Check(what="max/min worker load", subject=rebalance.BALANCED_LOAD, bound="<=", target=1.05),
            Check(
                what="throughput, x static",
                subject=rebalance.BALANCED,
                reference=rebalance.STATIC,
                bound=">=",
                target=1.21,
            ),
        ),
    ),
)


def row_named(name: str) -> Row:
    """The row of this name."""
    for row in ROWS:
        if row.name == name:
            return row
    raise ValueError(f"no row is named {name!r}; there are: {', '.join(row.name for row in ROWS)}")
