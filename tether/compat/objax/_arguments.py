# SPDX-License-Identifier: Apache-2.0
"""Arguments by name and by position, as a function's signature has them.

| Objax | here | what differs |
| --- | --- | --- |
| args_indexes, local_kwargs, override_args_kwargs, positional_args_names | ``inspect.signature`` | nothing |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tether.compat.objax._errors import ConflictError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positional_args_names(f: Callable[..., Any]) -> list[str]:
    """Names of the arguments that may be given by position."""
    return [p.name for p in inspect.signature(f).parameters.values() if p.kind in _POSITIONAL]


def args_indexes(f: Callable[..., Any], args: Iterable[str]) -> Iterator[int]:
    """Positions of arguments that are given by name."""
    names = positional_args_names(f)
    for name in args:
        if name not in names:
            raise ConflictError(
                f"Function {f} does not have argument of name {name}",
                got=repr(name),
                expected=" or ".join(map(repr, names)) or "no name: it has no such argument",
            )
        yield names.index(name)


def local_kwargs(kwargs: dict[str, Any], f: Callable[..., Any]) -> dict[str, Any]:
    """Those of the arguments that a function takes."""
    parameters = inspect.signature(f).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def override_args_kwargs(
    f: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any], new_kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with others in their place, by position where they were given so."""
    args, new = list(args), dict(new_kwargs)
    for place, (name, parameter) in zip(range(len(args)), inspect.signature(f).parameters.items(), strict=False):
        if parameter.kind not in _POSITIONAL:
            break
        if name in new:
            args[place] = new.pop(name)
    return args, {**kwargs, **new}
