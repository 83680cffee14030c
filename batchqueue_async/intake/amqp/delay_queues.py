"""The queues in which messages wait for their next attempt: one per delay, as a long one must not block a short one.

A message in a queue with a time to live leaves it from the head alone, so messages of different delays need queues of
their own. Delays are rounded up to powers of two seconds, which keeps the queues few; each leads back to the consumer's
queue through the default exchange, and expires some time after it was used last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_LONGEST = 2**21  # seconds, 24 days: a time to live has 32 bits of milliseconds
_SPARE = 600  # seconds that an unused queue stays longer than the messages in it
DECLARED_FOR = 240.0
"""Seconds after which a queue is declared anew before it is used: declaring keeps it from expiring."""


class DelayQueue(NamedTuple):
    """A queue that messages wait in.

    Attributes:
        name: what it is called.
        seconds: how long messages wait in it.
        arguments: what it is declared with.
    """

    name: str
    seconds: int
    arguments: dict[str, Any]


def delay_queue(queue: str, delay: float) -> DelayQueue:
    """The queue for messages of `queue` that wait at least `delay` seconds.

    Example:
        >>> delay_queue("orders", 5.5).name
        'orders.retry.8'
    """
    seconds = min(1 << max(0, _whole(delay) - 1).bit_length(), _LONGEST)
    arguments = {
        "x-message-ttl": seconds * 1000,
        # A queue expires with the messages in it, so it stays longer than any that came in since it was declared.
        "x-expires": min((seconds + _SPARE) * 1000, 2**32 - 1),
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": queue,
    }
    return DelayQueue(f"{queue}.retry.{seconds}", seconds, arguments)


def _whole(delay: float) -> int:
    """Seconds, rounded up, from 1."""
    return max(1, min(int(-(-delay // 1)), _LONGEST))
