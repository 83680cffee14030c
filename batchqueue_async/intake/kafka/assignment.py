"""Which partitions a consumer has, what may be taken of each, and what may be committed. Pure.

A rebalance of the client in use is eager: everything is revoked, then assigned anew. The steps of a revocation, which
the session walks through in this order:

    revoke()        the epochs close: nothing more starts, and what was not started is forgotten
    (drain)         what runs may finish, and its outcomes still count
    (commit)        the points that this made
    fence(revoked)  the epochs end: what finishes later is dropped, for the partition may be another's by now

The fence before the drain would throw away the outcomes of the drain, and the partition's next owner would repeat them.
`fence` gets what `revoke` returned, so that a late call can't take back a newer assignment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from batchqueue_async.intake.kafka.progress import Place, Progress
from batchqueue_async.intake.portions import Portion
from batchqueue_async.intake.ports import Epoch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Limits:
    """How much of one partition may be held, by the number of partitions that share the consumer.

    A partition that is stuck must leave room for the others, so none may hold everything while there are several. It
    may always hold what keeps it busy: one batch where its records stay in order, else a record for each worker.

    Example:
        >>> limits = Limits(messages=500, bytes=1_000, least=32, ahead=5_000)
        >>> limits.messages(1), limits.messages(4), limits.messages(100), limits.bytes(4)
        (500, 125, 32, 250)
    """

    __slots__ = ("_bytes", "_least", "_messages", "ahead")

    def __init__(self, *, messages: int, bytes: int, least: int, ahead: int) -> None:  # noqa: A002 - the name that the public `max_bytes` and the statistics have for it
        self._messages = messages
        self._bytes = bytes
        self._least = least
        self.ahead = ahead

    def messages(self, partitions: int) -> int:
        """How many messages without an outcome one of this number of partitions may hold."""
        return min(self._messages, max(1, self._least, self._messages // max(1, partitions)))

    def bytes(self, partitions: int) -> int:
        """How many bytes."""
        return max(1, self._bytes // max(1, partitions))


# A full partition is left alone until this part of its room is free: a fetch for single records costs as much as one
# for hundreds.
_RESUME = 0.75


class Assignment:
    """The partitions of the moment, each with its progress.

    Attributes:
        assigned: whether the group has assigned anything, be it nothing, and not revoked it since.
    """

    def __init__(self, limits: Limits) -> None:
        self.assigned = False
        self._limits = limits
        self._parts: dict[Place, Progress] = {}
        self._portion = Portion()

    @property
    def parts(self) -> list[Progress]:
        """The progress of each partition."""
        return list(self._parts.values())

    @property
    def places(self) -> set[Place]:
        """The partitions."""
        return set(self._parts)

    # --- rebalances

    def assign(self, places: Iterable[tuple[str, int]]) -> None:
        """Partitions were assigned, all there are now."""
        self.assigned = True
        for place in places:
            self.part(place)

    def part(self, place: tuple[str, int]) -> Progress:
        """The progress of a partition; the client may hand out its first records before it says that it has it."""
        part = self._parts.get(cast("Place", place))  # it is a tuple, and equal to one
        if part is None:
            name = Place(*place)
            part = self._parts[name] = Progress(name, Epoch(f"{name.topic}/{name.partition}"))
        return part

    def revoke(self) -> list[Progress]:
        """Partitions are about to be taken away: close their epochs, and return them for the fence."""
        self.assigned = False
        parts = self.parts
        for part in parts:
            part.epoch.close()
        return parts

    def fence(self, revoked: Iterable[Progress]) -> None:
        """End the epochs of these and forget them; an assignment that is newer stays."""
        for part in revoked:
            part.epoch.end()
            if self._parts.get(part.place) is part:
                del self._parts[part.place]

    # --- room

    def offered(self) -> list[Place]:
        """The partitions that may be read now."""
        return [part.place for part in self._parts.values() if part.epoch.open and not self._is_full(part)]

    def lot(self, offered: Sequence[Place], messages: int, bytes: int) -> int:  # noqa: A002 - the name that the public `max_bytes` and the statistics have for it
        """How many records to ask for, so that no bound is passed whichever of the partitions they come from."""
        count = len(self._parts)
        least = min(
            (self._limits.messages(count) - part.held for part in map(self._parts.__getitem__, offered)),
            default=messages,
        )
        return self._portion.most(max(1, min(messages, least)), bytes)

    def took(self, count: int, size: int) -> None:
        """Note how large records are, for a client that can't be asked for bytes."""
        self._portion.took(count, size)

    def _is_full(self, part: Progress) -> bool:
        count = len(self._parts)
        messages, size, ahead = self._limits.messages(count), self._limits.bytes(count), self._limits.ahead
        if part.full:
            part.full = (
                part.held > messages * _RESUME or part.bytes > size * _RESUME or len(part.window) > ahead * _RESUME
            )
        elif part.held >= messages or part.bytes >= size or len(part.window) >= ahead:
            part.full = True
        return part.full

    # --- commits

    def due(self, positions: Mapping[Place, int | None]) -> dict[Place, int]:
        """The points that differ from what was committed last.

        Args:
            positions: the client's position in each partition of now.
        """
        found: dict[Place, int] = {}
        for place, part in self._parts.items():
            if part.epoch.over:
                continue
            point = part.window.point(positions.get(place))
            if point is not None and point != part.committed:
                found[place] = point
        return found

    def committed(self, points: Mapping[Place, int], parts: Mapping[Place, Progress]) -> None:
        """The broker has these points; `parts` are the assignments that they were computed from."""
        for place, point in points.items():
            parts[place].committed = point
