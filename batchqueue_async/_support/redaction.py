"""What may be shown of a text that the library did not write: without credentials, or without payloads.

An error's text is the user's: it may quote an item. `without_payload` keeps the words that say what happened, and
hides what could be data: quoted stretches, numbers, addresses, anything that is not a plain word.
"""

from __future__ import annotations

import re

HIDDEN = "***"
"""What stands for a secret in text."""

LONGEST = 200
"""Characters of an error's text that are kept."""

_USERINFO = re.compile(r"(?<=://)(?P<user>[^/?#@:]*):[^/?#]*(?=@)")
_SETTING = re.compile(
    r"(?P<name>\b(?:password|passwd|pwd|sslpassword|token|secret|api_?key|access_key)\s*=\s*)"
    r"(?:'(?:\\.|[^'\\])*'|[^&\s#'\"]+)",
    re.IGNORECASE,
)
_DATA = re.compile(
    r"""
      (?<!\w)(["'`])(?:.*\1|.*)         # from the first quote to the last one, or to the end: an apostrophe amid a
                                         # word opens none, and one amid a quotation closes none
    | [\[{<].*                           # a list, a mapping or a repr: everything from there on
    | (?<==)\S+                          # what stands behind an equals sign
    | \S*[^\W_]*[\d@\\/_]\S*             # what holds a digit, or is an address, a path or a name
    | \b[^\W\d_]{25,}\b                  # no word is that long
    """,
    re.VERBOSE | re.DOTALL,
)


def without_credentials(text: str) -> str:
    """A text without the passwords in the URLs and settings that it holds.

    Example:
        >>> without_credentials("postgresql://app:s3cret@db/app?sslmode=verify-full")
        'postgresql://app:***@db/app?sslmode=verify-full'
        >>> without_credentials("host=db password=s3cret")
        'host=db password=***'
    """
    text = _USERINFO.sub(rf"\g<user>:{HIDDEN}", text)
    return _SETTING.sub(rf"\g<name>{HIDDEN}", text)


def without_payload(text: str) -> str:
    """The plain words of an error's text, the rest hidden; one line, at most `LONGEST` characters.

    Example:
        >>> without_payload("duplicate key value violates constraint 'orders_pkey' on 17")
        'duplicate key value violates constraint *** on ***'
        >>> without_payload("cannot write {'card': 4111}")
        'cannot write ***'
    """
    # Cut first: the patterns then have a bounded text, no matter what was raised.
    words = _DATA.sub(HIDDEN, without_credentials(text[: 2 * LONGEST]))
    return shortened(" ".join(words.split()))


def shortened(text: str) -> str:
    """At most `LONGEST` characters of a text.

    Example:
        >>> len(shortened("a" * 1_000))
        200
    """
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
