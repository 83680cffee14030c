"""Order by key: one delivery of a key at a time, keys taking turns, nothing kept of a key that is idle. Pure.

A lane exists from its first delivery to its last. Its key is the dictionary's key itself, not a hash of it into a fixed
number of lanes, so that a slow key holds up nobody else.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from batchqueue_async.intake.ports import Epoch, Taken


def hashable(key: Any) -> Hashable:
    """A key as a dictionary takes it: lists, sets and mappings by their contents.

    Example:
        >>> hashable(["a", {"b": 1}])
        ('list', 'a', ('dict', ('b', 1)))
    """
    try:
        hash(key)
    except TypeError:
        kind = type(key).__name__
        if isinstance(key, dict):
            pairs: Any = key.items()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            return (kind, *((hashable(each), hashable(value)) for each, value in pairs))
        if isinstance(key, list | tuple):
            return (kind, *(hashable(each) for each in cast("list[Any]", key)))
        if isinstance(key, set):
            return (kind, frozenset(cast("set[Hashable]", key)))
        if isinstance(key, bytearray):
            return (kind, bytes(key))
        raise
    return cast("Hashable", key)


class KeyLanes:
    """The deliveries that wait for a handler.

    A key is in `_lanes` exactly while one of its deliveries is ready, with a handler, or waiting for another attempt;
    its value is what stands behind that one, or None. So the lane's next delivery becomes ready when somebody calls
    `free`, and not before.

    Example:
        >>> from batchqueue_async.intake.ports import Delivery, Epoch
        >>> epoch, lanes = Epoch(), KeyLanes()
        >>> for key, body in [("a", b"1"), ("a", b"2"), ("b", b"3")]:
        ...     lanes.add(Delivery(body, epoch=epoch, order=key))
        >>> first = lanes.next()
        >>> first.body, lanes.next().body, len(lanes.ready), lanes.size
        (b'1', b'3', 0, 1)
        >>> lanes.free("a")
        >>> lanes.next().body
        b'2'

    Attributes:
        ready: what may go to a handler now, first come, first served.
        size: messages that wait here, ready or behind another of their key.
    """

    __slots__ = ("_lanes", "ready", "size")

    def __init__(self) -> None:
        self.ready: deque[Taken] = deque()
        self.size = 0
        self._lanes: dict[Hashable, deque[Taken] | None] = {}

    def __len__(self) -> int:
        """How many keys have a lane."""
        return len(self._lanes)

    def add(self, delivery: Taken) -> None:
        """Put a delivery behind those of its key; where keys can't be compared, that error, and nothing has changed."""
        key = delivery.order
        lanes = self._lanes
        if key is None:
            self.ready.append(delivery)
        elif key not in lanes:
            lanes[key] = None
            self.ready.append(delivery)
        else:
            queue = lanes[key]
            if queue is None:
                lanes[key] = deque((delivery,))
            else:
                queue.append(delivery)
        self.size += delivery.count

    def next(self) -> Taken:
        """Take the next one that is ready; its key is busy until `free`."""
        delivery = self.ready.popleft()
        self.size -= delivery.count
        return delivery

    def peek_behind(self, key: Hashable) -> Taken | None:
        """What stands first behind the one of this key that was taken."""
        queue = self._lanes.get(key)
        return queue[0] if queue else None

    def next_behind(self, key: Hashable) -> Taken:
        """Take it too: for a batch, which has the lane already."""
        queue = self._lanes[key]
        assert queue  # noqa: S101 - `peek_behind` has found one
        delivery = queue.popleft()
        self.size -= delivery.count
        return delivery

    def free(self, key: Hashable | None) -> None:
        """What was taken of this key has its outcome: the next one is ready."""
        if key is None:
            return
        queue = self._lanes[key]
        if queue:
            self.ready.append(queue.popleft())
        else:
            del self._lanes[key]

    def ready_again(self, delivery: Taken, *, first: bool = False) -> None:
        """Let one whose key is busy with itself be taken again: its delay is over, or it was not begun."""
        self.size += delivery.count
        if first:
            self.ready.appendleft(delivery)
        else:
            self.ready.append(delivery)

    def behind(self, deliveries: Iterable[Taken]) -> None:
        """Put deliveries of one busy key back at the front of what waits behind it, in their order."""
        for delivery in reversed(list(deliveries)):
            key = delivery.order
            assert key is not None  # noqa: S101 - what has no key is behind nothing
            self.size += delivery.count
            queue = self._lanes[key]
            if queue is None:
                self._lanes[key] = deque((delivery,))
            else:
                queue.appendleft(delivery)

    def forget(self, epoch: Epoch | None) -> list[Taken]:
        """Remove what waits here of an epoch, of every one when None, and return it; busy keys stay busy."""
        gone: list[Taken] = []

        def stays(delivery: Taken) -> bool:
            if epoch is None or delivery.epoch is epoch:
                gone.append(delivery)
                return False
            return True

        heads = [each for each in self.ready if epoch is None or each.epoch is epoch]
        self.ready = deque(each for each in self.ready if stays(each))
        for key, queue in self._lanes.items():
            if queue:
                self._lanes[key] = deque(each for each in queue if stays(each)) or None
        self.size -= sum(each.count for each in gone)
        for head in heads:
            self.free(head.order)
        return gone
