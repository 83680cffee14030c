"""Times and sizes as texts: "250ms", "1h30m", "16MiB". What is kept is the number, in seconds or bytes."""

from __future__ import annotations

import re
from decimal import Decimal

# Nobody writes a number as a longer text, and parsing it would cost time.
_LONGEST_TEXT = 40
_SECONDS = {
    "d": Decimal(86_400),
    "h": Decimal(3_600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
    "us": Decimal("0.000001"),
}
_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?)"
_DURATION = re.compile(rf"({_NUMBER})\s*(d|h|ms|us|m|s)\s*")
_SIZE = re.compile(rf"(?P<number>{_NUMBER})\s*(?:(?P<power>[kmgt])(?P<binary>i?))?b?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_seconds(text: str) -> float | None:
    """The seconds that a text with units stands for, from days to microseconds; None when it is not such a text.

    Example:
        >>> parse_seconds("250ms"), parse_seconds("1h30m"), parse_seconds("0.05")
        (0.25, 5400.0, None)
    """
    rest = text.strip()
    if not rest or len(rest) > _LONGEST_TEXT:
        return None
    total = Decimal(0)
    smallest = Decimal("Infinity")
    while rest:
        part = _DURATION.match(rest)
        # Each unit is smaller than the one before it, so that "5s1h" and "1m1m" are not taken for what they may mean.
        if part is None or _SECONDS[part[2]] >= smallest:
            return None
        smallest = _SECONDS[part[2]]
        total += Decimal(part[1]) * smallest
        rest = rest[part.end() :]
    return float(total)


def parse_bytes(text: str) -> int | None:
    """The bytes that a text with a unit stands for; None when it is not such a text, or not a whole number of bytes.

    `KiB` and `Ki` are powers of 1,024, `kB` and `k` powers of 1,000; capitals or not.

    Example:
        >>> parse_bytes("16MiB"), parse_bytes("512Mi"), parse_bytes("2 GB"), parse_bytes("100")
        (16777216, 536870912, 2000000000, None)
    """
    size = _SIZE.fullmatch(text.strip()) if len(text) <= _LONGEST_TEXT else None
    if size is None or not text.strip()[-1].isalpha():
        return None
    factor = (1_024 if size["binary"] else 1_000) ** _POWERS[size["power"].lower()] if size["power"] else 1
    total = Decimal(size["number"]) * factor
    return int(total) if total == int(total) else None
