"""In which order queues end that feed each other: those upstream first, and those of a circle together.

A plain decision, without a loop or a clock: told which queues there are, which feeds which, and which have ended, it
says which may end now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

Node = TypeVar("Node", bound="Hashable")


class DrainOrder(Generic[Node]):
    """Which queues may end now, while those that feed them end.

    Args:
        nodes: all queues, in the order in which those that may end at the same time are named.
        feeds: what each produces into; what is not among the nodes does not count.

    Example:
        >>> order = DrainOrder(["rows", "lines", "log"], {"lines": ["rows"]})
        >>> order.take_ready()
        ['lines', 'log']
        >>> order.take_ready()
        []
        >>> order.done("lines")
        >>> order.take_ready()
        ['rows']
    """

    def __init__(self, nodes: Collection[Node], feeds: Mapping[Node, Collection[Node]]) -> None:
        self._waiting = dict.fromkeys(nodes)
        self._ended: set[Node] = set()
        feeders: dict[Node, list[Node]] = {node: [] for node in nodes}
        for node in nodes:
            for fed in feeds.get(node, ()):
                if fed in feeders:
                    feeders[fed].append(node)
        upstream = {node: _reach(node, feeders) for node in nodes}
        # Whom each has to wait for. Those of a circle are upstream of each other, and wait together for the others.
        self._before = {node: {each for each in upstream[node] if node not in upstream[each]} for node in nodes}

    @property
    def complete(self) -> bool:
        """Whether every queue was named."""
        return not self._waiting

    def take_ready(self) -> list[Node]:
        """The queues that nobody feeds any more; each is named once."""
        ready = [node for node in self._waiting if self._before[node] <= self._ended]
        for node in ready:
            del self._waiting[node]
        return ready

    def take_all(self) -> list[Node]:
        """The queues that were not named yet, whatever feeds them."""
        rest = list(self._waiting)
        self._waiting.clear()
        return rest

    def done(self, node: Node) -> None:
        """A queue has ended, and feeds nobody any more."""
        self._ended.add(node)


def _reach(node: Node, feeders: Mapping[Node, Collection[Node]]) -> set[Node]:
    """Everything that feeds a node, directly or through others; the node itself if it lies on a circle."""
    found: set[Node] = set()
    ahead = list(feeders[node])
    while ahead:
        other = ahead.pop()
        if other not in found:
            found.add(other)
            ahead += feeders[other]
    return found
