# SPDX-License-Identifier: Apache-2.0
"""Compiled functions.

| Objax | here | what differs |
| --- | --- | --- |
| Jit(f) | ``tether.jit(f)`` | f may be any function: what it uses is found |
| Jit(f, vc) | ``tether.jit`` of f with the cells of vc | random states are found anyway; others may not be written |
| static_argnums | the same | |

Arguments are traced as in Objax: bools too, and all that are given by name. Variables among them go in as values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from tether._core import frame as _frame
from tether._core.variable import Cells, Variable
from tether._transforms import jit as tether_jit
from tether.compat.objax._errors import MisuseError
from tether.compat.objax._names import class_name, known_as
from tether.compat.objax._objects import Function, Module, discovered
from tether.compat.objax.random import DEFAULT_GENERATOR
from tether.compat.objax.variable import KeyCell, RandomState, VarCollection, cell_of, each, unwrapped


class Jit(Module):
    """A function or module, compiled.

    Args:
        f: The function or module.
        vc: The variables that it uses; others are constants. None finds them.
        static_argnums: Numbers of the arguments that are constants.
    Raises:
        MisuseError: f writes a variable that vc doesn't have.
    Example:
        >>> counter = objax.StateVar(jnp.zeros(()))
        >>> @objax.Jit
        ... def count(x):
        ...     counter.value += x
        ...     return counter.value
        >>> [float(count(2.0)) for _ in range(2)]
        [2.0, 4.0]
    """

    def __init__(
        self,
        f: Callable[..., Any],
        vc: VarCollection | None = None,
        static_argnums: tuple[int, ...] | None = None,
    ):
        self.static_argnums = static_argnums
        self.vc = discovered(f) if vc is None else vc
        self.__wrapped__ = f if isinstance(f, Module) else Function(f, self.vc)
        self._static = frozenset(static_argnums or ())
        self._call = compiled(f, None if vc is None else self.vc, sorted(self._static))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled function."""
        new = [arg if place in self._static else traced(arg) for place, arg in enumerate(args)]
        return self._call(*new, **{name: traced(value) for name, value in kwargs.items()})

    def __repr__(self) -> str:
        return f"{class_name(self)}(f={self.__wrapped__}, static_argnums={self.static_argnums or None})"


def compiled(f: Callable[..., Any], vc: VarCollection | None, static_argnums: Iterable[int]) -> Any:
    """A function under ``tether.jit``: with the variables of a collection, or with all that it uses."""
    if vc is None:
        cells, reachable = None, (f, DEFAULT_GENERATOR)
    else:
        states = [*each(vc), *each(discovered(f).subset(RandomState)), DEFAULT_GENERATOR.key]
        cells = list(dict.fromkeys(map(cell_of, states)))
        reachable = Cells(None, cells)  # in place of f: its other variables stay where they are
    hidden = _Hidden(f)

    def run(_: Any, /, *args: Any, **kwargs: Any) -> Any:
        out = hidden.f(*args, **kwargs)
        if cells is not None:
            _check_written(hidden.f, cells)
            _make_constants(cells)
        return out

    call = known_as(f, functools.partial(run, reachable))
    return tether_jit(call, static_argnums=tuple(static_argnums))


class _Hidden:
    """Holds a function where nobody looks for variables."""

    def __init__(self, f: Callable[..., Any]):
        self.f = f


def traced(arg: Any) -> Any:
    """An argument all of which JAX traces: bools are switches for Tether, and static."""
    if isinstance(arg, jax.Array | np.ndarray):
        return arg
    return jax.tree.map(lambda leaf: np.bool_(leaf) if isinstance(leaf, bool) else leaf, unwrapped(arg))


def _check_written(f: Callable[..., Any], cells: list[Variable]) -> None:
    others = [cell for cell in _frame.thread.frames[-1].written if cell not in cells and not isinstance(cell, KeyCell)]
    if others:
        names = {cell_of(variable): name for name, variable in discovered(f).items()}
        raise MisuseError(
            "Jit: the function writes a variable that isn't in its VarCollection.",
            at=", ".join(names.get(cell, repr(cell)) for cell in others[:3]),
            got=f"a VarCollection of {sum(not isinstance(c, KeyCell) for c in cells)} variables, without this one",
            expected="one with it, or none at all",
            fix=["Jit(f, vc + other.vars())", "Jit(f), which finds what f uses"],
        )


def _make_constants(cells: list[Variable]) -> None:
    """What f took from variables that aren't listed stays as it was in the trace: they aren't looked for again."""
    missed = _frame.thread.frames[-1].missed
    for cell in [cell for cell in missed if cell not in cells and not isinstance(cell, KeyCell)]:
        del missed[cell]
