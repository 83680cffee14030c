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
import math
import os
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast, get_args
from weakref import WeakKeyDictionary

from batchqueue_async._native import Turns
from batchqueue_async._support.checks import Checkup, Choice, Function, Real, Rule, Whole, require
from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Overflow = Literal["block", "reject", "drop_oldest", "drop_newest"]
"""What happens where something is full: the one vocabulary, for queues in memory and on disk, and for exporters."""
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)

IO_BOUND_PER_CORE = 4
IO_BOUND_LIMIT = 200
# Every worker is a task, and every partition some kilobytes: more of them than this is a slip of the keyboard.
MOST_WORKERS = 100_000
MOST_PARTITIONS = 100_000

_COUNT = Whole(most=MOST_WORKERS)
_PARTITIONS = Whole(most=MOST_PARTITIONS)
_MULTIPLIER = Real(most=MOST_WORKERS)
_MULTIPLIER_OR_ZERO = Real(above=False, most=MOST_WORKERS)
_WEIGHT = Real(above=False)
_WORKER_RULES: dict[str, Rule] = {
    "kind": Choice(words=("fixed", "cpu_cores", "io_bound")),
    "base": Whole(least=0, most=MOST_WORKERS),
    "per_core": _MULTIPLIER_OR_ZERO,
}
_PARTITION_RULES: dict[str, Rule] = {
    "kind": Choice(words=("fixed", "worker_multiply", "adaptive")),
    "number": _PARTITIONS,
}


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

    def __post_init__(self) -> None:
        check = Checkup("WorkerPolicy", self, _WORKER_RULES)
        if check.sound("kind", "base", "per_core"):
            numbers = (self.base, self.per_core)
            if self.kind == "fixed" and (self.base < 1 or self.per_core):
                rule = f"with per_core={self.per_core} is not a fixed number of workers"
                check.fault("base", rule, "use WorkerPolicy.fixed(4)")
            elif self.kind == "cpu_cores" and not any(numbers):
                check.fault("per_core", "with base=0 gives no worker", "use WorkerPolicy.cpu_cores(0.5)")
            elif self.kind == "io_bound" and numbers != (0, IO_BOUND_PER_CORE):
                check.fault("per_core", "is not the number of io_bound", "use WorkerPolicy.io_bound()")
        check.finish()

    @classmethod
    def fixed(cls, count: int) -> WorkerPolicy:
        """Exactly `count` workers, on any machine."""
        require("WorkerPolicy.fixed", "count", count, _COUNT)
        return cls("fixed", base=count)

    @classmethod
    def cpu_cores(cls, multiplier: float) -> WorkerPolicy:
        """`multiplier` workers per core, half rounded up, at least 1."""
        require("WorkerPolicy.cpu_cores", "multiplier", multiplier, _MULTIPLIER)
        return cls("cpu_cores", per_core=float(multiplier))

    @classmethod
    def cpu_cores_with_base(cls, base: int, multiplier: float) -> WorkerPolicy:
        """`base` workers and `multiplier` more per core, half rounded up, at least 1."""
        owner = "WorkerPolicy.cpu_cores_with_base"
        require(owner, "base", base, Whole(least=0, most=MOST_WORKERS))
        require(owner, "multiplier", multiplier, _MULTIPLIER_OR_ZERO)
        if not base and not multiplier:
            raise ConfigError(f"{owner}: multiplier={multiplier} with base={base} gives no worker; raise either")
        return cls("cpu_cores", base=base, per_core=float(multiplier))

    @classmethod
    def io_bound(cls) -> WorkerPolicy:
        """4 workers per core, at most 200: for handlers that mostly wait for a network or a disk."""
        return cls("io_bound", per_core=IO_BOUND_PER_CORE)

    def resolve(self, cpu_count: int | None = None) -> int:
        """The number of workers on a machine with `cpu_count` cores (this machine when None); at least 1."""
        if self.kind == "fixed":
            return self.base
        if cpu_count is not None:
            require("WorkerPolicy", "cpu_count", cpu_count, _COUNT)
        cores = available_cpus() if cpu_count is None else cpu_count
        count = max(1, self.base + _round_half_up(self.per_core * cores))
        return min(count, IO_BOUND_LIMIT if self.kind == "io_bound" else MOST_WORKERS)

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

    def __post_init__(self) -> None:
        Checkup("PartitionPolicy", self, _PARTITION_RULES).finish()

    @classmethod
    def fixed(cls, count: int) -> PartitionPolicy:
        """Exactly `count` partitions."""
        require("PartitionPolicy.fixed", "count", count, _PARTITIONS)
        return cls("fixed", count)

    @classmethod
    def worker_multiply(cls, multiplier: int) -> PartitionPolicy:
        """`multiplier` partitions per worker."""
        require("PartitionPolicy.worker_multiply", "multiplier", multiplier, _PARTITIONS)
        return cls("worker_multiply", multiplier)

    @classmethod
    def adaptive(cls, multiplier: int = 25) -> PartitionPolicy:
        """A partition per unit of handler weight up to `workers x multiplier`, then one per two units."""
        require("PartitionPolicy.adaptive", "multiplier", multiplier, _PARTITIONS)
        return cls("adaptive", multiplier)

    def resolve(self, workers: int, weight: float = 0) -> int:
        """The number of partitions for `workers` workers and handlers of `weight` in all; from 1 to 100,000."""
        require("PartitionPolicy", "workers", workers, _COUNT)
        if self.kind == "fixed":
            return self.number
        if self.kind == "worker_multiply":
            return min(self.number * workers, MOST_PARTITIONS)
        require("PartitionPolicy", "weight", weight, _WEIGHT)
        if weight == 0:
            return workers
        # 1247 x 0.05 is 62.35000000000001 in binary: noise must not buy a partition.
        effective = max(1, math.ceil(round(weight, 9)))
        threshold = workers * self.number
        wanted = effective if effective <= threshold else threshold + (effective - threshold) // 2
        return min(wanted, MOST_PARTITIONS)

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


_type_hashes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of types that come and go, it keeps none alive


def stable_type_hash(kind: Any) -> int:
    """A number for a type that is the same in every process, unlike `hash(type)`."""
    try:
        return _type_hashes[kind]
    except KeyError:
        name = f"{kind.__module__}.{kind.__qualname__}"
        number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
        _type_hashes[kind] = number
        return number


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

    turns: Turns[int] = field(default_factory=Turns, compare=False, repr=False)

    def __call__(self, item: object, partition_count: int) -> int:  # noqa: ARG002 - a selector's signature
        """The partition whose turn it is."""
        return next(self.turns) % partition_count

    def fresh(self) -> RoundRobin:
        """The same selector with turns of its own, for another queue."""
        return RoundRobin()

    def __reduce__(self) -> tuple[type[RoundRobin], tuple[()]]:
        """For copies, in this process or another: each has turns of its own, as `fresh` gives them."""
        return type(self), ()

    def __str__(self) -> str:
        return "round_robin()"


@dataclass(frozen=True, slots=True)
class ByKey(Generic[T_contra]):
    """Items with equal keys share a partition; see `by_key`."""

    key: Callable[[T_contra], Any]

    def __post_init__(self) -> None:
        require("by_key", "key", self.key, Function(parameters=("item",), may_be_class=True))

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
    return ByKey(key)


def key_of(selector: object) -> Callable[[Any], Any] | None:
    """The key function that is all there is to a selector; None for any selector but `by_key(key)` itself."""
    kind = type(selector)
    return cast("ByKey[Any]", selector).key if kind is ByKey else None


# -- which worker owns which partition --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ThroughputWeighted:
    """Busiest partition first, each to the least loaded worker; see `throughput_weighted`."""

    skip_ratio: float = 1.15

    def __post_init__(self) -> None:
        require("throughput_weighted", "skip_ratio", self.skip_ratio, Real(least=1.0, above=False))

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
