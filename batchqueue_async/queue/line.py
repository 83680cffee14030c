"""The line of those who wait for a place in a partition, and the bound that makes them wait.

A producer that must wait gets a permit for a place, not the place itself, and puts its item there when it runs
again: a producer cancelled in between gives the permit back, and has left no trace.
"""

from __future__ import annotations

import asyncio
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from batchqueue_async.queue.buffer import NOTHING_TO_SPARE, Buffer

if TYPE_CHECKING:
    from collections import deque

    from batchqueue_async.queue.drain import Worker
    from batchqueue_async.queue.partition import Partition

T = TypeVar("T")


class Gate(Protocol):
    """What a partition knows of the door by which other threads come in."""

    def refill(self) -> None:
        """Lend the door the places that are free now."""
        ...

    def reclaim(self) -> bool:
        """Take places back that the door has not used; whether there were any."""
        ...

    def unused(self) -> int:
        """How many of the places lent to the door hold no item."""
        ...


class Waiter:
    """A producer in line for places: `future` resolves when `permits` of the `want` are granted, or on closing.

    Attributes:
        line: where it stands; growth may lead it to another partition, and its place in the order with it.
        item: the first item that it waits with: its line is where that item belongs.
        worker: the worker whose handler call waits here, if it is one.
        broken: whether the wait could never end, and so must.
        expired: whether its time is over.
    """

    __slots__ = ("broken", "expired", "future", "item", "line", "permits", "want", "worker")

    line: Partition[Any]
    stays = False
    """Whether it stands for several producers of this very partition, whom growth leads elsewhere by itself."""

    def __init__(self, want: int, item: Any = None) -> None:
        self.want = want
        self.item = item
        self.permits = 0
        self.broken = self.expired = False
        self.worker: Worker[Any] | None = None
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

    def needs(self) -> list[list[Worker[Any]]]:
        """Whom the producer waits for: nobody any more when it is about to run."""
        return [] if self.future.done() else self.line.needs()

    def renew(self) -> None:
        """Be ready to wait for the rest of the places."""
        self.future = asyncio.get_running_loop().create_future()


class Line(Buffer[T]):
    """A buffer with a bound, and a line of producers in front of it."""

    __slots__ = ("closed", "gate", "granted", "held", "linger_step", "listed", "permits", "waiters")

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.permits = 0
        self.held = 0
        """Places kept for items of types that are moving here, and for the door."""
        self.closed = False
        self.listed = False
        """Whether its worker (or `attend`) knows that there are items."""
        self.linger_step: int | None = None
        self.gate: Gate | None = None
        """The share of this partition that the door for other threads has."""
        self.waiters: deque[Waiter] | None = None
        self.granted: dict[Waiter, None] | None = None
        """The producers that have permits, in order; `waiters` are those who want more."""

    def room(self) -> int:
        """How many places are neither taken nor promised."""
        return self.capacity - self.qsize() - self.permits - self.held

    def full(self) -> bool:
        """Whether a further item would be refused or have to wait."""
        unused = 0 if self.gate is None else self.gate.unused()
        return bool(self.waiters) or bool(self.permits) or self.room() + unused <= 0

    def make_room(self, count: int) -> bool:
        """Whether there are so many free places, once the door has given back what it does not use."""
        while self.room() < count:
            if self.gate is None or not self.gate.reclaim():
                return False
        return True

    def arm(self) -> None:
        """Set how many places the producers' fast path may fill."""
        if self.closed or not self.listed or self.waiters or self.permits:
            self._set_spare(NOTHING_TO_SPARE)
            return
        room = self.capacity - self.qsize() - self.held
        if self.linger_step is not None:
            # The item that fills the partition, or may fill the batch, takes the slow path: its worker has to know.
            room = min(room, self.linger_step) - 1
        self._set_spare(repeat(None, max(0, room)))

    def in_line(self) -> list[Waiter]:
        """Everybody in the line, those with permits first."""
        granted = self.granted or {}
        return [*granted, *(waiter for waiter in self.waiters or () if waiter not in granted)]

    def grant(self) -> None:
        """Give free places to the line, first come, first served."""
        waiters = self.waiters
        while waiters:
            room = self.room()
            if room <= 0:
                if self.gate is not None and self.gate.reclaim():
                    continue
                break
            waiter = waiters[0]
            share = min(room, waiter.want)
            waiter.want -= share
            waiter.permits += share
            self.permits += share
            if self.granted is None:
                self.granted = {}
            self.granted[waiter] = None
            waiter.notify()
            if not waiter.want:  # who stands for several may want some more by now
                waiters.popleft()
        self.arm()

    def use_permits(self, waiter: Waiter, used: int) -> None:
        """Places that were granted are taken."""
        waiter.permits -= used
        self.permits -= used
        if not waiter.permits and self.granted is not None:
            self.granted.pop(waiter, None)

    def leave(self, waiter: Waiter) -> None:
        """Quit the line; granted places that were not used go to the next."""
        self.use_permits(waiter, waiter.permits)
        if waiter.want and self.waiters and waiter in self.waiters:
            self.waiters.remove(waiter)
        waiter.want = 0
        self.grant()
        if self.gate is not None:
            self.gate.refill()
