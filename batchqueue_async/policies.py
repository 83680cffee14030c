"""The pure choices: how many workers and partitions, which partition takes an item, which worker owns which partition.

A caller describes the workload ("one worker per core", "a partition per handler"); the numbers are resolved once,
where the queue is made.

>>> WorkerPolicy.cpu_cores(0.5).resolve(cpu_count=8)
4
>>> PartitionPolicy.adaptive().resolve(workers=8, weight=500)
350
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

IO_BOUND_PER_CORE = 4
IO_BOUND_LIMIT = 200


def _whole(owner: str, name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{owner}: {name}={value!r} is not a whole number; give an int of {least} or more")
    if value < least:
        raise ConfigError(f"{owner}: {name}={value!r} is below {least}; give {least} or more")
    return value


def _real(owner: str, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{owner}: {name}={value!r} is not a finite number; give one above 0")
    return float(value)


def _round_half_up(value: float) -> int:
    return math.floor(value + 0.5)


def available_cpus() -> int:
    """The cores that this process may run on, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """How many drain tasks a queue has, or how many handler calls a scheduler runs at once.

    Build one with `fixed`, `cpu_cores`, `cpu_cores_with_base` or `io_bound`.

    Example:
        >>> WorkerPolicy.cpu_cores_with_base(1, 0.25).resolve(cpu_count=8)
        3
    """

    kind: Literal["fixed", "cpu_cores", "io_bound"]
    base: int = 0
    per_core: float = 0.0

    @classmethod
    def fixed(cls, count: int) -> WorkerPolicy:
        """Exactly `count` workers, on any machine."""
        return cls("fixed", base=_whole("WorkerPolicy.fixed", "count", count, 1))

    @classmethod
    def cpu_cores(cls, multiplier: float) -> WorkerPolicy:
        """`multiplier` workers per core, half rounded up, at least 1."""
        value = _real("WorkerPolicy.cpu_cores", "multiplier", multiplier)
        if value <= 0:
            raise ConfigError(f"WorkerPolicy.cpu_cores: multiplier={value} is not above 0; give e.g. 0.5")
        return cls("cpu_cores", per_core=value)

    @classmethod
    def cpu_cores_with_base(cls, base: int, multiplier: float) -> WorkerPolicy:
        """`base` workers and `multiplier` more per core, half rounded up, at least 1."""
        owner = "WorkerPolicy.cpu_cores_with_base"
        count = _whole(owner, "base", base, 0)
        value = _real(owner, "multiplier", multiplier)
        if value < 0 or (count == 0 and value == 0):
            raise ConfigError(f"{owner}: multiplier={value} with base={count} gives no worker; raise either")
        return cls("cpu_cores", base=count, per_core=value)

    @classmethod
    def io_bound(cls) -> WorkerPolicy:
        """4 workers per core, at most 200: for handlers that mostly wait for a network or a disk."""
        return cls("io_bound", per_core=IO_BOUND_PER_CORE)

    def resolve(self, cpu_count: int | None = None) -> int:
        """The number of workers on a machine with `cpu_count` cores (this machine when None); at least 1."""
        if self.kind == "fixed":
            return self.base
        cores = available_cpus() if cpu_count is None else _whole("WorkerPolicy", "cpu_count", cpu_count, 1)
        count = max(1, self.base + _round_half_up(self.per_core * cores))
        return min(count, IO_BOUND_LIMIT) if self.kind == "io_bound" else count

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"fixed({self.base})"
        if self.kind == "io_bound":
            return "io_bound()"
        return f"cpu_cores_with_base({self.base}, {self.per_core})" if self.base else f"cpu_cores({self.per_core})"


@dataclass(frozen=True, slots=True)
class PartitionPolicy:
    """How many partitions a queue has.

    Build one with `fixed`, `worker_multiply` or `adaptive`. An adaptive queue starts with a partition per worker and
    grows as handlers are added: one partition per unit of weight up to `workers x multiplier`, then one per two.

    Example:
        >>> [PartitionPolicy.adaptive().resolve(8, weight) for weight in (0, 100, 500)]
        [8, 100, 350]
    """

    kind: Literal["fixed", "worker_multiply", "adaptive"]
    number: int

    @classmethod
    def fixed(cls, count: int) -> PartitionPolicy:
        """Exactly `count` partitions."""
        return cls("fixed", _whole("PartitionPolicy.fixed", "count", count, 1))

    @classmethod
    def worker_multiply(cls, multiplier: int) -> PartitionPolicy:
        """`multiplier` partitions per worker."""
        return cls("worker_multiply", _whole("PartitionPolicy.worker_multiply", "multiplier", multiplier, 1))

    @classmethod
    def adaptive(cls, multiplier: int = 25) -> PartitionPolicy:
        """A partition per unit of handler weight up to `workers x multiplier`, then one per two units."""
        return cls("adaptive", _whole("PartitionPolicy.adaptive", "multiplier", multiplier, 1))

    def resolve(self, workers: int, weight: float = 0) -> int:
        """The number of partitions for `workers` workers and handlers of `weight` in all; at least 1."""
        count = _whole("PartitionPolicy", "workers", workers, 1)
        if self.kind == "fixed":
            return self.number
        if self.kind == "worker_multiply":
            return self.number * count
        total = _real("PartitionPolicy", "weight", weight)
        if total < 0:
            raise ConfigError(f"PartitionPolicy: weight={weight} is below 0; handler weights are above 0")
        # 1247 x 0.05 is 62.35000000000001 in binary: noise must not buy a partition.
        effective = math.ceil(round(total, 9))
        if effective == 0:
            return count
        threshold = count * self.number
        return effective if effective <= threshold else threshold + (effective - threshold) // 2

    def __str__(self) -> str:
        return f"{self.kind}({self.number})"


# -- which partition an item goes to ----------------------------------------------------------------------------------

T_contra = TypeVar("T_contra", contravariant=True)


class Selector(Protocol[T_contra]):
    """A callable that names the partition of an item.

    Example:
        >>> def by_first_letter(item: str, partition_count: int) -> int:
        ...     return ord(item[0]) % partition_count
    """

    def __call__(self, item: T_contra, partition_count: int, /) -> int:
        """The index of the item's partition, from 0 to `partition_count - 1`."""
        ...


@lru_cache(maxsize=16_384)
def stable_type_hash(kind: Any) -> int:
    """A number for a type that is the same in every process, unlike `hash(type)`."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class TypeHash:
    """Items of one type share a partition; see `type_hash`."""

    def __call__(self, item: object, partition_count: int) -> int:
        """The partition of the item's type."""
        kind: Any = type(item)
        return stable_type_hash(kind) % partition_count

    def __str__(self) -> str:
        return "type_hash()"


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Partitions take turns; see `round_robin`."""

    _turns: itertools.count[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def __call__(self, item: object, partition_count: int) -> int:  # noqa: ARG002 - a selector's signature
        """The partition whose turn it is."""
        return next(self._turns) % partition_count

    def __str__(self) -> str:
        return "round_robin()"


@dataclass(frozen=True, slots=True)
class ByKey(Generic[T_contra]):
    """Items with equal keys share a partition; see `by_key`."""

    key: Callable[[T_contra], Any]

    def __call__(self, item: T_contra, partition_count: int) -> int:
        """The partition of the item's key."""
        return hash(self.key(item)) % partition_count

    def __str__(self) -> str:
        return f"by_key({getattr(self.key, '__qualname__', self.key)})"


def type_hash() -> TypeHash:
    """Items of one type go to one partition, the same one in every run: grouping by handler is then nearly free.

    Example:
        >>> type_hash()("any text", 8) == type_hash()("another", 8)
        True
    """
    return TypeHash()


def round_robin() -> RoundRobin:
    """Partitions take turns: the even spread for items of one kind; order holds only within a partition.

    Example:
        >>> select = round_robin()
        >>> [select("item", 3) for _ in range(4)]
        [0, 1, 2, 0]
    """
    return RoundRobin()


def by_key(key: Callable[[T_contra], Any]) -> ByKey[T_contra]:
    """Items with equal keys go to one partition, so each key is first in, first out; keys must be hashable.

    Example:
        >>> select = by_key(len)
        >>> select("abc", 4) == select("xyz", 4)
        True
    """
    if not callable(key):
        raise ConfigError(f"by_key: key={key!r} is not callable; give a function from item to key")
    return ByKey(key)


# -- which worker owns which partition --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ThroughputWeighted:
    """Busiest partition first, each to the least loaded worker; see `throughput_weighted`."""

    skip_ratio: float = 1.15

    def __post_init__(self) -> None:
        if not math.isfinite(self.skip_ratio) or self.skip_ratio < 1:
            raise ConfigError(
                f"throughput_weighted: skip_ratio={self.skip_ratio!r} is not a finite number from 1 on; give e.g. 1.15"
            )

    def assign(self, throughput: Sequence[int], owners: Sequence[int], workers: int) -> list[int] | None:
        """The new owner of each partition, or None where moving them is not worth it."""
        if workers < 2 or not any(throughput) or self._even(throughput, owners, workers):  # noqa: PLR2004 - one worker
            return None
        assigned = list(owners)
        # Ties go to the worker with fewer partitions, then to the lower number, so that equal input gives equal output.
        heap = [(0, 0, worker) for worker in range(workers)]
        for index in sorted(range(len(throughput)), key=lambda each: (-throughput[each], each)):
            load, owned, worker = heap[0]
            assigned[index] = worker
            heapq.heapreplace(heap, (load + throughput[index], owned + 1, worker))
        return assigned if assigned != list(owners) else None

    def _even(self, throughput: Sequence[int], owners: Sequence[int], workers: int) -> bool:
        loads = [0] * workers
        for index, owner in enumerate(owners):
            loads[owner] += throughput[index]
        return max(loads) < self.skip_ratio * min(loads)

    def __str__(self) -> str:
        return f"throughput_weighted({self.skip_ratio})"


def throughput_weighted(skip_ratio: float = 1.15) -> ThroughputWeighted:
    """A balancer that gives the busiest partition to the least loaded worker, and so on down.

    Nothing moves while the busiest worker has less than `skip_ratio` times the load of the idlest.

    Example:
        >>> throughput_weighted().assign([90, 80, 10, 20], owners=[0, 0, 1, 1], workers=2)
        [0, 1, 0, 1]
    """
    return ThroughputWeighted(skip_ratio)
