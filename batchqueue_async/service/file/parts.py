"""The shapes that sinks, sources, queues and exporters have in common: policies, TLS, credentials, and their texts."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any

from batchqueue_async._support.checks import Bytes, Choice, Flag, Rule, Seconds, Whole
from batchqueue_async.export import policies
from batchqueue_async.service.file.rules import SecretText, Text, TextMap, Texts, Wholes
from batchqueue_async.service.file.shapes import Field, Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_ENTRY = re.compile(r"^ {4}(?P<name>[a-z_0-9]+): (?P<text>.*(?:\n {8}.*)*)", re.MULTILINE)


def texts_in(documentation: str | None) -> dict[str, str]:
    r"""What a docstring says of attributes or arguments, by name, each on one line.

    Example:
        >>> texts_in("A row.\n\nAttributes:\n    id: its number,\n        from 1 on.\n")
        {'id': 'its number, from 1 on.'}
    """
    whole = inspect.cleandoc(documentation or "")
    section = re.search(r"^(?:Attributes|Args):\n(?P<body>(?: {4}.*\n?|\n)+)", whole, re.MULTILINE)
    found = _ENTRY.finditer(section["body"] if section else "")
    return {each["name"]: " ".join(each["text"].split()) for each in found}


def fields_of(
    kind: type, rules: Mapping[str, Any], *, live: Collection[str] = (), without: Collection[str] = (), **others: Any
) -> dict[str, Field]:
    """The fields of a configuration class, by its rules.

    Args:
        kind: the class, a dataclass.
        rules: by field.
        live: the fields that a reload can change.
        without: fields that a file has not.
        others: rules or shapes in the place of those in `rules`.
    """
    texts = texts_in(kind.__doc__)
    defaults = {each.name: None if each.default is MISSING else each.default for each in fields(kind)}
    return {
        name: Field(of=others.get(name, rule), default=defaults.get(name), text=texts.get(name, ""), live=name in live)
        for name, rule in rules.items()
        if name not in without
    }


def _policy(kind: type, rules: Mapping[str, Rule], what: str, *, optional: bool = False, **others: Any) -> Struct:
    """A policy as a mapping of its fields."""
    return Struct(fields=fields_of(kind, rules, **others), make=kind, what=what, optional=optional)


def make_policies(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, with the policies among them as objects."""
    return {
        name: _POLICIES[name](**value) if isinstance(value, dict) and name in _POLICIES else value
        for name, value in values.items()
    }


def _retry(**values: Any) -> policies.RetryPolicy:
    return policies.RetryPolicy(**make_policies(values))


# What makes the object that a mapping of this name stands for.
_POLICIES: dict[str, Callable[..., Any]] = {
    "batch": policies.BatchPolicy,
    "retry": _retry,
    "reconnect": _retry,
    "budget": policies.RetryBudget,
    "breaker": policies.BreakerPolicy,
    "rate": policies.RatePolicy,
    "adaptive": policies.AdaptivePolicy,
    "split": policies.SplitPolicy,
    "failover": policies.FailoverPolicy,
}


def _most_records(value: Any) -> dict[str, Any] | None:
    """A whole number stands for a batch policy with that limit alone."""
    return {"max_records": value} if isinstance(value, int) and not isinstance(value, bool) else None


BATCH = replace(_policy(policies.BatchPolicy, policies.BATCH_RULES, "batch policy"), shorthand=_most_records)
OPTIONAL_BATCH = replace(BATCH, optional=True)
BUDGET = _policy(policies.RetryBudget, policies.BUDGET_RULES, "retry budget", optional=True)
RETRY = replace(_policy(policies.RetryPolicy, policies.RETRY_RULES, "retry policy", budget=BUDGET), make=_retry)
BREAKER = _policy(policies.BreakerPolicy, policies.BREAKER_RULES, "breaker policy")
RATE = _policy(policies.RatePolicy, policies.RATE_RULES, "rate policy")
ADAPTIVE = _policy(policies.AdaptivePolicy, policies.ADAPTIVE_RULES, "adaptive policy", optional=True)
SPLIT = _policy(policies.SplitPolicy, policies.SPLIT_RULES, "split policy", optional=True, without=("prepare",))
FAILOVER = _policy(policies.FailoverPolicy, policies.FAILOVER_RULES, "failover policy", optional=True)


def _tls(value: Any) -> dict[str, Any] | None:
    return {} if value is True else None


TLS = Struct(
    fields={
        "ca": Field(of=Text(), text="a file with the certificates to trust; the system's without"),
        "cert": Field(of=Text(), text="a file with our certificate"),
        "key": Field(of=Text(), text="a file with its key"),
        "key_password": Field(of=SecretText(), text="the key's password, as env:NAME or file:/path"),
        "verify": Field(of=Flag(), default=True, text="whether the server's certificate is verified"),
        "server_name": Field(of=Text(), text="the name that the server's certificate must have"),
    },
    what="tls section",
    shorthand=_tls,
    optional=True,
)
OAUTH2 = Struct(
    fields={
        "url": Field(of=Text(), needed=True, text="where tokens are issued"),
        "client_id": Field(of=Text(), needed=True, text="who asks"),
        "client_secret": Field(of=SecretText(), needed=True, text="its secret, as env:NAME or file:/path"),
        "scope": Field(of=Text(), text="what is asked for, with spaces in between"),
        "parameters": Field(of=TextMap(), text="more fields of the request, such as audience"),
    },
    what="oauth2 section",
    optional=True,
)

TEXT = Field(of=Text())
NEEDED = Field(of=Text(), needed=True)
TEXTS = Field(of=Texts())
SECRET = Field(of=SecretText())
MAP = Field(of=TextMap())
WHOLE = Field(of=Whole())
BYTES = Field(of=Bytes())
SECONDS = Field(of=Seconds())
FLAG = Field(of=Flag())
WHOLES = Field(of=Wholes())


def choice(*words: str, optional: bool = False) -> Field:
    """A field that is one of some words."""
    return Field(of=Choice(words=words, optional=optional))


LOGIN: dict[str, Field] = {"user": TEXT, "password": SECRET, "tls": Field(of=TLS)}
