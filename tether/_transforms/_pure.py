# SPDX-License-Identifier: Apache-2.0
"""pure and uses: a stateful function as a plain one, and what it touches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tether._core import frame as _frame
from tether._core.lift import Packed, unpack
from tether._core.variable import Variable, coerced
from tether._modules.module import Module, structure_of, variables_of
from tether._modules.selection import unknown_path
from tether._transforms import _arguments
from tether._transforms._call import reach_of
from tether._transforms._eval_shape import abstract_run
from tether.errors import StructureError, describe


class Uses(NamedTuple):
    """What a function touches: path -> Variable."""

    reads: dict[str, Variable]
    writes: dict[str, Variable]


def uses(fun: Callable[..., Any]) -> Callable[..., Uses]:
    """Makes a function that says which Variables ``fun`` reads and writes, without computing or compiling it.

    Example:
        >>> norm = nn.BatchNorm(2)
        >>> list(tether.uses(norm)(jnp.ones((4, 2))).writes)
        ['mean', 'var']
    """
    _arguments.checked_callable(fun, "uses")

    def uses_fun(*args: Any, **kwargs: Any) -> Uses:
        names = reach_of(fun, args, kwargs).variables()
        frame = abstract_run(fun, args, kwargs)[0].frame
        named: Any = lambda variables: {names.get(v, v.label): v for v in variables}
        return Uses(named(frame.reads), named(frame.written))

    return uses_fun


class Pure:
    """``pure(f)``: called with ``(values, *args)``, it returns ``(out, new_values)`` and touches no Variable."""

    def __init__(self, fun: Callable[..., Any]):
        self._fun = _arguments.checked_callable(fun, "pure")
        functools.update_wrapper(self, fun, updated=())

    def values(self, *args: Any, **kwargs: Any) -> Any:
        """The values of what ``f`` can reach, in the form that the call takes them: path -> array."""
        return {path: variable.value for path, variable in self._variables(args, kwargs).items()}

    def __call__(self, values: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given, rebuild = self._given(values, args, kwargs)
        frame = _frame.Frame("pure", miss="refuse")
        run = lambda: Packed(self._fun(*args, **kwargs), frame.birth)
        packed, written, new = frame.run(given, run)
        after = {**given, **dict(zip(written, new, strict=True))}
        return unpack(packed, packed.take()), rebuild([after[variable] for variable in given])

    def _variables(self, args: Any, kwargs: Any) -> dict[str, Variable]:
        names = reach_of(self._fun, args, kwargs).variables()
        return {name: variable for variable, name in names.items()}

    def _given(self, values: Any, args: Any, kwargs: Any) -> tuple[dict[Variable, Any], Callable[[list[Any]], Any]]:
        if isinstance(values, Module) and isinstance(self._fun, Module):
            structure, own = structure_of(values), structure_of(self._fun)
            if structure.paths != own.paths:
                raise StructureError(
                    "pure: the values are those of another module.",
                    got=f"a {type(values).__name__} with the cells {', '.join(structure.paths[:4])}",
                    expected=f"a {type(self._fun).__name__} with the cells {', '.join(own.paths[:4])}",
                    fix="tether.snapshot(model), or a tree like it",
                )
            pairs = zip(variables_of(self._fun), variables_of(values), strict=True)
            given = {mine: coerced(mine, _frame.read(theirs)) for mine, theirs in pairs}
            return given, lambda new: structure.build(structure.variables(new))
        if not isinstance(values, Mapping):
            raise StructureError(
                "pure: the values are of no known form.",
                got=describe(values),
                expected="{path: array}, or for a module a module-shaped tree",
                fix="tether.pure(f).values() gives them",
            )
        known = self._variables(args, kwargs)
        for path in values:
            if path not in known:
                raise unknown_path(path, known, "pure: the function reaches no Variable of this path")
        given = {known[path]: coerced(known[path], value) for path, value in values.items()}
        return given, lambda new: dict(zip(values, new, strict=True))


def pure(fun: Callable[..., Any]) -> Pure:
    """A stateful function as a plain one: ``(values, *args) -> (out, new_values)``.

    For ``jax.export``, ``jax.pmap`` and whatever else must see plain functions. An exported program takes and returns
    values by path, so it runs where the classes of the model are not known; the size of a batch may be symbolic. Where
    nothing is drawn, in evaluation, leave the random stream out of ``values``. Where something is, its typed key is an
    argument like any other; ``jax.random.key_data`` and ``wrap_key_data`` take it to a file and back.

    Args:
        fun: A function or module. For a module, ``values`` may also be module-shaped (``tether.snapshot(model)``).
    Returns:
        The function; its ``values(*args)`` gives the values now, path -> array.
    Raises:
        LeakError: the function uses a Variable that is not among the values.
        SelectionError: a path that the function reaches no Variable under.
    Example:
        >>> norm = nn.BatchNorm(2)
        >>> plain = tether.pure(norm)
        >>> out, new = jax.jit(plain)(plain.values(), jnp.ones((4, 2)))
        >>> sorted(new)
        ['bias', 'mean', 'tether.random.default', 'var', 'weight']
        >>> norm.mean.tolist()
        [0.0, 0.0]
    """
    return Pure(fun)
