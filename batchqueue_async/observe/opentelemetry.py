"""The table of metrics as observable instruments of OpenTelemetry, of which only the API is needed.

The API has no observable histogram. A histogram of the table is shown by two counters, of its values and of their sum,
and `exponential` gives its buckets as OpenTelemetry's exponential histogram of scale 2 has them, without a loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchqueue_async.errors import ConfigError
from batchqueue_async.observe.observer import Observer
from batchqueue_async.observe.table import METRICS
from batchqueue_async.queue.stats import LOWEST, Distribution

try:
    from opentelemetry import metrics
except ImportError as error:  # pragma: no cover - the tests have it
    raise ConfigError(
        "batchqueue_async.observe: instrument() needs opentelemetry-api; run: pip install 'batchqueue-async[otel]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchqueue_async.observe.metric import Metric
    from batchqueue_async.runtime.manager import BatchQueueManager

SCALE = 2
_OFFSET = 81


def instrument(meter_provider: Any = None, manager: BatchQueueManager | None = None) -> list[Any]:
    """Register every metric of the table with a meter provider, the process's own when None.

    The values are read when the provider collects; nothing is recorded in between.

    Args:
        meter_provider: an OpenTelemetry meter provider.
        manager: whose queues are shown; those of every manager of the process when None.

    Returns:
        The instruments; they last as long as the provider.

    Example:
        >>> from opentelemetry.sdk.metrics import MeterProvider
        >>> from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        >>> reader = InMemoryMetricReader()
        >>> instruments = instrument(MeterProvider([reader]))
        >>> scope = reader.get_metrics_data().resource_metrics[0].scope_metrics[0]
        >>> "batchqueue.start_time" in [metric.name for metric in scope.metrics]
        True
    """
    observer = Observer(manager)
    provider: Any = metrics.get_meter_provider() if meter_provider is None else meter_provider
    meter = provider.get_meter("batchqueue_async")
    return [made for metric in METRICS for made in _instruments(meter, metric, observer)]


def _instruments(meter: Any, metric: Metric, observer: Observer) -> Iterator[Any]:
    if metric.kind == "histogram":
        for suffix, unit, read in (("count", "1", _count), ("sum", metric.otel_unit, _total)):
            yield meter.create_observable_counter(
                f"{metric.otel_name}.{suffix}", [_callback(metric, observer, read)], unit, metric.help
            )
        return
    make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
    yield make(metric.otel_name, [_callback(metric, observer, float)], metric.otel_unit, metric.help)


def _count(value: Distribution) -> int:
    return value.count


def _total(value: Distribution) -> float:
    return value.total


def _callback(metric: Metric, observer: Observer, read: Callable[[Any], float]) -> Callable[[Any], Iterator[Any]]:
    def observe(_: Any) -> Iterator[Any]:
        snapshot, _status = observer.look()
        for view in metric.of.views(snapshot):
            for labels, value in metric.values(view):
                number = read(value)
                if math.isfinite(number):
                    yield metrics.Observation(number, dict(labels))

    return observe


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialBuckets:
    """A distribution as an exponential histogram of scale 2: bucket i ends, inclusively, at `2 ** ((i + 1) / 4)`.

    Attributes:
        zero_count: values not above `zero_threshold`.
        zero_threshold: below which a value counts as zero.
        offset: the index of the first bucket.
        counts: of the buckets, from the first on.
    """

    zero_count: int
    zero_threshold: float
    offset: int
    counts: tuple[int, ...]


def exponential(distribution: Distribution) -> ExponentialBuckets:
    """The buckets of a distribution as OpenTelemetry has them.

    Example:
        >>> from batchqueue_async.queue.stats import Histogram
        >>> histogram = Histogram()
        >>> for value in (1.0, 2.0, 2.0): histogram.record(value)
        >>> buckets = exponential(histogram.summary())
        >>> buckets.offset, buckets.counts
        (-1, (1, 0, 0, 0, 2))
    """
    places = {place - _OFFSET: times for place, times in distribution.buckets if place > 0}
    first = min(places, default=0)
    return ExponentialBuckets(
        zero_count=sum(times for place, times in distribution.buckets if place == 0),
        zero_threshold=LOWEST,
        offset=first,
        counts=tuple(places.get(index, 0) for index in range(first, max(places, default=first - 1) + 1)),
    )
