"""Room: the quotas, what is used of them and will be given back, and what becomes of a put for which there is none."""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import TYPE_CHECKING

from batchqueue_async.durable.disk import format as fmt
from batchqueue_async.durable.state.dropping import Eviction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchqueue_async.durable.state.queue_state import QueueState


class Decision(Enum):
    """What becomes of a put."""

    ADMIT = auto()
    WAIT = auto()
    DROP = auto()
    """The put itself is dropped."""
    REFUSE = auto()
    OCCUPIED = auto()
    """Refused: what the queue can't give back leaves too little."""
    TOO_LARGE = auto()
    """Refused: no empty queue has room for it."""


class Room:
    """What one queue may use, and what it uses; whoever wants to know or to make room asks here.

    Attributes:
        free_bytes: what the file system has left, when it was last asked.
        disk_full: frames wait for room on a disk that was found full.
        eviction: what goes when there is no room.
        owed: records that are dropped with the next `pay`, for puts that are in: in one go, as if each had dropped its
            own. They count as dropped from the moment on at which they are owed.
    """

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._config = state.config
        self.eviction = Eviction(state)
        self.free_bytes: int | None = None
        self.disk_full = False
        self.owed = 0
        self._dead_known = 0
        self._dead_now: Callable[[], int | None] = _not_open

    # What is used

    @property
    def is_bounded(self) -> bool:
        """Whether there is any quota: else every put comes in, as long as the disk takes it."""
        config = self._config
        return bool(config.max_records is not None or config.max_bytes is not None or config.min_free_bytes)

    @property
    def used_bytes(self) -> int:
        """Everything in the directory, the dead letters as they are now included."""
        now = self._dead_now()
        return self._state.disk_bytes + (0 if now is None else now - self._dead_known)

    def count_dead_letters(self, known: int, now: Callable[[], int | None]) -> None:
        """The dead letters took `known` bytes when the directory was looked at; `now` says what they take."""
        self._dead_known, self._dead_now = known, now

    def looked(self, free_bytes: int | None) -> None:
        """The writer has asked the file system what is left, if it could."""
        if free_bytes is not None:
            self.free_bytes = free_bytes

    @property
    def spare_bytes(self) -> float:
        """What is left of all that the directory may take, the reserve included."""
        most = self._config.max_bytes
        return math.inf if most is None else most - self.used_bytes

    @property
    def is_half_used(self) -> bool:
        """Whether the quota in bytes is half used, if there is one."""
        return self.used_bytes * 2 >= self._config.usable_bytes

    def has(self, size: int) -> bool:
        """Whether a file of this size may be made, of the reserve if need be, and can be."""
        fits = self.free_bytes is None or size <= self.free_bytes
        return fits and self._state.pending.disk_bytes + size <= self.spare_bytes

    def lacks(self, records: int, size: int) -> str | None:
        """Why there is no room for these now, or None."""
        if self.disk_full:
            return "disk_full"
        if self._config.max_records is not None and self._over(records) > 0:
            return "max_records"
        return self._lacks_bytes(size)

    def _over(self, records: int) -> int:
        """By how many records `max_records` would be exceeded with these."""
        state = self._state
        return self.records + state.pending.records + records - (self._config.max_records or 0)

    def _lacks_bytes(self, size: int) -> str | None:
        state, config = self._state, self._config
        excess = self.used_bytes + state.pending.disk_bytes + size - config.usable_bytes
        # The round that writes this, or one before it, deletes what can be deleted now.
        if excess > 0 and excess > state.deletable_bytes():
            return "max_bytes"
        free = self.free_bytes
        if (
            config.min_free_bytes
            and free is not None
            and free - state.pending.disk_bytes - size < config.min_free_bytes
        ):
            return "min_free_bytes"
        return None

    def takes(self, records: int, size: int) -> bool:
        """Whether a put may come in at once: there is room, or it owes the oldest records for what it takes."""
        if self.disk_full or self._lacks_bytes(size) is not None:
            return False
        if self._config.max_records is None or (over := self._over(records)) <= 0:
            return True
        state = self._state
        droppable = self.records - state.leased - state.counters.unreadable
        if self._config.overflow != "drop_oldest" or over > min(droppable, records):
            return False
        self.owed += over
        return True

    @property
    def records(self) -> int:
        """Records that are not settled, without those that are owed."""
        return self._state.records - self.owed

    def dropped(self) -> Mapping[str, int]:
        """Records dropped, by reason."""
        known = self._state.counters.dropped
        return known if not self.owed else {**known, "oldest": known["oldest"] + self.owed}

    def pay(self) -> None:
        """Drop what is owed."""
        owed, self.owed = self.owed, 0
        self.eviction.drop_records(owed)

    def missing_bytes(self, size: int) -> int:
        """How many bytes on the disk have to go before `size` more fit into both limits; not above 0 when they do."""
        config = self._config
        wanted = self._state.pending.disk_bytes + size
        missing = 0.0
        if config.max_bytes is not None:
            missing = self.used_bytes + wanted - config.usable_bytes
        if config.min_free_bytes and self.free_bytes is not None:
            missing = max(missing, config.min_free_bytes - (self.free_bytes - wanted))
        return int(missing)

    def fixed_bytes(self) -> int:
        """What stays on the disk when every record is settled: other files, and one segment without frames."""
        entries = self._state.segments.values()
        segments = sum(entry.size + entry.hint_bytes for entry in entries if not entry.deleted)
        return self.used_bytes - segments + fmt.DATA_START + fmt.FOOTER

    def _fits_ever(self, records: int, size: int) -> bool:
        return self._fits_alone(records, size) and self.fixed_bytes() + size <= self._config.usable_bytes

    def _fits_alone(self, records: int, size: int) -> bool:
        """Whether an empty queue without dead letters and other files would have room for these."""
        limit = self._config.max_records
        return (limit is None or records <= limit) and size <= self._config.usable_bytes

    # What becomes of a put

    def decide(self, records: int, size: int, *, others_wait: bool) -> Decision:
        """What becomes of a put that comes now; behind others that wait, nobody passes."""
        if not others_wait and self.lacks(records, size) is None:
            return Decision.ADMIT
        if not self._fits_ever(records, size):
            return Decision.OCCUPIED if self._fits_alone(records, size) else Decision.TOO_LARGE
        if self._config.overflow in ("block", "drop_oldest"):
            return Decision.WAIT
        if self.lacks(records, size) is None:
            return Decision.ADMIT
        return Decision.REFUSE if self._config.overflow == "reject" else Decision.DROP

    def decide_again(
        self, records: int, size: int, *, compact: Callable[[], bool], freeing: Callable[[], bool]
    ) -> Decision:
        """What becomes of the first put that waits.

        Args:
            records: how many it is.
            size: what it takes on the disk.
            compact: asks for the room of settled records inside old segments; whether that may give any.
            freeing: whether anything under way may give room.
        """
        reason = self.lacks(records, size)
        if reason is None:
            return Decision.ADMIT
        if reason != "max_records" and compact():
            return Decision.WAIT
        if self._config.overflow == "drop_oldest" and reason != "disk_full":
            if self.eviction.drop_oldest(reason, records, size):
                return Decision.ADMIT if self.lacks(records, size) is None else Decision.WAIT
            return Decision.WAIT if freeing() else Decision.REFUSE
        if reason == "max_bytes" and not self._fits_ever(records, size):
            return Decision.OCCUPIED
        return Decision.WAIT


def _not_open() -> int | None:
    """Until it is opened, the queue of the dead letters is as it was."""
    return None
