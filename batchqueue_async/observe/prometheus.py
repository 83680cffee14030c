"""The table of metrics for Prometheus: its text, and a collector for a registry of prometheus-client.

The text is written here: 200 queues are twenty thousand lines, for which the library that serves the collector takes
several times as long. Both come from the same values, and a test compares them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from batchqueue_async.observe.metric import cumulated
from batchqueue_async.observe.rates import RateTracker
from batchqueue_async.observe.snapshot import take_snapshot
from batchqueue_async.observe.table import METRICS
from batchqueue_async.queue.stats import Distribution

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric as Family

    from batchqueue_async.observe.metric import Labels, Metric, Value
    from batchqueue_async.observe.snapshot import ProcessSnapshot
    from batchqueue_async.runtime.manager import BatchQueueManager

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def as_text(snapshot: ProcessSnapshot, *, open_metrics: bool = False) -> str:
    """A snapshot in Prometheus's text format, or in OpenMetrics.

    Example:
        >>> from batchqueue_async.observe.snapshot import LoopView, ProcessSnapshot
        >>> text = as_text(ProcessSnapshot(at=0.0, loops=(LoopView(name="main", lag=0.5),)))
        >>> print(text[text.index("batchqueue_loop_lag_seconds{"):].splitlines()[0])
        batchqueue_loop_lag_seconds{loop="main"} 0.5
    """
    lines: list[str] = []
    labelled: dict[int, list[tuple[Any, str]]] = {}
    for metric in METRICS:
        component = metric.of
        views = labelled.get(id(component))
        if views is None:
            views = labelled[id(component)] = [
                (view, _label_text(component.labels_of(view))) for view in component.views(snapshot)
            ]
        _write(lines, metric, views, open_metrics=open_metrics)
    if open_metrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _write(lines: list[str], metric: Metric, views: list[tuple[Any, str]], *, open_metrics: bool) -> None:
    """A family: its labels are made once per component, since a process has many metrics of each."""
    shown = metric.family if open_metrics else metric.name
    start = len(lines)
    lines += (f"# HELP {shown} {metric.help}", f"# TYPE {shown} {metric.kind}")
    for view, labels in views:
        value = metric.read(view)
        if value is None:
            continue
        if metric.by is None:
            _write_value(lines, metric, labels, value)
            continue
        before = f"{labels},{metric.by}=" if labels else f"{metric.by}="
        for label, each in value.items():
            _write_value(lines, metric, f'{before}"{_escaped(str(label))}"', each)
    if len(lines) == start + 2:
        del lines[start:]  # a family without samples says nothing


def _write_value(lines: list[str], metric: Metric, labels: str, value: Value) -> None:
    name = metric.name
    if not isinstance(value, Distribution):
        lines.append(f"{name}{{{labels}}} {number(value)}" if labels else f"{name} {number(value)}")
        return
    before = f'{name}_bucket{{{labels},le="'
    counts = cumulated(value, metric)
    lines += [f'{before}{edge}"}} {count}' for edge, count in zip(_edges(metric), counts, strict=True)]
    lines += (
        f'{before}+Inf"}} {value.count}',
        f"{name}_sum{{{labels}}} {number(value.total)}",
        f"{name}_count{{{labels}}} {value.count}",
    )


def _label_text(labels: Labels) -> str:
    return ",".join([f'{key}="{_escaped(value)}"' for key, value in labels])


_edge_texts: dict[tuple[int, int], list[str]] = {}


def _edges(metric: Metric) -> list[str]:
    key = (metric.first, metric.last)
    if key not in _edge_texts:
        _edge_texts[key] = [number(edge) for edge in metric.edges]
    return _edge_texts[key]


def number(value: float) -> str:
    """A number as both formats write it.

    Example:
        >>> number(3), number(0.5), number(float("inf"))
        ('3', '0.5', '+Inf')
    """
    if value == math.inf:
        return "+Inf"
    return repr(value)


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


class BatchQueueCollector:
    """Serves the metrics of this process through a registry of prometheus-client, next to a program's own.

    Example:
        >>> from prometheus_client import CollectorRegistry
        >>> registry = CollectorRegistry()
        >>> registry.register(BatchQueueCollector())
        >>> registry.get_sample_value("batchqueue_start_time_timestamp_seconds") > 0
        True
    """

    def __init__(self, manager: BatchQueueManager | None = None) -> None:
        """Collect the queues of one manager, or those of every manager of the process."""
        self._manager = manager
        self._rates = RateTracker()

    def describe(self) -> list[Family]:
        """Nothing: a registry that asks for names would have to read everything for them."""
        return []

    def collect(self) -> Iterator[Family]:
        """The families of a snapshot that is taken now."""
        yield from families(take_snapshot(self._manager, rates=self._rates.of))


def families(snapshot: ProcessSnapshot) -> Iterator[Family]:
    """A snapshot as families of prometheus-client."""
    from prometheus_client.core import (  # noqa: PLC0415 - the text needs no library
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    for metric in METRICS:
        made = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        family: Any = made[metric.kind](metric.family, metric.help, labels=metric.labels)
        for view in metric.of.views(snapshot):
            for labels, value in metric.values(view):
                texts = [label for _, label in labels]
                if isinstance(value, Distribution):
                    family.add_metric(texts, buckets=_buckets(metric, value), sum_value=value.total)
                else:
                    family.add_metric(texts, value)
        if family.samples:
            yield family


def _buckets(metric: Metric, value: Distribution) -> list[tuple[str, float]]:
    edges = [*_edges(metric), "+Inf"]
    return [(edge, float(count)) for edge, count in zip(edges, [*cumulated(value, metric), value.count], strict=True)]
