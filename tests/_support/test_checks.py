"""Units, wording and the rules of fields, each for itself."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import batchqueue_async as bq
from batchqueue_async._support import checks, handlers, units, wording

if TYPE_CHECKING:
    import asyncio

# -- units -------------------------------------------------------------------------------------------------------------

SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1, "ms": Fraction(1, 1_000), "us": Fraction(1, 1_000_000)}
KIBI = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
KILO = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("50 ms", 0.05),
        (" 1h30m ", 5400.0),
        ("1d 2h 3m 4s 5ms 6us", 93784.005006),
        ("0s", 0.0),
        ("1.5s", 1.5),
        ("7us", 0.000007),
        ("3ms", 0.003),
        *(
            (text, None)
            for text in ("", "s", "5", "0.05", "-5s", "5 S", "1e3s", "5s1h", "1m1m", "1h30", "1,5s", "5 miles")
        ),
        ("1s" * 100, None),
        ("٣s", None),
        ("9" * 50 + "s", None),
    ],
)
def test_texts_of_times(text, seconds):
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16MiB", 16 * 2**20),
        ("512Mi", 512 * 2**20),
        ("2 gib", 2 * 2**30),
        ("1.5KiB", 1_536),
        ("16MB", 16_000_000),
        ("3k", 3_000),
        ("0B", 0),
        ("7b", 7),
        ("1TiB", 2**40),
        *(
            (text, None)
            for text in ("", "B", "5", "0.05", "-5MB", "1.5B", "0.0001k", "5iB", "5PB", "1e3k", "16 MBit", "٣B")
        ),
        ("9" * 50 + "B", None),
    ],
)
def test_texts_of_sizes(text, size):
    assert units.parse_bytes(text) == size


@given(st.integers(0, 10**6), st.sampled_from(list(SECONDS)))
def test_a_whole_number_of_a_unit_is_read_as_exactly_as_a_float_can_be(number, unit):
    assert units.parse_seconds(f"{number}{unit}") == float(number * SECONDS[unit])


@given(st.integers(0, 10**6), st.sampled_from(list(KIBI)), st.sampled_from(["B", ""]))
def test_powers_of_1024_and_of_1000(number, power, byte):
    if power:
        assert units.parse_bytes(f"{number}{power}i{byte}") == number * KIBI[power]
    decimal = power.lower() if power == "K" else power
    if decimal or byte:
        assert units.parse_bytes(f"{number}{decimal}{byte}") == number * KILO[decimal]


@given(st.text(max_size=50) | st.text("0123456789.dhmsukMGTiB ", max_size=45))
@example("\n5s\n")
def test_any_text_is_a_number_or_none(text):
    seconds, size = units.parse_seconds(text), units.parse_bytes(text)
    assert seconds is None or (type(seconds) is float and math.isfinite(seconds) and seconds >= 0)
    assert size is None or (type(size) is int and size >= 0)


# -- wording -----------------------------------------------------------------------------------------------------------


class Settings:
    def __repr__(self):
        return "Settings(password='hunter2')"


class Broken:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (True, "True"),
        (None, "None"),
        pytest.param(10**5_000, "<int of 16610 bits>", id="huge"),
        ("many", "'many'"),
        ("x" * 100, "'xxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxx'"),
        ("postgres://app:hunter2@db/shop", "<text of 30 characters>"),
        ("eyJhbGciOiJIUzI1NiIsInR5cCI6", "<text of 28 characters>"),
        ("-----BEGIN PRIVATE KEY-----", "<text of 27 characters>"),
        ("my-secret", "<text of 9 characters>"),
        ({"name": "x", "password": "hunter2"}, "{'name': 'x', 'password': <hidden>}"),
        ([{"api_key": ["hunter2"]}], "[{'api_key': <hidden>}]"),
        (b"hunter2", "<7 bytes>"),
        (Settings(), "<Settings object>"),
        ([Settings()], "[<Settings object>]"),
        (len, "len"),
        (Settings, "Settings"),
        ([].append, "append"),
        (lambda: None, "<lambda>"),
        (list(range(1_000)), "[0, 1, 2, 3, 4, 5, ...]"),
    ],
)
def test_values_in_messages_are_short_and_no_secrets(value, shown):
    assert wording.short(value) == shown


def test_a_value_that_can_not_be_shown_is_named_by_its_class():
    assert wording.short(Broken()).startswith("<Broken instance at ")


plain = st.none() | st.integers() | st.text(max_size=60)
nested = plain | st.lists(plain, max_size=9) | st.dictionaries(plain, plain, max_size=9)


@given(nested | st.lists(nested, max_size=9) | st.dictionaries(plain, nested, max_size=9))
def test_any_value_is_shown_on_one_line_of_some_hundred_characters(value):
    shown = wording.short(value)
    assert shown.isprintable()
    assert len(shown) <= 160


def test_names_are_clipped_and_stay_on_their_line():
    assert wording.clip("max_batch") == "max_batch"
    assert wording.clip("two\nlines") == r"'two\nlines'"
    assert len(wording.clip("x" * 1_000)) == 80


# -- rules -------------------------------------------------------------------------------------------------------------

RULES = [
    checks.Whole(),
    checks.Whole(optional=True, least=0, most=5),
    checks.Bytes(),
    checks.Real(),
    checks.Real(least=1.0, above=False, most=2.0),
    checks.Seconds(above=False, optional=True),
    checks.Flag(),
    checks.Choice(words=("any", "key")),
    checks.Kind(wanted=bq.WorkerPolicy, example="WorkerPolicy.fixed(4)"),
    checks.Function(parameters=("item",)),
    checks.HandlerRule(),
    checks.ErrorHandlerRule(optional=True),
]
values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=30)
    | st.binary(max_size=5)
    | st.lists(st.integers(), max_size=3)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
    | st.sampled_from([len, print, int, bq.WorkerPolicy, bq.WorkerPolicy.io_bound, Broken(), Settings()])
)


@pytest.mark.parametrize("rule", RULES, ids=[type(rule).__name__ for rule in RULES])
@given(value=values, layer=st.sampled_from(["code", "file", "environment"]))
def test_a_rule_judges_any_value_and_says_why(rule, value, layer):
    for read in (value, rule.read(value, layer)):
        problems = list(rule.problems("field", read))
        assert len(problems) <= 1
        assert all(problem.rule and problem.way_out for problem in problems)
        if read is None and rule.optional:
            assert problems == []


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**20), 10**20))
def test_a_number_keeps_a_rule_exactly_between_its_bounds(value):
    def keeps(rule):
        return not list(rule.problems("field", value))

    assert keeps(checks.Real(least=1.0, most=5.0)) == (1 < value <= 5)
    assert keeps(checks.Real(least=1.0, above=False, most=5.0)) == (1 <= value <= 5)
    assert keeps(checks.Whole(least=1, most=5)) == (isinstance(value, int) and 1 <= value <= 5)


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        (checks.Whole(), " 12 ", 12),
        (checks.Whole(), "1_000", "1_000"),
        (checks.Whole(), "9" * 41, "9" * 41),
        (checks.Real(), "1e-3", 0.001),
        (checks.Real(), ".5", 0.5),
        (checks.Real(), "1e99999", "1e99999"),
        (checks.Seconds(), "1m", 60.0),
        (checks.Bytes(), "12", 12),
        (checks.Bytes(), "1KiB", 1_024),
        (checks.Flag(), "True", True),
        (checks.Flag(), "yes", "yes"),
        (checks.Choice(words=("any", "key")), "KEY", "key"),
    ],
)
def test_texts_of_the_environment(rule, text, value):
    assert rule.read(text, "environment") == value


# -- handlers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 10, 200])
def test_a_decorator_of_decorators_is_followed_to_a_bound(depth):
    async def write(batch): ...

    function = write
    for _ in range(depth):

        def wrapper(*arguments, inner=function):
            return inner(*arguments)

        wrapper.__wrapped__ = function
        function = wrapper
    assert (handlers.nature_of(function) is handlers.Nature.ASYNC) == (depth < 50)


def test_a_decorator_may_make_a_plain_function_of_an_async_one():
    async def tell(record): ...

    @functools.wraps(tell)
    def start(record): ...

    def start_task(record) -> asyncio.Task[None]: ...

    assert bq.SplitPolicy(prepare=start).prepare is start
    assert bq.SplitPolicy(prepare=start_task).prepare is start_task
    for function in (tell, functools.partial(tell), mock.AsyncMock()):
        with pytest.raises(bq.ConfigError, match="is async, and nothing would await it"):
            bq.SplitPolicy(prepare=function)


def test_a_function_whose_answer_is_awaited_may_be_async():
    async def tell(records, reason): ...

    for function in (tell, functools.partial(tell), mock.AsyncMock()):
        assert bq.ExportConfig(on_dead_letter=function).on_dead_letter is function


def test_the_parameters_in_a_message_have_no_values():
    def write(batch, table, password="hunter2"): ...

    assert handlers.handler_problem(write).rule == "is a plain function, and would block the event loop"
    assert handlers.error_handler_problem(lambda batch=1: None).rule == "takes (batch), not (batch, error)"


def test_a_function_that_wraps_itself_ends():
    def write(batch): ...

    write.__wrapped__ = write
    assert handlers.nature_of(write) is handlers.Nature.PLAIN
    assert handlers.handler_problem(write) is not None


def test_annotations_that_can_not_be_read_say_nothing():
    def write(batch): ...

    write.__annotations__ = {"return": "list[Awaitable[None]]"}
    assert handlers.nature_of(write) is handlers.Nature.PLAIN
    write.__annotations__ = {"return": "collections.abc.Coroutine[Any, Any, None]"}
    assert handlers.nature_of(write) is handlers.Nature.ASYNC


def test_what_can_not_be_known_is_let_through():
    class Compiled:
        __call__ = staticmethod(len)  # as an extension's type has it: not a Python function

    assert handlers.nature_of(Compiled()) is handlers.Nature.UNKNOWN
    assert handlers.handler_problem(Compiled()) is None
