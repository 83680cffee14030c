"""The one set of rules for configuration fields: of queues, durable queues, exporters and all policies.

A configuration class has a table with a rule per field. A `Rule` reads what may stand for a value (a text with a unit,
a word in a file) and finds what is wrong with one. A `Checkup` applies the table to a whole object, collects what the
rules between fields find, and raises one `ConfigError` that names every fault.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, cast

from batchqueue_async._support import units
from batchqueue_async._support.handlers import error_handler_problem, function_problem, handler_problem
from batchqueue_async._support.wording import clip, nearest, short
from batchqueue_async.errors import ConfigError, ConfigFault

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

Layer = Literal["code", "file", "environment"]
"""Where a value comes from. In the environment every value is a text."""

MOST_ITEMS = 10**12
MOST_BYTES = 1 << 60
# About 30 years. Beyond some centuries, event loops and locks raise OverflowError.
MOST_SECONDS = 1e9
_MOST_NUMBER = 1e9

_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_REAL = re.compile(r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?|[+-]?inf|nan")

Read_co = TypeVar("Read_co", covariant=True)
Given_contra = TypeVar("Given_contra", contravariant=True)

if TYPE_CHECKING:

    class Settable(Generic[Read_co, Given_contra]):
        """For type checkers: a field that is given as one type and read as another, such as "250ms" and 0.25.

        At run time it is a plain field; `settle` converts its value when the object is made.
        """

        def __get__(self, owner: object, kind: Any = None) -> Read_co: ...
        def __set__(self, owner: object, value: Given_contra) -> None: ...
else:

    class Settable(Generic[Read_co, Given_contra]):
        """A field that is given as one type and read as another."""


Duration = Settable[float, float | str]
OptionalDuration = Settable[float | None, float | str | None]
Size = Settable[int, int | str]
OptionalSize = Settable[int | None, int | str | None]


def default(value: Any) -> Any:
    """The default of a `Settable` field."""
    return value


class Problem(NamedTuple):
    """What is wrong with a value: the broken rule, and the way out.

    Attributes:
        path: the way to the part of the value that is wrong, such as ".policy"; "" for the value itself.
        value: that part, as text; None if it is the value itself, "" if it must not be shown.
        origin: where that part was set; None if that is where the value itself was set.
    """

    rule: str
    way_out: str
    path: str = ""
    value: str | None = None
    origin: str | None = None


class UnreadableError(Exception):
    """A value that can't be read as what its field holds."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a field may hold.

    Attributes:
        optional: whether it may be None.
    """

    optional: bool = False

    def settle(self, value: Any) -> Any:
        """What is stored for a value given in code, such as the number for "250ms"; the value itself if not known."""
        return value

    def read(self, value: Any, layer: Layer) -> Any:  # noqa: ARG002 - for the rules whose texts depend on the layer
        """The value that something in a file, variable or override stands for.

        Raises:
            UnreadableError: it does not stand for one.
        """
        return self.settle(value)

    def problems(self, name: str, value: Any) -> Iterator[Problem]:
        """What is wrong with a value of the field `name`."""
        if not (value is None and self.optional):
            yield from self.judge(name, value)

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """The same, for a value that is not None if the field is optional."""
        raise NotImplementedError

    def _or_none(self) -> str:
        return ", or None" if self.optional else ""


# -- numbers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Rule):
    """A whole number from `least` to `most`."""

    least: int = 1
    most: int = MOST_ITEMS

    def read(self, value: Any, layer: Layer) -> Any:
        """The number; in the environment it is a text of digits."""
        if layer == "environment" and isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            return int(value)
        return self.settle(value)

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is an int within its bounds, and not a bool."""
        if not isinstance(value, int) or isinstance(value, bool):
            yield self.mistaken()
        elif value < self.least:
            yield Problem(f"is below {self.least}", f"set {name} to {self.least} or more{self._or_none()}")
        elif value > self.most:
            yield Problem(f"is above {self.most:_}", f"set {name} to that or less{self._or_none()}")

    def mistaken(self) -> Problem:
        """The problem with a value that is not an int."""
        return Problem("is not a whole number", f"give an int of {self.least} or more{self._or_none()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes(Whole):
    """A number of bytes, which may be given as a text such as "16MiB"."""

    most: int = MOST_BYTES

    def settle(self, value: Any) -> Any:
        """The bytes of a text with a unit."""
        size = units.parse_bytes(value) if isinstance(value, str) else None
        return value if size is None else size

    def mistaken(self) -> Problem:
        """The problem with a value that is neither an int nor such a text."""
        way_out = f"give an int of {self.least} or more, or a text such as '16MiB'{self._or_none()}"
        return Problem("is not a whole number of bytes", way_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Real(Rule):
    """A finite number from `least` (or above it) to `most`."""

    least: float = 0.0
    above: bool = True
    most: float = _MOST_NUMBER

    def read(self, value: Any, layer: Layer) -> Any:
        """The number; in the environment it is a text."""
        if layer == "environment" and isinstance(value, str) and _REAL.fullmatch(value.strip()):
            return float(value)
        settled = self.settle(value)
        whole = isinstance(settled, int) and not isinstance(settled, bool)
        return float(settled) if whole and abs(settled) <= self.most else settled

    def judge(self, name: str, value: Any) -> Iterator[Problem]:
        """It is a number within its bounds, finite, and not a bool."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            yield self.mistaken()
        elif value < self.least:
            yield Problem(f"is below {self.least:g}", self._way_out(name))
        elif value == self.least and self.above:
            yield Problem(f"is not above {self.least:g}", self._way_out(name))
        elif value > self.most:
            yield Problem(f"is above {self.most:g}", f"set {name} to that or less{self._or_none()}")

    def mistaken(self) -> Problem:
        """The problem with a value that is not a number."""
        return Problem("is not a finite number", f"give a number {self._range()}{self._or_none()}")

    def _range(self) -> str:
        return f"above {self.least:g}" if self.above else f"of {self.least:g} or more"

    def _way_out(self, name: str) -> str:
        number = "a positive number" if self.above and self.least == 0 else f"a number {self._range()}"
        return f"set {name} to {number}{self._or_none()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds(Real):
    """A number of seconds, which may be given as a text such as "250ms"."""

    most: float = MOST_SECONDS

    def settle(self, value: Any) -> Any:
        """The seconds of a text with units."""
        seconds = units.parse_seconds(value) if isinstance(value, str) else None
        return value if seconds is None else seconds

    def mistaken(self) -> Problem:
        """The problem with a value that is neither a number nor such a text."""
        way_out = f"give seconds as a float, or a text such as '250ms'{self._or_none()}"
        return Problem("is not a finite number of seconds", way_out)


def is_count(value: Any, most: int) -> bool:
    """Whether a value is an int from 1 to `most`, so that a message can use it in an example."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


# -- words, objects, functions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Rule):
    """True or False."""

    def read(self, value: Any, layer: Layer) -> Any:
        """The flag; in the environment it is a word."""
        words = {"true": True, "false": False}
        return words.get(value.strip().lower(), value) if layer == "environment" and isinstance(value, str) else value

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """It is a bool."""
        if not isinstance(value, bool):
            yield Problem("is not True or False", "give one of the two")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Rule):
    """One of some words."""

    words: tuple[str, ...]

    def read(self, value: Any, layer: Layer) -> Any:  # noqa: ARG002 - a rule's signature
        """The word, in capitals or not."""
        return value.lower() if isinstance(value, str) and value.lower() in self.words else value

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """It is one of them."""
        if isinstance(value, str) and value in self.words:
            return
        hint = nearest(value, self.words) if isinstance(value, str) else ""
        guess = f"{hint} or " if hint.startswith("did") else ""
        yield Problem("is unknown", f"{guess}choose one of {', '.join(self.words)}{self._or_none()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Rule):
    """An object of a class.

    Attributes:
        example: how to make one; or a function from a wrong value to the call that was probably meant.
    """

    wanted: type
    example: str | Callable[[Any], str] = ""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """It is an object of the class."""
        if isinstance(value, self.wanted):
            return
        noun = f"a {self.wanted.__name__}"
        if getattr(value, "__self__", None) is self.wanted:
            way_out = f"call it: {self.wanted.__name__}.{value.__name__}(...)"
        else:
            example = self.example if isinstance(self.example, str) else self.example(value)
            way_out = f"give {example or noun}"
        yield Problem(f"is not {noun}", f"{way_out}{' or None' if self.optional else ''}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Rule):
    """A function of these parameters.

    Attributes:
        parameters: the names of the positional arguments, for messages.
        may_be_async: whether the caller awaits an awaitable result.
        may_be_class: whether a class is acceptable, as a function that makes objects.
    """

    parameters: tuple[str, ...]
    may_be_async: bool = False
    may_be_class: bool = False

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """It is callable with that many arguments, and not async unless it may be."""
        unfit = function_problem(value, self.parameters, may_be_async=self.may_be_async, may_be_class=self.may_be_class)
        if unfit is not None:
            yield Problem(*unfit)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerRule(Rule):
    """What takes batches."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """It is an async callable of one batch, or an object with such a `consume`."""
        unfit = handler_problem(value)
        if unfit is not None:
            yield Problem(*unfit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorHandlerRule(Rule):
    """What takes failed batches."""

    def judge(self, name: str, value: Any) -> Iterator[Problem]:  # noqa: ARG002 - a rule's signature
        """It is a function of batch and error."""
        unfit = error_handler_problem(value)
        if unfit is not None:
            yield Problem(*unfit)


# -- whole objects -----------------------------------------------------------------------------------------------------


def settle(owner: object, rules: Mapping[str, Rule]) -> None:
    """Replace the values that a new object was given by those that are stored."""
    for name, rule in rules.items():
        value = getattr(owner, name)
        settled = rule.settle(value)
        if settled is not value:
            object.__setattr__(owner, name, settled)


class Checkup:
    """All that is wrong with one object's fields.

    Rules between fields look only at fields that are `sound`: a text where a number belongs is one fault, not two.

    Attributes:
        faults: what was found so far.
    """

    def __init__(
        self,
        subject: str,
        owner: object,
        rules: Mapping[str, Rule],
        *,
        origins: Mapping[str, str] | None = None,
        shown: Mapping[str, Any] | None = None,
        unreadable: Mapping[str, Collection[Problem]] | None = None,
        doubtful: Collection[str] = (),
    ) -> None:
        """Check every field by its rule.

        Args:
            subject: whose fields they are, as messages begin: "queue 'spans'".
            owner: the object.
            rules: by field.
            origins: where fields were set, if not in code.
            shown: field values as they were written, if the object holds something else.
            unreadable: what is wrong with fields that could not be read, so that the object does not hold them.
            doubtful: fields that were probably meant to be set and are not, so that rules between fields skip them.
        """
        self._subject = subject
        self._owner = owner
        self._origins = origins or {}
        self._shown = shown or {}
        self._broken = set(doubtful)
        self.faults: list[ConfigFault] = []
        known = unreadable or {}
        for name, rule in rules.items():
            problems = known[name] if name in known else rule.problems(name, getattr(owner, name))
            for problem in problems:
                self._broken.add(name)
                self._add(name, problem, (name,))

    def sound(self, *names: str) -> bool:
        """Whether no fault was found in any of these fields."""
        return self._broken.isdisjoint(names)

    def fault(self, name: str, rule: str, way_out: str, *, besides: tuple[str, ...] = ()) -> None:
        """Add a fault that a rule between fields found: the field to change, and the others that are involved."""
        self._add(name, Problem(rule, way_out), (name, *besides))

    def finish(self) -> None:
        """Raise `ConfigError` if anything is wrong."""
        refuse(self.faults)

    def _add(self, name: str, problem: Problem, about: tuple[str, ...]) -> None:
        value = problem.value
        if value is None:
            value = short(self._shown[name] if name in self._shown else getattr(self._owner, name))
        origin = " and ".join(dict.fromkeys(self._origins[each] for each in about if each in self._origins))
        self.faults.append(
            ConfigFault(
                path=name + problem.path,
                value=value or None,
                rule=problem.rule,
                way_out=problem.way_out,
                owner=self._subject,
                origin=problem.origin or origin or None,
            )
        )


C = TypeVar("C")


def named_fields(kind: type[C]) -> type[C]:
    """Class decorator for a configuration: the error for an unknown field names the one that was probably meant."""
    make: Any = kind.__init__
    known = [field.name for field in fields(cast("Any", kind)) if not field.name.startswith("_")]

    @functools.wraps(make)
    def __init__(self: object, *values: Any, **named: Any) -> None:  # noqa: N807 - it takes the place of one
        try:
            make(self, *values, **named)
        except TypeError:
            unknown = [name for name in named if name not in known and not name.startswith("_")]
            if not unknown:
                raise
            raise UnknownFieldError.of(
                ConfigFault(
                    owner=kind.__name__, path=clip(name), rule="is not a field of it", way_out=nearest(name, known)
                )
                for name in unknown
            ) from None

    kind.__init__ = __init__  # type: ignore[method-assign]
    return kind


class UnknownFieldError(ConfigError, TypeError):
    """A configuration was made with a field that it does not have; a TypeError too, like any unexpected argument."""


def refuse(faults: Iterable[ConfigFault]) -> None:
    """Raise one `ConfigError` for all faults, if there are any."""
    found = list(faults)
    if found:
        raise ConfigError.of(found)


def require(subject: str, name: str, value: Any, rule: Rule) -> None:
    """Raise `ConfigError` if an argument breaks its rule."""
    refuse(faults_of(subject, name, value, rule))


def faults_of(subject: str, name: str, value: Any, rule: Rule) -> list[ConfigFault]:
    """What is wrong with one argument."""
    return [
        ConfigFault(
            path=name + problem.path,
            value=short(value) if problem.value is None else problem.value or None,
            rule=problem.rule,
            way_out=problem.way_out,
            owner=subject,
        )
        for problem in rule.problems(name, value)
    ]


def check_timeout(subject: str, timeout: object, *, name: str = "timeout") -> None:
    """Refuse what is not a number of seconds before anything is begun: the one rule for every call with a timeout.

    An int or float from 0 on, where infinity is as good as a very long time; None is the call's default.

    Raises:
        ConfigError: it is something else. A NaN would wait for ever, and a text be compared with numbers.
    """
    if timeout is None:
        return
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout != timeout:  # noqa: PLR0124 - a NaN
        rule = "is not a number of seconds"
    elif timeout < 0:
        rule = "is below 0"
    else:
        return
    way_out = f"pass seconds such as {name}=5.0, 0 to wait for nothing, or None for the default"
    refuse([ConfigFault(path=name, value=short(timeout), rule=rule, way_out=way_out, owner=subject)])
