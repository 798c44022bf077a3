# SPDX-License-Identifier: Apache-2.0
"""Bodies: a function whose Python runs once, to a jaxpr, for the loops and branches that run the jaxpr.

JAX caches the traces of a loop's body by the identity of the function, and may trace it more than once. So a body is
traced before the one JAX transformation is called, which then gets a function of arrays alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from tether._core import frame as _frame
from tether._core.variable import Rng, Variable
from tether._transforms import _arguments
from tether._transforms._call import arrays_and_others, is_stateful, reach_of
from tether._transforms._traced import Traced
from tether.random._streams import Forked

_LEAVES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)


class Operands:
    """The arguments of a body: arrays and numbers as leaves, modules and everything else in their place."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args, self.kwargs = args, kwargs
        self._parts, self._treedef = jax.tree.flatten((args, kwargs), is_leaf=is_stateful)
        self._is_leaf = [isinstance(part, _LEAVES) for part in self._parts]
        self.leaves = [part for part, is_leaf in zip(self._parts, self._is_leaf, strict=True) if is_leaf]

    def rebuilt(self, leaves: Iterable[Any]) -> tuple[Any, Any]:
        """``(args, kwargs)`` with other leaves."""
        new = iter(leaves)
        parts = [next(new) if is_leaf else part for part, is_leaf in zip(self._parts, self._is_leaf, strict=True)]
        return jax.tree.unflatten(self._treedef, parts)


class Body:
    """A user's function as a program of arrays.

    Args:
        kind: Name of the transformation.
        fun: The function; its arguments are those of ``operands``.
        operands: What it is called with; of the leaves, only shapes and dtypes count.
        given: Variables whose value inside is another one than outside (a slice of it), with that value.
        check: Applied to the result inside the trace, where an error leaves nothing behind.
        refer: What stands for an existing module in the result.
        row: Of a loop that stacks, the index of the turn, its aval: a leaf before all others.

    Attributes:
        variables: The Variables from outside that it reads or writes; those of ``given`` are not among them.
        written: The Variables that it writes, of ``given`` too; ``new_avals`` are the avals of what it writes.
        packed: The tree of its result; ``avals`` are the avals of its leaves.
        groups: What was captured in it; the cells of that are among the written.
    """

    def __init__(
        self,
        kind: str,
        fun: Callable[..., Any],
        operands: Operands,
        given: dict[Variable, Any] | None = None,
        check: Callable[[Any], Any] = lambda out: out,
        refer: Callable[[Any], Any] = lambda module: module,
        row: Any = None,
    ):
        self.given = given or {}
        lifted, fixed = arrays_and_others(reach_of(fun, operands.args, operands.kwargs))
        lifted = [variable for variable in lifted if variable not in self.given]

        def call(leaves: list[Any]) -> Any:
            args, kwargs = operands.rebuilt(leaves)
            return check(fun(*args, **kwargs))

        name = _arguments.name_of(fun)
        traced = Traced(kind, name, call, operands.leaves, lifted, fixed, given=self.given, refer=refer, row=row)
        self.packed, self.written, self.groups = traced.packed, traced.written, traced.groups
        self.avals, self.new_avals = traced.avals, traced.new_avals
        self.variables, self._traced = traced.variables, traced

    def __call__(self, values: dict[Variable, Any], leaves: list[Any]) -> tuple[list[Any], dict[Variable, Any]]:
        """Runs the program: the leaves of the result, and the value of each Variable that it writes."""
        used = set(self.variables)  # for the others, the program has no use
        inputs = [values[variable] if variable in used else None for variable in self._traced.lifted]
        given = [values[variable] for variable in self.given]
        out = self._traced.call(*inputs, *given, *leaves)
        count = self.packed.count
        return out[:count], dict(zip(self.written, out[count:], strict=True))


class Threaded:
    """The Variables of some bodies at the entry of one loop or branching: the values they begin with.

    A stream of random keys that is drawn from inside begins there as a private child, which ends there: how often
    it was drawn from doesn't show outside.

    Attributes:
        values: Variable -> its value at the entry.
        written: Those that a body writes, in one order for all bodies.
    """

    def __init__(self, *bodies: Body):
        variables = list(dict.fromkeys(variable for body in bodies for variable in body.variables))
        self.values: dict[Variable, Any] = dict(zip(variables, _frame.gather(variables), strict=True))
        self.written = [v for v in variables if any(v in body.written for body in bodies)]
        self._streams = Forked({v: self.values[v] for v in self.written if isinstance(v, Rng)})
        self.values |= self._streams.starts

    def state(self, values: dict[Variable, Any] | None = None) -> list[Any]:
        """The values of the written ones; where ``values`` has none, those at the entry."""
        values = self.values if values is None else {**self.values, **values}
        return [values[variable] for variable in self.written]

    def at(self, state: list[Any]) -> dict[Variable, Any]:
        """All values, with these for the written ones."""
        return {**self.values, **dict(zip(self.written, state, strict=True))}

    def write_back(self, state: list[Any]) -> None:
        _frame.write_back(self.written, list(map(self._streams.settled, self.written, state)))
