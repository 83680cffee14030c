"""Whether a value can be a handler, decided before the first batch: its shape, whether it is async, its parameters.

A plain function would run on the event loop, block it, and have its batch counted as failed, so it is refused when it
is registered. What can't be inspected (a compiled function, an object without a signature) is accepted; the call itself
then reports that nothing awaitable came back.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from enum import Enum, auto
from types import BuiltinFunctionType
from typing import Any, NamedTuple, get_origin

from batchqueue_async._support.wording import clip, name_of, short
from batchqueue_async.errors import ConfigError

_AWAITABLE = re.compile(r"\b(?:Awaitable|Coroutine|CoroutineType|Future|Task)\b")
_MISSING = object()
_DEEPEST = 50


class Unfit(NamedTuple):
    """Why a value can't be called in its role: the broken rule, and the way out."""

    rule: str
    way_out: str


class Nature(Enum):
    """What a call of a function returns."""

    ASYNC = auto()
    PLAIN = auto()
    GENERATOR = auto()
    UNKNOWN = auto()


def method_of(value: object, name: str) -> Callable[..., Any] | None:
    """A method that an object really has, such as `consume`.

    A callable that creates attributes on demand, as a mock does, does not count as having them: it is called itself.
    Nor does an object whose attribute raises: a property is foreign code.
    """
    try:
        found: Callable[..., Any] | None = getattr(value, name, None)
    except Exception:  # noqa: BLE001 - a property may raise anything, and its handler may be amid a drain
        return None
    if not callable(found) or (callable(value) and not _defines(value, name)):
        return None
    return found


def call_of(value: Any) -> Callable[..., Any]:
    """What to call with the batches of a handler: its `consume`, or the handler itself.

    Where that is not plainly a coroutine function, what it returns is looked at: if it can't be awaited, the error
    names the handler.
    """
    consume = method_of(value, "consume")
    function = consume or value
    if inspect.iscoroutinefunction(function):
        return function
    name = name_of(value)
    return functools.partial(_await_result, function, name if consume is None else f"{name}.consume")


async def _await_result(function: Callable[..., Any], name: str, batch: list[Any]) -> Any:
    result = function(batch)
    if not inspect.isawaitable(result):
        raise ConfigError(
            f"handler {name} returned {short(result)}, which can't be awaited; "
            f"make it async def, or wrap it: bq.in_thread({name})"
        )
    return await result


def handler_problem(value: object) -> Unfit | None:
    """What keeps a value from being a handler, or None.

    Example:
        >>> def write(batch): ...
        >>> handler_problem(write).way_out
        'wrap it: bq.in_thread(write), or make it async def'
    """
    if isinstance(value, type):
        return Unfit("is a class", f"give an object of it, as {value.__name__}(...) makes it")
    consume = method_of(value, "consume")
    if consume is None and not callable(value):
        return Unfit("is not a handler", "give an async callable(batch) or an object with async consume(batch)")
    function: Any = consume or value
    subject = "" if consume is None else "has a consume that "
    nature = nature_of(function)
    if nature is Nature.PLAIN and consume is not None:
        return Unfit("has a consume that is not async, and would block the event loop", "make it async def consume")
    if nature is Nature.PLAIN:
        rule = f"is {_described(value)}, and would block the event loop"
        return Unfit(rule, f"wrap it: bq.in_thread({name_of(value).replace('<lambda>', '...')}), or make it async def")
    if nature is Nature.GENERATOR:
        return Unfit(f"{subject}is an async generator function", "write an async def without yield")
    if not takes(function, 1):
        return Unfit(f"{subject}takes {_parameters(function)}, not one batch", "give it one parameter, the batch")
    return next(filter(None, (method_problem(value, hook) for hook in ("on_idle", "on_close"))), None)


def method_problem(value: object, name: str, *parameters: str) -> Unfit | None:
    """What keeps an object's async method of these parameters from being called, if it has the method.

    Example:
        >>> class Sink:
        ...     async def send(self, records, keys): ...
        >>> method_problem(Sink(), "send", "batch")
        Unfit(rule='has a send that takes (records, keys)', way_out='make it async def send(self, batch)')
    """
    called = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    way_out = f"make it async def {name}({', '.join(('self', *parameters))})"
    try:
        getattr(value, name, None)
    except Exception as error:  # noqa: BLE001 - a property may raise anything
        return Unfit(f"has {called} that raises {type(error).__name__}", way_out)
    method = method_of(value, name)
    if method is None:
        return None
    if nature_of(method) is Nature.PLAIN:
        return Unfit(f"has {called} that is not async, and would block the event loop", way_out)
    if nature_of(method) is Nature.GENERATOR:
        return Unfit(f"has {called} that is an async generator function", "write an async def without yield")
    if not takes(method, len(parameters)):
        return Unfit(f"has {called} that takes {_parameters(method)}", way_out)
    return None


def error_handler_problem(value: object) -> Unfit | None:
    """What keeps a value from being an error handler, a function of batch and error, async or not; or None."""
    return function_problem(value, ("batch", "error"), may_be_async=True)


def function_problem(
    value: object, parameters: tuple[str, ...], *, may_be_async: bool = False, may_be_class: bool = False
) -> Unfit | None:
    """What keeps a value from being a function of these parameters, or None.

    Example:
        >>> function_problem(len, ("batch", "error"))
        Unfit(rule='takes (obj, /), not (batch, error)', way_out='give a function of (batch, error)')
    """
    described = f"({', '.join(parameters)})"
    if not callable(value):
        return Unfit("is not callable", f"give a function of {described}")
    if isinstance(value, type) and not may_be_class:
        return Unfit("is a class", f"give a function of {described}, or an object that is callable")
    # Without looking through decorators: one of them may start a task for an async function.
    own = list(_layers(value, through_decorators=False))
    if any(inspect.isasyncgenfunction(layer) for layer in own):
        return Unfit("is an async generator function", f"give a function of {described} without yield")
    if not may_be_async and any(map(_is_async, own)):
        return Unfit("is async, and nothing would await it", f"give a plain function of {described}")
    if not takes(value, len(parameters)):
        return Unfit(f"takes {_parameters(value)}, not {described}", f"give a function of {described}")
    return None


def nature_of(function: Any) -> Nature:
    """Whether a call returns an awaitable, as far as that can be known without calling."""
    layers = list(_layers(function))
    if any(_is_async(layer) or _says_awaitable(layer) for layer in layers):
        return Nature.ASYNC
    if any(inspect.isasyncgenfunction(layer) for layer in layers):
        return Nature.GENERATOR
    if any(inspect.isfunction(layer) or _is_standard(layer) for layer in layers):
        return Nature.PLAIN
    return Nature.UNKNOWN


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with `count` positional arguments; yes if it does not say."""
    try:
        signature = inspect.signature(function)
    except Exception:  # noqa: BLE001 - foreign code computes signatures, and a call will show what was wrong
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _layers(function: Any, *, through_decorators: bool = True) -> Iterator[Any]:
    """The function, and what it wraps: of partials, bound methods, objects with a call, `functools.wraps`."""
    for _ in range(_DEEPEST):
        yield function
        if isinstance(function, functools.partial):
            inner: Any = function.func
        elif inspect.ismethod(function):
            inner = function.__func__
        elif through_decorators and _defines(function, "__wrapped__"):
            inner = function.__wrapped__
        elif inspect.isfunction(call := _call_of(function)):
            inner = call
        else:
            return
        function = inner


def _call_of(value: object) -> object:
    """What runs when an object is called: its class's method, never an attribute of the object itself."""
    return None if isinstance(value, type) else inspect.getattr_static(type(value), "__call__", None)


def _defines(value: Any, name: str) -> bool:
    """Whether an object or its class (the one that it stands for, if it is a mock of one) has an attribute."""
    return any(inspect.getattr_static(each, name, _MISSING) is not _MISSING for each in (value, value.__class__))


def _is_async(function: Any) -> bool:
    """Whether it is a coroutine function, or is marked as one, as `AsyncMock` and some decorators do."""
    own: dict[str, Any] = getattr(function, "__dict__", {})
    return inspect.iscoroutinefunction(function) or "_is_coroutine" in own or "_is_coroutine_mark" in own


def _says_awaitable(function: Any) -> bool:
    if not inspect.isfunction(function):
        return False
    try:
        returned = inspect.get_annotations(function).get("return")
    except Exception:  # noqa: BLE001 - annotations are code, and may use names that exist only for type checkers
        return False
    if isinstance(returned, str):
        return _AWAITABLE.search(returned.partition("[")[0]) is not None
    kind = get_origin(returned) or returned
    return isinstance(kind, type) and issubclass(kind, Awaitable)


def _is_standard(function: Any) -> bool:
    """Whether it is a compiled function of Python itself, none of which is async."""
    if not isinstance(function, BuiltinFunctionType):
        return False
    module = function.__module__ or type(function.__self__).__module__
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names


def _parameters(function: Callable[..., Any]) -> str:
    nothing = inspect.Parameter.empty
    parameters = inspect.signature(function).parameters.values()
    return clip(str(inspect.Signature([each.replace(annotation=nothing, default=nothing) for each in parameters])))


def _described(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return "a plain function" if inspect.isroutine(function) else "an object whose call is not async"
