"""Which worker owns which partition when the load is uneven: a pure decision."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchqueue_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
