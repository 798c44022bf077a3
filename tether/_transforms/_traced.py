# SPDX-License-Identifier: Apache-2.0
"""Tracing: a function's Python runs once, with the Variables that it can reach as inputs of a jaxpr.

What it read and wrote is known afterwards. A read of an older Variable that isn't among the inputs is missed: then
the function is traced once more, with it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import numpy as np

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._core.lift import Packed
from tether._core.variable import Variable
from tether._modules.capture import looking_anew
from tether.errors import ArgumentError, LeakError, MissedReadWarning, describe

MOST_TRACES = 8  # of one function, for reads that were missed: more means that each trace finds new Variables


class Traced:
    """One traced function. Its program takes values of ``lifted``, values of ``given``, then the leaves.

    Args:
        kind: Name of the transformation.
        name: Name of the function.
        fun: The function, of a list of leaves.
        leaves: The leaves; only their avals count.
        lifted: Variables that it can reach, all of which hold arrays.
        fixed: Those that hold something else (None, a spec), with that.
        given: Variables whose value inside is another one than outside, with that value.
        refer: What stands for an existing module in the result.
        row: Of a loop that stacks, the aval of the index of the turn: a leaf before all others.

    Attributes:
        lifted: With those that were missed at first, which are in ``found``.
        used: For each of ``lifted``, whether the program uses its value.
        variables: Those of ``lifted`` that it uses or writes.
        reads: The Variables that were read.
        placed: Those that a shard_map inside has on a mesh, with the sharding.
        mesh: The mesh of a shard_map inside.
        written: The Variables that it writes, in the order of its results, which follow those of ``packed``.
        groups: What was captured; the cells of that are among the written.
        count: How often the function was traced.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        fun: Callable[[list[Any]], Any],
        leaves: list[Any],
        lifted: list[Variable],
        fixed: dict[Variable, Any],
        *,
        given: dict[Variable, Any] | None = None,
        refer: Callable[[Any], Any] = lambda module: module,
        row: Any = None,
    ):
        self.found: list[Variable] = []
        self.written: list[Variable] = []
        self.packed: Any = None
        self._kind, self._fun, self._fixed, self._given, self._refer = kind, fun, fixed, given or {}, refer
        for self.count in range(1, MOST_TRACES + 1):
            self.lifted = [*lifted, *self.found]
            missed = self._trace(leaves, row)
            if not missed:
                break
            self.found += missed
        else:
            raise endless(kind, name, self.found)
        if self.found:
            warn_missed(kind, name, self.found)
        self.used = self._used()
        written = set(self.written)
        self.variables = [v for v, used in zip(self.lifted, self.used, strict=True) if used or v in written]

    def _trace(self, leaves: list[Any], row: Any) -> list[Variable]:
        """One trace; the Variables that were missing in it."""
        with looking_anew() as self.groups:
            frame = _frame.Frame(self._kind, miss="note")

            def program(values: Any, given: Any, leaves: Any) -> Any:
                inside = {
                    **self._fixed,
                    **dict(zip(self.lifted, values, strict=True)),
                    **dict(zip(self._given, given, strict=True)),
                }
                if row is not None:
                    frame.row, *leaves = leaves
                run = lambda: Packed(self._fun(leaves), frame.birth, self._refer)
                self.packed, self.written, new = frame.run(inside, run)
                _check_arrays(self._kind, self.packed)
                return self.packed.take(), new

            rows = [] if row is None else [row]
            values = [_frame.peek(variable) for variable in self.lifted]
            trace = jax.make_jaxpr(program, return_shape=True)
            self.jaxpr, (self.avals, new) = trace(values, list(self._given.values()), [*rows, *leaves])
        self.new_avals, self.reads = dict(zip(self.written, new, strict=True)), list(frame.reads)
        self.placed, self.mesh = frame.placed, frame.mesh
        return list(frame.missed)

    @property
    def is_closed(self) -> bool:
        """Whether it holds no value of a trace around, and so may be kept."""
        return all(_trace.owner(value) is None for value in self.jaxpr.consts)

    @property
    def call(self) -> Callable[..., list[Any]]:
        """The program as a function."""
        return jax.extend.core.jaxpr_as_fun(self.jaxpr)

    def unchanged(self) -> set[Variable]:
        """The Variables that were written, and have the value in the end that they had at the start."""
        first = dict(zip(self.lifted, self.jaxpr.jaxpr.invars, strict=False))
        last = zip(self.written, self.jaxpr.jaxpr.outvars[self.packed.count :], strict=True)
        return {variable for variable, value in last if first.get(variable) is value}

    def _used(self) -> list[bool]:
        inner = self.jaxpr.jaxpr
        used = {id(atom) for equation in inner.eqns for atom in equation.invars} | {id(a) for a in inner.outvars}
        return [id(var) in used for var in inner.invars[: len(self.lifted)]]


def _check_arrays(kind: str, packed: Packed) -> None:
    for place, leaf in enumerate(packed.leaves):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            path = jax.tree_util.tree_flatten_with_path(packed.treedef.unflatten(range(packed.count)))[0][place][0]
            raise ArgumentError(
                f"{kind}: the function returns something that is no array.",
                at="result" + jax.tree_util.keystr(path),
                got=describe(leaf),
                expected="arrays, numbers, modules, or containers of those",
                fix="compute it outside the function",
            )


def endless(kind: str, name: str, found: list[Variable]) -> LeakError:
    """The error for a function of which each trace reads other Variables."""
    return LeakError(
        f"{kind}: each trace of {name} reads Variables that no trace before has met.",
        at=", ".join(variable.describe() for variable in found[-3:]),
        got=f"{MOST_TRACES} traces",
        fix="make modules outside the function, or wholly inside it; pass what it uses as arguments",
    )


def warn_missed(kind: str, name: str, found: list[Variable]) -> None:
    """Warns, once a trace, of Variables that only reading found."""
    warnings.warn(
        f"{kind}: {name} reads Variables that were found only while it was traced.\n"
        f"  at:       {', '.join(variable.describe() for variable in found[:3])}\n"
        "  got:      a Variable behind a property, a registry or another library's object\n"
        "  fix:      pass its module as an argument: the function is traced once, and equal modules share it",
        MissedReadWarning,
        stacklevel=_user_level(),
    )


def _user_level() -> int:
    """How many calls below the user's line this function's caller runs."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("tether", "jax"):
        level, frame = level + 1, frame.f_back
    return level + 1
