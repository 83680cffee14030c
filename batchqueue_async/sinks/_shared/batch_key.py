"""One idempotency key for a batch, for destinations that take a batch as one request. Pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def batch_key(keys: Sequence[str]) -> str:
    """One key for a batch: the same for the same records in the same order, and for no others.

    Example:
        >>> batch_key(["q/1", "q/2"]) == batch_key(["q/1", "q/2"]) != batch_key(["q/1"])
        True
    """
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:32]
