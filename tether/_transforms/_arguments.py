# SPDX-License-Identifier: Apache-2.0
"""Numbers and names of arguments: they always mean the user's own signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tether.errors import ArgumentError


def signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    """The signature that a user sees: without ``self`` for bound methods and modules."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):
        return None


def name_of(fun: Callable[..., Any]) -> str:
    """The function's name for messages and profiles."""
    return getattr(fun, "__name__", None) or type(fun).__name__


def checked_callable(fun: Any, transform: str) -> Any:
    """``fun``, or an error if it is no function."""
    if not callable(fun):
        raise ArgumentError(
            f"{transform}: what is transformed is no function.", got=repr(type(fun)), expected="a callable"
        )
    return fun


def checked_count(count: Any, transform: str, option: str, least: int) -> None:
    """An error if the count is no whole number from ``least`` on."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        expected = f"a whole number, at least {least}"
        raise ArgumentError(f"{transform}: no such {option}.", got=repr(count), expected=expected)


def positions(numbers: Any, fun: Callable[..., Any], count: int, option: str) -> tuple[int, ...]:
    """Argument numbers or names as positions among ``count`` positional arguments; negatives count from the end.

    Raises:
        ArgumentError: a number out of range, a name that isn't there, or neither; the text shows the signature.
    """
    found = [_position(number, fun, count, option) for number in as_tuple(numbers)]
    if len(set(found)) != len(found):
        raise _wrong(option, fun, repr(numbers), "each argument once", count)
    return tuple(found)


def as_tuple(numbers: Any) -> tuple[Any, ...]:
    """One number or name, or several, as a tuple."""
    if numbers is None:
        return ()
    return tuple(numbers) if isinstance(numbers, tuple | list) else (numbers,)


def _position(number: Any, fun: Callable[..., Any], count: int, option: str) -> int:
    if isinstance(number, str):
        names = list(parameters(fun))
        if number not in names[:count]:
            raise _wrong(option, fun, repr(number), "the name of an argument that is given by position", count)
        return names.index(number)
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise _wrong(option, fun, repr(number), "an int, a name, or a tuple of those", count)
    index = number.__index__()
    if not -count <= index < count:
        raise _wrong(option, fun, str(index), f"a number in [{-count}, {count})", count)
    return index % count


def parameters(fun: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The positional parameters of the user's signature, by name."""
    found = signature(fun)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {n: p for n, p in found.parameters.items() if p.kind in kinds} if found else {}


def _wrong(option: str, fun: Callable[..., Any], got: str, expected: str, count: int | None) -> ArgumentError:
    called = "" if count is None else f", called with {count} positional argument(s)"
    return ArgumentError(
        f"{option}: this is no argument of the function.",
        at=f"{name_of(fun)}{signature(fun) or '(...)'}{called}",
        got=got,
        expected=expected,
        fix="count the arguments of the function as you call it; self of a bound method is not one",
    )


def name_at(fun: Callable[..., Any], position: int) -> str:
    """The name of a positional argument, for messages."""
    names = list(parameters(fun))
    return names[position] if position < len(names) else f"args[{position}]"


class StaticArguments:
    """Which arguments of a function are static, by number and name."""

    def __init__(self, fun: Callable[..., Any], numbers: Any, names: Any):
        self.fun, self.numbers, self.names = fun, as_tuple(numbers), as_tuple(names)
        self.is_empty = not self.numbers and not self.names
        self._positions: dict[int, frozenset[int]] = {}
        found = signature(fun)
        takes_any = found is None or any(p.kind == p.VAR_KEYWORD for p in found.parameters.values())
        for name in self.names:
            if not takes_any and name not in found.parameters:  # type: ignore[union-attr]
                raise _wrong("static_argnames", fun, repr(name), "names of the function's arguments", None)

    def positions(self, count: int) -> frozenset[int]:
        """The static ones among ``count`` positional arguments."""
        if self.is_empty:
            return frozenset()
        if count not in self._positions:
            inside = list(parameters(self.fun))[:count]
            named = {inside.index(name) for name in self.names if name in inside}
            in_reach = [number for number in self.numbers if not _is_default(number, self.fun, count)]
            self._positions[count] = frozenset(positions(in_reach, self.fun, count, "static_argnums")) | named
        return self._positions[count]


def _is_default(number: Any, fun: Callable[..., Any], count: int) -> bool:
    """Whether a number means a parameter that this call leaves at its default or gives by name."""
    return isinstance(number, int) and not isinstance(number, bool) and count <= number < len(parameters(fun))
