"""Numbers as people read them: durations, counts and sizes in the sentences about a process. Pure."""

from __future__ import annotations

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))
_MOST_SECONDS = 60


def duration(seconds: float) -> str:
    """Seconds as a duration.

    Example:
        >>> duration(0.25), duration(4), duration(240), duration(11_400), duration(300_000)
        ('0.2 s', '4 s', '4 min', '3 h 10 min', '3 d 11 h')
    """
    if seconds < _MOST_SECONDS:
        return f"{seconds:.1f} s" if seconds < 1 else f"{seconds:.0f} s"
    for place, (length, unit) in enumerate(_UNITS):
        if seconds >= length:
            whole, rest = divmod(int(seconds), length)
            text = f"{whole} {unit}"
            if place + 1 < len(_UNITS):
                smaller, name = _UNITS[place + 1]
                if more := rest // smaller:
                    text += f" {more} {name}"
            return text
    raise AssertionError("a duration of a minute or more has a unit")  # pragma: no cover


def number(value: float) -> str:
    """A count or a rate with three digits at most, or with thousands separated.

    Example:
        >>> number(0), number(0.25), number(12), number(9_999), number(12_300), number(1_240_000)
        ('0', '0.2', '12', '9,999', '12,300', '1.2 M')
    """
    if value >= 1_000_000:  # noqa: PLR2004 - a million
        return f"{value / 1_000_000:.1f} M"
    return f"{value:.1f}" if 0 < value < 10 and value != int(value) else f"{value:,.0f}"  # noqa: PLR2004 - one digit


def count(value: int, thing: str) -> str:
    """A number of things.

    Example:
        >>> count(1, "record"), count(1_200_000, "record")
        ('1 record', '1.2 M records')
    """
    return f"{number(value)} {thing}" if value == 1 else f"{number(value)} {thing}s"


def size(value: float) -> str:
    """Bytes in binary units.

    Example:
        >>> size(512), size(1_536), size(5 * 2**30)
        ('512 B', '1.5 KiB', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - binary
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
