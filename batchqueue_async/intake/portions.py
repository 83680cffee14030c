"""How many messages to ask for, where a broker can't be asked for bytes: by the size that messages have had. Pure."""

from __future__ import annotations

# What a message is taken for before the first has come.
GUESS = 16 * 1024


class Portion:
    """The number of messages that should fit into a number of bytes.

    What counts is the average of the last messages, or of the newest ones where those are larger: a bound is passed by
    little when sizes grow, and is not used up at once when they shrink.

    Example:
        >>> portion = Portion(guess=100)
        >>> portion.most(50, 1_000)
        10
        >>> portion.took(4, 2_000)
        >>> portion.most(50, 1_000), portion.most(50, 100), portion.most(50, 1_000_000)
        (2, 1, 50)
    """

    __slots__ = ("_average", "_known")

    def __init__(self, guess: float = GUESS) -> None:
        """Begin with a guess at the size of a message, until the first is known."""
        self._average = guess
        self._known = False

    def took(self, count: int, size: int) -> None:
        """A number of messages have come, of this size together."""
        if count:
            average = size / count
            self._average = max(average, (self._average * 3 + average) / 4) if self._known else average
            self._known = True

    def most(self, messages: int, size: int) -> int:
        """How many to ask for within these bounds; always at least one."""
        if self._average:
            messages = min(messages, int(size / self._average))
        return max(1, messages)
