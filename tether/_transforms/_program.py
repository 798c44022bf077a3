# SPDX-License-Identifier: Apache-2.0
"""One compiled program: the user's function over the Variables that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from tether._core import trace as _trace
from tether._core.frame import stored
from tether._core.variable import Variable
from tether._modules.module import Module
from tether._transforms._checks import checks_in
from tether._transforms._discovery import Reach
from tether._transforms._traced import Traced


class StaleProgram(Exception):
    """JAX traces a finished program again: another configuration is in force than when it was made."""


class Program:
    """``run(donated, kept, leaves)`` gives the written values, what was captured, then the leaves of the result.

    Values of Variables are as slots hold them: nothing that needs Python runs between a donating program and the
    write-back, where a signal could come between.

    It holds no Variables, so that models of equal structure share it.

    Attributes:
        donated, kept, written: Indices among the lifted Variables: read and written, only read, written.
        placed: Indices of Variables that a shard_map inside has on a mesh, with the sharding.
        mesh: The mesh of a shard_map inside.
        captured: For each captured value its capture's place, its path and its tree.
        is_closed: Whether it holds no value of a trace around, and so may be kept.
        checks: Those that ``error_if`` made in it.
    """

    def __init__(self, name: str, traced: Traced, names: dict[Variable, str]):
        index = {variable: i for i, variable in enumerate(traced.lifted)}
        unchanged = traced.unchanged()
        written = [v for v in traced.written if not v.leaves_only and v not in unchanged]
        self.packed, self.traces, self.is_closed = traced.packed, traced.count, traced.is_closed
        self.checks = checks_in(traced.jaxpr.jaxpr)
        self.written = [index[variable] for variable in written]
        self.placed = {index[v]: sharding for v, sharding in traced.placed.items() if v in index}
        self.mesh = traced.mesh
        self.captured = [group.key for group in traced.groups]
        used = [i for i, is_used in enumerate(traced.used) if is_used]
        changed = set(self.written)
        self.donated = [i for i in used if i in changed]
        self.kept = [i for i in used if i not in changed]
        self.reads: tuple[str, ...] = tuple(names.get(variable, variable.label) for variable in traced.reads)
        self.writes: tuple[str, ...] = tuple(names.get(variable, variable.label) for variable in written)
        seen = [variable for variable in traced.written if variable.leaves_only]
        order = [self.packed.count + traced.written.index(variable) for variable in [*written, *seen]]
        self._impls = [variable.impl for variable in traced.lifted]
        self._call, self._count, self._order = traced.call, len(traced.lifted), [*order, *range(self.packed.count)]
        self.run = self._compiled(name, ())
        self.run_donating = self._compiled(name, (0,))

    def _compiled(self, name: str, donate: tuple[int, ...]) -> Any:
        call, count, order, impls, is_traced = self._call, self._count, self._order, self._impls, []
        indices, written = [*self.donated, *self.kept], self.written

        def run(donated: Any, kept: Any, leaves: Any) -> Any:
            if is_traced and _trace.current() is not _trace.EVALUATING:  # evaluating, it is jax.debug_nans that asks
                raise StaleProgram
            is_traced.append(True)
            values = [None] * count  # where it stays None, the program has no use for it
            for index, value in zip(indices, [*donated, *kept], strict=True):
                values[index] = value if impls[index] is None else jax.random.wrap_key_data(value, impl=impls[index])
            out = call(*values, *leaves)
            new = [out[place] for place in order]
            new[: len(written)] = map(stored, new[: len(written)])
            return new

        run.__name__ = run.__qualname__ = name
        return jax.jit(run, donate_argnums=donate)


def traced(
    call: Callable[[Any], Any],
    rebuild: Callable[[Iterator[Any]], Any],
    leaves: list[Any],
    lifted: list[Variable],
    fixed: dict[Variable, Any],
    reach: Reach,
    name: str,
) -> tuple[Program, list[Variable]]:
    """Traces a function with Variables lifted to inputs: the program, and the Variables that only reading found."""
    made = Traced("jit", name, lambda new: call(rebuild(iter(new))), leaves, lifted, fixed, refer=_Places(reach))
    return Program(name, made, reach.variables()), made.found


class _Places:
    """The place of a module among those in reach, worked out if an output asks for it."""

    def __init__(self, reach: Reach):
        self._reach, self._places = reach, None

    def __call__(self, module: Module) -> Any:
        if self._places is None:
            self._places = {id(part): place for place, part in self._reach.places()}
        return self._places.get(id(module))
