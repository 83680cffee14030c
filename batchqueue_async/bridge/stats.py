"""What a bridge tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeStats:
    """A bridge at one moment.

    Example:
        >>> import batchqueue_async as bq
        >>> with bq.SyncBridge() as bridge:
        ...     lines = bridge.get_or_create("lines", bq.QueueConfig())
        ...     bridge.peek().running, bridge.peek().queues
        (True, ('lines',))

    Attributes:
        name: the bridge's name.
        running: whether its loop runs: from the first call that needs it until it is closed.
        closed: whether it takes no calls any more.
        queues: the names of its manager's queues.
    """

    name: str
    running: bool
    closed: bool
    queues: tuple[str, ...]
