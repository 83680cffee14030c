"""Those who wait for places in a partition, first come, first served.

A producer that must wait gets a reservation, not the place itself, and puts its item there when it runs again: a
producer cancelled in between gives the reservation back, and has left no trace.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchqueue_async.queue.byte_room import ByteRoom
    from batchqueue_async.queue.deadlock import WaitHere
    from batchqueue_async.queue.drain import DrainTask
    from batchqueue_async.queue.partition import Partition


class Waiter:
    """A producer in a queue for places: `future` resolves when some of the `want` are reserved, or on closing.

    Attributes:
        partition: where it waits; growth may lead it to another partition, and its place in the order with it.
        item: the first item that it waits with: it waits where that item belongs.
        want: how many places it still waits for.
        reserved: how many were reserved for it and are not filled yet.
        sizes: in a partition that is bound by bytes, how many each of its items takes.
        filled: how many of these have come in.
        here: its wait, as the registry of the waits of handler calls knows it.
        broken: whether the wait could never end, and so must.
        expired: whether its time is over.
    """

    __slots__ = ("broken", "expired", "filled", "future", "here", "item", "partition", "reserved", "sizes", "want")

    partition: Partition[Any]
    stays = False
    """Whether it stands for several producers of this very partition, whom growth leads elsewhere by itself."""

    def __init__(self, want: int, item: Any = None, sizes: list[int] | None = None) -> None:
        self.want = want
        self.item = item
        self.reserved = 0
        self.sizes = sizes or []
        self.filled = 0
        self.broken = self.expired = False
        self.here: WaitHere | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def notify(self) -> None:
        """Let the producer run and look at what it got."""
        if not self.future.done():
            self.future.set_result(None)

    def break_wait(self) -> None:
        """End the wait: it is part of a circle of waits."""
        self.broken = True
        self.notify()

    def expire(self) -> None:
        """End the wait: its time is over."""
        self.expired = True
        self.notify()

    def needs(self) -> list[list[DrainTask[Any]]]:
        """Whom the producer waits for: nobody any more when it is about to run."""
        return [] if self.future.done() else self.partition.needs()

    def renew(self) -> None:
        """Be ready to wait for the rest of the places."""
        self.future = asyncio.get_running_loop().create_future()

    def look_for_circle(self) -> None:
        """What it waits for has changed: end a circle of waits, if that closed one."""
        if self.here is not None:
            self.here.break_circles()


class WaiterQueue:
    """The waiters of one partition, and the places reserved for them.

    A waiter that got a part of what it wants is both waiting and granted. A queue in which nobody is either is thrown
    away: to a partition no queue and nobody waiting are the same.

    Attributes:
        waiting: those who wait for places, in order.
        granted: those who have places reserved that they have not used.
        reserved: how many places are reserved and not filled, over all waiters.
    """

    __slots__ = ("granted", "reserved", "waiting")

    def __init__(self) -> None:
        self.waiting: OrderedDict[Waiter, None] = OrderedDict()
        self.granted: dict[Waiter, None] = {}
        self.reserved = 0

    def everyone(self) -> list[Waiter]:
        """All of them in order, those with reservations first."""
        return [*self.granted, *(waiter for waiter in self.waiting if waiter not in self.granted)]

    def add(self, waiter: Waiter) -> Waiter:
        """Let a waiter join at the end; the same one."""
        self.waiting[waiter] = None
        return waiter

    def grant(self, room: int, byte_room: ByteRoom[Any] | None) -> bool:
        """Reserve up to `room` places for the waiter whose turn it is; False if its next item finds no bytes."""
        waiter = next(iter(self.waiting))
        share = min(room, waiter.want)
        if byte_room is not None:
            share = byte_room.reserve(waiter, share)
        waiter.want -= share
        waiter.reserved += share
        self.reserved += share
        served = not waiter.want
        if share:
            self.granted[waiter] = None
            waiter.notify()
        if not waiter.want:
            del self.waiting[waiter]
        elif served:
            self.waiting.move_to_end(waiter)  # it stands for others by now, who have come since: behind who was there
        return share > 0

    def use(self, waiter: Waiter, used: int) -> None:
        """Places that were reserved are filled, or given up."""
        waiter.reserved -= used
        self.reserved -= used
        if not waiter.reserved:
            self.granted.pop(waiter, None)

    def remove(self, waiter: Waiter) -> None:
        """Let a waiter quit; what was reserved for it is free."""
        self.use(waiter, waiter.reserved)
        self.waiting.pop(waiter, None)
        waiter.want = 0

    def dismiss(self) -> None:
        """Let everybody who waits for more places look, and find the partition closed."""
        waiting = list(self.waiting)
        self.waiting.clear()
        for waiter in waiting:
            waiter.notify()
