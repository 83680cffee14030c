"""Whether a consumer is stuck although its client reports no error. Pure.

Clients have stood still after a rebalance, a broker's restart or a failed commit, with a healthy group membership: the
session looks at the ends of its partitions now and then, and gives itself up when this says so.
"""

from __future__ import annotations

from typing import NamedTuple


class Sight(NamedTuple):
    """What the session sees.

    Attributes:
        assigned: whether the group has assigned partitions, or said that there are none.
        room: whether anything may be taken; a consumer that is full or paused is not stuck.
        behind: whether a partition has more than was taken of it; None where the broker does not answer.
    """

    assigned: bool
    room: bool
    behind: bool | None


class StallWatch:
    """Counts the time without progress.

    Example:
        >>> watch = StallWatch(60.0, now=0.0)
        >>> stuck = Sight(assigned=True, room=True, behind=True)
        >>> watch.verdict(stuck, now=59.0), watch.verdict(stuck, now=60.0)
        (None, 'there are messages, and none came for 60 s')
    """

    def __init__(self, timeout: float, *, now: float) -> None:
        self.timeout = timeout
        self._since = now

    def progressed(self, now: float) -> None:
        """Something was taken, or there was nothing to take."""
        self._since = now

    def verdict(self, sight: Sight, now: float) -> str | None:
        """Why the consumer is stuck; None while it is not known to be."""
        if not sight.room or (sight.assigned and sight.behind is False):
            self._since = now
            return None
        if now - self._since < self.timeout:
            return None
        if not sight.assigned:
            return f"the group assigned nothing for {self.timeout:g} s"
        if sight.behind is None:
            return f"the broker did not answer for {self.timeout:g} s"
        return f"there are messages, and none came for {self.timeout:g} s"
