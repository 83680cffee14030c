"""The tables that a SQL text reads, as far as its words say so; Spark's own analysis has the last word later."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
      (?P<skip>\s+|--[^\n]*|/\*.*?\*/)
    | (?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
    | (?P<quoted>`(?:[^`]|``)+`)
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
# In these, FROM stands between arguments.
_FUNCTIONS = {"extract", "trim", "substring", "substr", "overlay", "position"}
_ENDS = {
    "where",
    "group",
    "order",
    "having",
    "limit",
    "union",
    "intersect",
    "except",
    "window",
    "lateral",
    "select",
    "on",
}


def table_names(sql: str) -> list[str]:
    """The tables that a query reads, each once, without those that it defines by WITH, and without table functions.

    Example:
        >>> table_names("WITH a AS (SELECT 1 FROM calls) SELECT trim(BOTH 'x' FROM name) FROM a JOIN `users` u, t")
        ['calls', 'users', 't']
    """
    tokens = [_plain(match) for match in _TOKEN.finditer(sql) if match.lastgroup != "skip"]
    words = [token.lower() for token in tokens]
    return list(dict.fromkeys(name for name in _names(tokens, words) if name.lower() not in _defined(words)))


def _plain(match: re.Match[str]) -> str:
    return match[0][1:-1].replace("``", "`") if match.lastgroup == "quoted" else match[0]


def _defined(words: list[str]) -> set[str]:
    """The names of WITH; a name, maybe its columns, AS, and a parenthesis."""
    return {
        words[at - 1]
        for at in range(1, len(words) - 1)
        if words[at] == "as" and words[at + 1] == "(" and "with" in words
    }


def _names(tokens: list[str], words: list[str]) -> list[str]:
    found: list[str] = []
    callers: list[str] = []
    for at, word in enumerate(words):
        if word == "(":
            callers.append(words[at - 1] if at else "")
        elif word == ")" and callers:
            callers.pop()
        elif word == "join" or (word == "from" and not _is_argument(words, at, callers)):
            found += _listed(tokens, words, at + 1)
    return found


def _is_argument(words: list[str], at: int, callers: list[str]) -> bool:
    is_compared = at >= 2 and words[at - 1] == "distinct" and words[at - 2] in {"is", "not"}  # noqa: PLR2004 - two words back
    return is_compared or (bool(callers) and callers[-1] in _FUNCTIONS)


def _listed(tokens: list[str], words: list[str], at: int) -> list[str]:
    """The tables that stand behind FROM or JOIN, with commas between them."""
    found: list[str] = []
    while at < len(tokens):
        if words[at] in {"lateral", "stream"}:
            at += 1
            continue
        name, end = _dotted(tokens, at)
        is_function = end < len(tokens) and tokens[end] == "("
        if name and not is_function and words[at] not in {"values", "select"}:
            found.append(name)
        at = end
        depth = 0
        while at < len(tokens) and not (depth == 0 and (tokens[at] in {",", ")"} or words[at] in {"join", *_ENDS})):
            depth += {"(": 1, ")": -1}.get(tokens[at], 0)
            at += 1
        if at >= len(tokens) or tokens[at] != ",":
            break
        at += 1
    return found


def _dotted(tokens: list[str], at: int) -> tuple[str, int]:
    parts: list[str] = []
    while at < len(tokens) and re.fullmatch(r"\w[\w ]*", tokens[at]):
        parts.append(tokens[at])
        at += 1
        if at >= len(tokens) or tokens[at] != ".":
            break
        at += 1
    return ".".join(parts), at
