"""What one metric is: a name, a unit, a help text, and how its value is read from the view of a component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from batchqueue_async.queue.stats import Distribution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Kind = Literal["counter", "gauge", "histogram"]
Value = float | int | Distribution
Labels = tuple[tuple[str, str], ...]

PREFIX = "batchqueue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A kind of component that has metrics.

    Attributes:
        name: what it is called in the documents.
        views: its views in a snapshot.
        labels: the labels that each of its metrics has, with how each is read from a view.
    """

    name: str
    views: Callable[[Any], tuple[Any, ...]]
    labels: tuple[tuple[str, Callable[[Any], str]], ...]

    def labels_of(self, view: Any) -> Labels:
        """The labels of a view, in their order."""
        return tuple([(name, read(view)) for name, read in self.labels])


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric of a kind of component.

    Its name for Prometheus is made of area, what, unit and kind; its name for OpenTelemetry of area and what.

    Example:
        >>> metric = Metric(
        ...     area="queue", what="accepted", unit="items", kind="counter", help="Items taken in.",
        ...     of=Component(name="queue", views=tuple, labels=()), read=lambda view: view.stats.accepted)
        >>> metric.name, metric.otel_name
        ('batchqueue_queue_accepted_items_total', 'batchqueue.queue.accepted')

    Attributes:
        area: the first word of its name.
        what: what is measured.
        unit: a base unit, or what is counted; empty for a number without a unit.
        kind: "counter", "gauge" or "histogram".
        of: the kind of component.
        help: one line about it.
        read: its value in a view; None leaves it out; with `by` a mapping from the label's value to the value.
        by: a label of its own.
        first: of a histogram, the exponent of 2 of the lowest bucket's edge; last: of the highest.
    """

    area: str
    what: str
    unit: str
    kind: Kind
    of: Component
    help: str
    read: Callable[[Any], Any]
    by: str | None = None
    first: int = -14
    last: int = 9

    @property
    def family(self) -> str:
        """The name of its family for Prometheus, which of a counter lacks the `_total`."""
        return "_".join(part for part in (PREFIX, self.area, self.what, self.unit) if part)

    @property
    def name(self) -> str:
        """Its name for Prometheus."""
        return f"{self.family}_total" if self.kind == "counter" else self.family

    @property
    def otel_name(self) -> str:
        """Its name for OpenTelemetry, which lacks the unit, unless two would have the same."""
        unit = self.unit if self.unit == "bytes" or not self.what else ""
        return ".".join(part for part in (PREFIX, self.area, self.what, unit) if part)

    @property
    def otel_unit(self) -> str:
        """Its unit in UCUM, as OpenTelemetry writes units."""
        known = {"seconds": "s", "bytes": "By", "ratio": "1", "timestamp_seconds": "s", "": "1"}
        return known.get(self.unit) or f"{{{self.unit.removesuffix('s')}}}"

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        own = () if self.by is None else (self.by,)
        return tuple(name for name, _ in self.of.labels) + own

    @property
    def edges(self) -> tuple[float, ...]:
        """Of a histogram, the upper edges of its buckets, each inclusive; the last one is infinite besides."""
        return tuple(2.0**power for power in range(self.first, self.last + 1))

    def values(self, view: Any) -> Iterator[tuple[Labels, Value]]:
        """Its values in the view of a component, each with its labels."""
        value = self.read(view)
        if value is None:
            return
        own = self.of.labels_of(view)
        if self.by is None:
            yield own, value
        elif isinstance(value, Mapping):
            for label, each in value.items():  # pyright: ignore[reportUnknownVariableType]
                yield (*own, (self.by, str(label))), each  # pyright: ignore[reportUnknownArgumentType]


def cumulated(distribution: Distribution, metric: Metric) -> list[int]:
    """How many values are not above each edge of a histogram; exact, since every edge is one of the distribution's own.

    Example:
        >>> from batchqueue_async.queue.stats import Histogram
        >>> from batchqueue_async.observe.table import METRICS
        >>> (wait,) = (metric for metric in METRICS if metric.name == "batchqueue_queue_wait_seconds")
        >>> histogram = Histogram()
        >>> for seconds in (0.25, 0.3, 700.0): histogram.record(seconds)
        >>> counts = cumulated(histogram.summary(), wait)
        >>> counts[wait.edges.index(0.25)], counts[wait.edges.index(0.5)], counts[-1]
        (1, 2, 2)
    """
    counts: list[int] = []
    buckets = distribution.buckets
    place = seen = 0
    for power in range(metric.first, metric.last + 1):
        edge = 4 * (power + 20)
        while place < len(buckets) and buckets[place][0] <= edge:
            seen += buckets[place][1]
            place += 1
        counts.append(seen)
    return counts
