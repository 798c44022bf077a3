# SPDX-License-Identifier: Apache-2.0
"""Rules for names and layouts: what users say where a model is not built as its twin is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tether.errors import ArgumentError, describe

Rules = Mapping[str, str | None]
Transforms = Mapping[str, Callable[[np.ndarray], Any]]


def renamed(names: Iterable[str], rules: Rules, user: str) -> dict[str, str]:
    """Old name -> new name, by one rule after the other; names that a rule drops are left out.

    Raises:
        ArgumentError: a rule that is no regular expression, or two names that become one.
    """
    steps = _steps("rules", rules, lambda new: new is None or isinstance(new, str), "a text, or None", user)
    old: dict[str, str] = {}
    for name in names:
        new = _renamed(name, steps)
        if new in old:
            raise ArgumentError(
                f"{user}: the rules give two tensors one name.",
                at=f"{old[new]!r} and {name!r}",
                got=f"{new!r} for both",
                expected="a name for each, or None for the one to leave out",
                fix=f"a rule in front: rules={{{exactly(name)!r}: None, ...}}",
            )
        if new is not None:
            old[new] = name
    return {name: new for new, name in old.items()}


def _renamed(name: str, steps: list[tuple[re.Pattern[str], str | None]]) -> str | None:
    for pattern, new in steps:
        if new is not None:
            name = pattern.sub(new, name)
        elif pattern.search(name):
            return None
    return name


def transformer(transforms: Transforms, user: str) -> Callable[[str, np.ndarray], np.ndarray]:
    """The function of a name and an array that applies every transform whose pattern is found in the name.

    Raises:
        ArgumentError: a pattern that is no regular expression; from the function, a transform that gives no array.
    """
    steps = _steps("transforms", transforms, callable, "a function of an array", user)

    def apply(name: str, array: np.ndarray) -> np.ndarray:
        for pattern, function in steps:
            if pattern.search(name):
                array = _checked(function(array), name, pattern.pattern, user)
        return array

    return apply


def _checked(array: Any, name: str, pattern: str, user: str) -> np.ndarray:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise ArgumentError(
            f"{user}: a transform gave no array.",
            at=f"{name!r}, by the transform for {pattern!r}",
            got=describe(array),
            expected="an array",
            fix="a function of an array that returns one, such as np.transpose",
        )
    return np.asarray(array)


def _steps(argument: str, given: Any, fits: Callable[[Any], bool], expected: str, user: str) -> list[Any]:
    """Pairs of a compiled pattern and what goes with it."""
    wrong = [item for item in given.values() if not fits(item)] if isinstance(given, Mapping) else [given]
    if wrong:
        raise ArgumentError(
            f"{user}: {argument} are not of the form that is expected.",
            got=f"{argument}={describe(given)}" if wrong[0] is given else f"{describe(wrong[0])}, for a pattern",
            expected=f"a dict from patterns, each to {expected}",
            fix="rules={'^module\\.': ''}" if argument == "rules" else "transforms={'weight$': np.transpose}",
        )
    return [(_compiled(pattern, user), item) for pattern, item in given.items()]


def _compiled(pattern: Any, user: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (TypeError, re.error) as error:
        raise ArgumentError(
            f"{user}: a rule is no regular expression.",
            got=f"{describe(pattern)}: {error}",
            expected="a pattern in the words of Python's re",
            fix="re.escape(text) for a text that is meant as it stands",
        ) from error


def exactly(name: str) -> str:
    """A pattern that finds one name alone."""
    return f"^{re.escape(name)}$"
