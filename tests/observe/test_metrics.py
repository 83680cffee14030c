"""The table of metrics: its names, and that Prometheus's two formats, its library and OpenTelemetry say the same."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections import defaultdict

import observe_snapshots as made
import pytest
from export_kit import Destination
from from_tree import fill
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse
from servers.prometheus import promtool
from test_docs import ROOT

import batchqueue_async as bq
from batchqueue_async import observe
from batchqueue_async.intake.stats import IntakeStats
from batchqueue_async.observe import opentelemetry as otel
from batchqueue_async.observe.metric import cumulated
from batchqueue_async.observe.prometheus import as_text, families, number
from batchqueue_async.observe.snapshot import ConsumerView
from batchqueue_async.observe.table import METRICS
from batchqueue_async.queue.stats import Histogram


async def busy(path, look):
    """What `look` returns in a process in which everything has happened once."""

    async def handle(batch):
        await asyncio.sleep(0.001)
        if 3 in batch:
            raise ValueError("three")

    class Numbers(Destination):
        pass

    async with (
        bq.Exporter(
            Numbers(answer=lambda batch: bq.PermanentError("bad") if b"bad" in batch else None),
            bq.ExportConfig(path=path, max_bytes="64MiB"),
            name='la"ke',
        ) as exporter,
        bq.BatchQueueManager() as manager,
    ):
        queue = manager.create(
            "rows",
            bq.QueueConfig(consumer=handle, max_batch=2, buffer_bytes=10_000, size_of=lambda _: 8, overflow="reject"),
        )
        fed = manager.create("fed", bq.QueueConfig(consumer=exporter))
        await queue.produce_many(range(10))
        await fed.produce_many([b"good"] * 20 + [b"bad"])
        await queue.flush()
        await exporter.flush()
        return await asyncio.to_thread(look)


def test_names_are_unique_and_made_of_base_units():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    otel_names = [metric.otel_name for metric in METRICS]
    assert len(set(otel_names)) == len(otel_names)
    for metric in METRICS:
        assert re.fullmatch(r"batchqueue_[a-z_]+", metric.name), metric.name
        assert metric.name.endswith("_total") is (metric.kind == "counter")
        assert not {"partition", "type", "key", "worker"} & set(metric.labels), metric.name
        assert metric.help.endswith("."), metric.name
        assert not re.search("milli|micro|mega|kilo|minutes", metric.name)


def test_the_names_of_the_specification_are_there():
    wanted = """queue_accepted_items_total queue_finished_items_total queue_rejected_items_total queue_waiting_items
        queue_capacity_items queue_in_flight_items queue_oldest_item_age_seconds queue_fullest_partition_ratio
        queue_waiting_producers queue_wait_seconds queue_batch_items handler_seconds queue_workers_busy loop_lag_seconds
        exporter_accepted_records_total exporter_delivered_records_total exporter_delivered_bytes_total
        exporter_dropped_records_total exporter_dead_letter_records_total exporter_sends_total exporter_retries_total
        exporter_send_seconds exporter_send_queue_records exporter_send_queue_bytes exporter_send_queue_limit_bytes
        exporter_oldest_record_age_seconds exporter_last_success_timestamp_seconds exporter_breaker_state
        exporter_breaker_opens_total exporter_paused exporter_backoff_seconds exporter_workers_active
        exporter_workers exporter_sends_in_flight exporter_drain_eta_seconds disk_bytes disk_free_bytes disk_segments
        disk_sync_seconds disk_damaged_records_total spark_batch_seconds spark_lag_seconds build_info"""
    names = {metric.name for metric in METRICS}
    assert [name for name in wanted.split() if f"batchqueue_{name}" not in names] == []


async def test_promtool_has_nothing_to_say(tmp_path):
    text = await busy(tmp_path / "q", lambda: as_text(observe.take_snapshot()))
    done = subprocess.run(  # noqa: ASYNC221 - nothing else runs on this loop
        [promtool(), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def samples(found):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in found
        for sample in family.samples
    }


async def test_both_formats_and_the_library_say_the_same(tmp_path):
    def look():
        snapshot = observe.take_snapshot()
        return as_text(snapshot), as_text(snapshot, open_metrics=True), list(families(snapshot))

    plain, open_metrics, collected = await busy(tmp_path / "q", look)
    assert samples(parse(plain)) == samples(parse_open(open_metrics)) == samples(collected)
    assert {family.name: family.type for family in parse_open(open_metrics)} == {
        family.name: family.type for family in collected
    }
    assert 'exporter="la\\"ke"' in plain


async def test_a_registry_serves_the_collector(tmp_path):
    registry = CollectorRegistry()
    registry.register(observe.BatchQueueCollector())
    text = await busy(tmp_path / "q", lambda: generate_latest(registry).decode())
    assert 'batchqueue_queue_finished_items_total{outcome="failed",queue="rows"} 2.0' in text


async def test_only_the_queues_of_one_manager():
    async with bq.BatchQueueManager() as one, bq.BatchQueueManager() as other:
        one.create("a", bq.QueueConfig())
        other.create("b", bq.QueueConfig())
        assert [queue.name for queue in observe.take_snapshot(one).queues] == ["a"]


async def test_queues_of_one_name_have_names_of_their_own_for_as_long_as_they_live():
    async with bq.BatchQueueManager() as one, bq.BatchQueueManager() as other:
        for manager in (one, other):
            manager.create("same", bq.QueueConfig())
        assert {"same", "same#2"} <= {queue.name for queue in observe.take_snapshot().queues}
        await one.shutdown_all()
        assert "same#2" in {queue.name for queue in observe.take_snapshot().queues}
        assert "same" not in {queue.name for queue in observe.take_snapshot().queues}


def test_edges_of_histograms_are_exact():
    (metric,) = (metric for metric in METRICS if metric.name == "batchqueue_queue_wait_seconds")
    histogram = Histogram()
    values = [2.0**power for power in range(-22, 12)] + [3.0, 0.7, 1e-9, 1e5]
    for value in values:
        histogram.record(value)
    assert cumulated(histogram.summary(), metric) == [sum(value <= edge for value in values) for edge in metric.edges]


def test_consumers_have_their_law_too():
    stats = IntakeStats(
        name="orders", state="running", workers=8, prefetch=80, received=20, acked=9, retried=1, dead_lettered=2,
        released=1, stale=1, buffered=3, waiting=2, in_flight=1, lag=7, redelivered=4, rebalances=3, commits=6,
    )  # fmt: skip
    view = ConsumerView(name="orders", kind="AmqpConsumer", stats=stats)
    found = samples(parse(as_text(made.process(0, consumers=(view,)))))
    labels = (("consumer", "orders"), ("kind", "AmqpConsumer"))
    settled = sum(value for (name, _), value in found.items() if name == "batchqueue_intake_settled_messages_total")
    held = sum(found[f"batchqueue_intake_{what}_messages", labels] for what in ("waiting", "in_flight"))
    assert found["batchqueue_intake_received_messages_total", labels] == settled + held == 20
    assert found["batchqueue_intake_lag_messages", labels] == 7
    assert found["batchqueue_intake_redelivered_messages_total", labels] == 4
    assert found["batchqueue_intake_rebalances_total", labels] == 3
    assert found["batchqueue_intake_commits_total", labels] == 6


def test_numbers_as_text():
    assert [number(value) for value in (1, 0.25, float("inf"))] == ["1", "0.25", "+Inf"]


LAWS = {
    "queue": (
        ["batchqueue_queue_accepted_items_total"],
        ["batchqueue_queue_finished_items_total", "batchqueue_queue_in_flight_items", "batchqueue_queue_waiting_items"],
    ),
    "exporter": (
        ["batchqueue_exporter_accepted_records_total", "batchqueue_exporter_recovered_records_total"],
        [
            "batchqueue_exporter_delivered_records_total",
            "batchqueue_exporter_dead_letter_records_total",
            "batchqueue_exporter_dropped_records_total",
            "batchqueue_exporter_send_queue_records",
            "batchqueue_exporter_failover_records",
            "batchqueue_exporter_undelivered_records",
        ],
    ),
}
NEVER_IN = {"newest", "too_large", "refused"}


def check_laws(text):
    """Both sides of each law, by component, in one scrape."""
    sums = defaultdict(lambda: [0.0, 0.0])
    for family in parse(text):
        for sample in family.samples:
            for label, sides in LAWS.items():
                for side, names in enumerate(sides):
                    if sample.name in names and sample.labels.get("reason") not in NEVER_IN:
                        sums[label, sample.labels[label]][side] += sample.value
    assert sums
    for component, (came, went) in sums.items():
        assert came == went, component
    return sums


def check_histograms(text):
    for family in parse(text):
        counts = defaultdict(list)
        totals = {}
        for sample in family.samples:
            if family.type == "histogram" and sample.name.endswith("_bucket"):
                key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
                counts[key].append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith("_count"):
                totals[tuple(sorted(sample.labels.items()))] = sample.value
        for key, buckets in counts.items():
            values = [value for _, value in sorted(buckets)]
            assert values == sorted(values)
            assert values[-1] == totals[key]


@pytest.mark.real_time
@pytest.mark.parametrize("on_disk", [False, True])
async def test_what_came_in_is_somewhere_in_every_scrape_of_a_busy_process(tmp_path, on_disk):
    def answer(_):
        sends = len(sink.calls)
        sink.records.clear()
        if sends % 7 == 0:
            return bq.PermanentError("no")
        return bq.RetryableError("later") if sends % 5 == 0 else None

    sink = Destination(answer=answer)

    async def handle(batch):
        await asyncio.sleep(0)
        if len(batch) % 3 == 0:
            raise ValueError

    config = bq.ExportConfig(
        path=tmp_path / "q" if on_disk else None,
        max_records=5_000,
        retry=bq.RetryPolicy(initial=0.001, max_delay=0.01),
        breaker=bq.BreakerPolicy(enabled=False),
        drain_timeout=1.0,
    )
    scrapes = 0
    ended = False

    def scrape():
        nonlocal scrapes
        while not ended:
            text = as_text(observe.take_snapshot(), open_metrics=False)
            check_laws(text)
            check_histograms(text)
            scrapes += 1

    async with bq.Exporter(sink, config, name="lake") as exporter, bq.BatchQueueManager() as manager:
        parts = {"partitions": bq.PartitionPolicy.fixed(4), "selector": bq.round_robin(), "drain_timeout": 1.0}
        queues = [
            manager.create("fed", bq.QueueConfig(consumer=exporter, **parts)),
            manager.create("own", bq.QueueConfig(consumer=handle, overflow="drop_oldest", buffer_size=50, **parts)),
        ]
        scraping = asyncio.get_running_loop().run_in_executor(None, scrape)
        for number_ in range(100_000):
            for queue in queues:
                await queue.produce_many([b"x"] * (number_ % 37))
            if scrapes >= 25 or scraping.done():
                break
        ended = True
        await scraping
    assert scrapes >= 25


async def test_opentelemetry_observes_the_same_numbers(tmp_path):
    reader = InMemoryMetricReader()
    instruments = observe.instrument(MeterProvider([reader]))
    assert len(instruments) >= len(METRICS)
    data = await busy(tmp_path / "q", reader.get_metrics_data)
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    found = {
        (metric.name, tuple(sorted(point.attributes.items()))): (point.value, metric.unit)
        for metric in metrics
        for point in metric.data.data_points
    }
    assert found["batchqueue.queue.accepted", (("queue", "rows"),)] == (10, "{item}")
    assert found["batchqueue.queue.finished", (("outcome", "failed"), ("queue", "rows"))] == (2, "{item}")
    assert found["batchqueue.queue.wait.count", (("queue", "rows"),)][0] >= 1
    assert found["batchqueue.exporter.delivered", (("exporter", 'la"ke'), ("sink", "Numbers"))] == (20, "{record}")
    assert found["batchqueue.exporter.delivered.bytes", (("exporter", 'la"ke'), ("sink", "Numbers"))][1] == "By"
    assert ("batchqueue.exporter.drain_eta", ()) not in found


def test_exponential_buckets_hold_every_value():
    histogram = Histogram()
    values = [1e-9, 0.001, 0.5, 0.5, 1.0, 1.1, 300.0]
    for value in values:
        histogram.record(value)
    buckets = otel.exponential(histogram.summary())
    assert buckets.zero_count == 1
    assert sum(buckets.counts) == len(values) - 1
    for index, count in enumerate(buckets.counts, buckets.offset):
        low, high = 2.0 ** (index / 4), 2.0 ** ((index + 1) / 4)
        assert count == sum(low < value <= high for value in values if value > buckets.zero_threshold)
    assert otel.exponential(bq.Distribution()).counts == ()


def test_each_metric_of_the_reference_document_has_a_counterpart():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| `(batchqueue_\w+)", page, re.MULTILINE)
    compared = (ROOT / "docs" / "reference" / "exporter-metrics.md").read_text().partition("## Metrics")[2]
    theirs = set(re.findall(r"`((?:queue|fastqueue|circuit_breaker|export)_\w+)`", compared))
    theirs |= {f"circuit_breaker{name}" for name in re.findall(r"`(_open_total|_rejected_total)`", compared)}
    assert theirs - {name for name, _ in listed} == set()
    names = {metric.name for metric in METRICS}
    assert [ours for _, ours in listed if ours not in names] == []


def test_the_reference_page_is_made_of_the_table():
    page = fill((ROOT / "docs" / "reference" / "metrics.md").read_text())
    assert [metric.name for metric in METRICS if f"| `{metric.name}` |" not in page] == []


def test_what_cannot_be_read_hides_nothing_else():
    class Broken:
        name = "broken"

        def peek(self):
            raise OSError

    from batchqueue_async._support.registry import everything

    broken = Broken()
    everything.add("consumer", broken)
    try:
        snapshot = observe.take_snapshot()
        assert "consumer/broken" in snapshot.unreadable
        assert "batchqueue_build_info" in as_text(snapshot)
    finally:
        everything.remove(broken)
