"""Which messages make the next batch, and when it may leave. Pure.

A batch takes from each lane as much as stands there. A message of a batch that failed as a whole comes again in a
smaller one, so that the message that is the reason is soon alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchqueue_async.export.policies import BatchPolicy
    from batchqueue_async.intake.key_lanes import KeyLanes
    from batchqueue_async.intake.ports import Delivery, Taken

ALONE_STEP = 8
"""A batch that failed as a whole comes again in parts of at most this share of it: 500, 62, 7, 1."""


class Batches:
    """Makes batches of what the lanes have ready.

    Example:
        >>> from batchqueue_async.export.policies import BatchPolicy
        >>> from batchqueue_async.intake.key_lanes import KeyLanes
        >>> from batchqueue_async.intake.ports import Delivery, Epoch
        >>> lanes, epoch = KeyLanes(), Epoch()
        >>> for body in (b"1", b"2", b"3"):
        ...     lanes.add(Delivery(body, epoch=epoch))
        >>> batches = Batches(lanes, BatchPolicy(max_records=2, linger=1.0))
        >>> batches.due()
        0.0
        >>> [each.body for each in batches.next([])]
        [b'1', b'2']
        >>> batches.due()  # one is left, which came at 0.0
        1.0

    Attributes:
        flushing: whether batches leave as they are from now on.
    """

    __slots__ = ("_lanes", "_limits", "_policy", "flushing")

    def __init__(self, lanes: KeyLanes, policy: BatchPolicy) -> None:
        self._lanes = lanes
        self._policy = policy
        # The largest batch in which a message may come again that was in a batch that failed as a whole.
        self._limits: dict[Taken, int] = {}
        self.flushing = False

    def due(self, *, held_bytes: int = 0, crowded: bool = False) -> float:
        """When the next batch may leave, by the loop's time; 0 for at once. The lanes have something ready.

        Args:
            held_bytes: the bytes of all that the pool holds.
            crowded: nothing more can come before something leaves.
        """
        policy, lanes = self._policy, self._lanes
        full = lanes.size >= policy.max_records or held_bytes >= policy.max_bytes
        if policy.linger <= 0 or self.flushing or crowded or full:
            return 0.0
        return lanes.ready[0].taken + policy.linger

    def next(self, stale: list[Taken]) -> list[Taken]:
        """Take what is ready, up to the bounds of a batch; what turns out to be of a closed epoch goes to `stale`."""
        policy, lanes, limits = self._policy, self._lanes, self._limits
        batch: list[Taken] = []
        count = size = 0
        most = policy.max_records
        while lanes.ready:
            head = lanes.ready[0]
            if batch and (count + head.count > most or size + head.size > policy.max_bytes):
                break
            if limits and head in limits:
                if batch and count >= limits[head]:
                    break
                most = min(most, limits[head])
            each: Taken | None = lanes.next()
            key = head.order
            while each is not None:
                if each.epoch.open:
                    batch.append(each)
                    count += each.count
                    size += each.size
                else:
                    stale.append(each)
                    if each is head:  # the rest of its lane is as stale, or of a newer epoch, whose turn comes
                        lanes.free(key)
                        break
                behind = None if key is None else lanes.peek_behind(key)
                fits = behind is not None and count + behind.count <= most and size + behind.size <= policy.max_bytes
                each = lanes.next_behind(key) if fits and key is not None and behind not in limits else None
        return batch

    # -- after a failure ---------------------------------------------------------------------------------------------

    def narrow(self, batch: Sequence[Delivery]) -> None:
        """A batch failed as a whole: its messages come again in smaller ones."""
        limit = max(1, len(batch) // ALONE_STEP)
        for each in batch:
            self._limits[each] = limit

    def alone(self, delivery: Delivery) -> None:
        """A message comes again by itself."""
        self._limits[delivery] = 1

    def forget(self, deliveries: Iterable[Taken]) -> None:
        """Messages that have their outcome, or whose outcome is somebody else's."""
        if self._limits:
            for each in deliveries:
                self._limits.pop(each, None)
