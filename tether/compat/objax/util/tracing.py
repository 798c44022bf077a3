# SPDX-License-Identifier: Apache-2.0
"""The variables that a function names.

| Objax | here | what differs |
| --- | --- | --- |
| find_used_variables(fn) | the loads in fn's code, looked up in its closure and globals | needs no source |
| | | a local name is never taken for a global one |

``Jit(f)`` and the others find more by themselves: they follow calls.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any

from tether.compat.objax._errors import ConflictError
from tether.compat.objax.module import Module
from tether.compat.objax.variable import BaseVar, VarCollection
from tether.errors import describe

__all__ = ["find_used_variables"]

_FROM_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_FROM_CLOSURE = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NOTHING = object()


def find_used_variables(fn: Any) -> VarCollection:
    """Finds the variables and modules that a function names, in the order of their use.

    Args:
        fn: A function, whose names are looked up as it would: ``w``, ``model``, ``config.model``.
    Raises:
        ConflictError: fn is no function of Python.
    Example:
        >>> w, model = objax.TrainVar(jnp.zeros(2)), objax.nn.Linear(2, 1)
        >>> list(objax.util.find_used_variables(lambda x: model(x * w.value)).keys())
        ['model.(Linear).b', 'model.(Linear).w', 'w']
    """
    code = getattr(fn, "__code__", None)
    if not isinstance(code, types.CodeType):
        raise ConflictError(
            "Can not determine variables used by a function. Function does not have __code__ attribute.",
            got=describe(fn),
            expected="a function that is written in Python",
            fix=["fn.vars(), if it is a module", "objax.Jit(fn), which finds them without"],
        )
    closure = _contents(fn)
    found = VarCollection()
    for name, value in [*_defaults(fn), *_loads(code, fn.__globals__, closure)]:
        if isinstance(value, Module):
            found.update(value.vars(scope=f"{name}."))
        elif isinstance(value, BaseVar):
            found[name] = value
    return found


def _contents(fn: Any) -> dict[str, Any]:
    """What the closure of a function holds by now."""
    found = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def _defaults(fn: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in inspect.signature(fn, follow_wrapped=False).parameters.items():
        yield name, parameter.default


def _loads(code: types.CodeType, scope: dict[str, Any], closure: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names and dotted names that code loads, with what they mean; a module or variable ends a dotted name."""
    closure = {name: closure[name] for name in code.co_freevars if name in closure}
    name, value = "", _NOTHING
    for instruction in dis.get_instructions(code):
        part = instruction.argval
        if instruction.opname in _FROM_GLOBALS:
            name, value = part, scope.get(part, _NOTHING)
        elif instruction.opname in _FROM_CLOSURE:
            name, value = part, closure.get(part, _NOTHING)
        elif instruction.opname in _ATTRIBUTES and value is not _NOTHING:
            name, value = f"{name}.{part}", getattr(value, part, _NOTHING)
        elif instruction.opname != "EXTENDED_ARG":
            value = _NOTHING
        if isinstance(part, types.CodeType):
            yield from _loads(part, scope, closure)
        if isinstance(value, Module | BaseVar):
            yield name, value
            value = _NOTHING
