# SPDX-License-Identifier: Apache-2.0
"""One traced program: the user's function as a jaxpr over the Variables that it reads and writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._core.lift import Packed
from tether._core.variable import Variable
from tether._modules.module import Module
from tether._transforms._discovery import Reach
from tether.errors import LeakError, MissedReadWarning

_MOST_TRACES = 8  # of one function, for reads that were missed: more means that each trace finds new Variables


class StaleProgram(Exception):
    """JAX traces a finished program again: another configuration is in force than when it was made."""


class Program:
    """``run(donated, kept, leaves)`` gives the written values, then the leaves of the result.

    Attributes:
        donated, kept, written: Indices among the lifted Variables: read and written, only read, written.
        is_closed: Whether it holds no value of a trace around, and so may be kept.
    """

    def __init__(
        self, name: str, traced: Any, values: list[Any], leaves: list[Any], written: list[int], packed: Packed
    ):
        count, jaxpr = len(values), traced.jaxpr
        around = len(_inputs(jaxpr)) - count - len(leaves)  # values of a trace around come first
        used = _used(jaxpr, around, count)
        self.packed, self.written, self.traces = packed, written, 1
        changed = set(written)
        self.donated = [i for i in range(count) if used[i] and i in changed]
        self.kept = [i for i in range(count) if used[i] and i not in changed]
        self.is_closed = around == 0
        self.reads: tuple[str, ...] = ()
        self.writes: tuple[str, ...] = ()
        self.run: Any = None
        self.run_donating: Any = None
        self._indices = [*self.donated, *self.kept]
        if self.is_closed:
            call = jax.extend.core.jaxpr_as_fun(jaxpr)
            self.run = self._compiled(name, call, count, ())
            self.run_donating = self._compiled(name, call, count, (0,))

    def call_once(self, jitted: Any, values: list[Any]) -> None:
        """Runs by the function that was traced, for a program that holds values of a trace around."""

        def run(donated: Any, kept: Any, leaves: Any) -> Any:
            now = list(values)  # of those that the program doesn't use, any will do
            for index, value in zip(self._indices, [*donated, *kept], strict=True):
                now[index] = value
            return jitted(now, leaves)

        self.run = self.run_donating = run

    def _compiled(self, name: str, call: Any, count: int, donate: tuple[int, ...]) -> Any:
        indices, is_traced = self._indices, []

        def run(donated: Any, kept: Any, leaves: Any) -> Any:
            if is_traced and _trace.current() is not _trace.EVALUATING:  # evaluating, it is jax.debug_nans that asks
                raise StaleProgram
            is_traced.append(True)
            values = [None] * count  # where it stays None, the program has no use for it
            for index, value in zip(indices, [*donated, *kept], strict=True):
                values[index] = value
            return call(*values, *leaves)

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
    found: list[Variable] = []
    for trace in range(1, _MOST_TRACES + 1):
        program, missed = _trial(call, rebuild, leaves, [*lifted, *found], fixed, reach, name)
        if program is not None:
            program.traces = trace
            if found:
                _warn_missed(name, found)
            return program, found
        found += missed
    raise LeakError(
        f"jit: each trace of {name} reads Variables that no trace before has met.",
        at=", ".join(variable.describe() for variable in found[-3:]),
        got=f"{_MOST_TRACES} traces",
        fix="make modules outside the function, or wholly inside it; pass what it uses as arguments",
    )


def _trial(call: Any, rebuild: Any, leaves: Any, variables: list[Variable], fixed: Any, reach: Reach, name: str) -> Any:
    frame = _frame.Frame("jit", miss="note")
    packed: Any = None
    written: list[Variable] = []

    def program(values: Any, leaves: Any) -> Any:
        nonlocal packed, written
        inside = {**fixed, **dict(zip(variables, values, strict=True))}
        refer = _Places(reach)
        packed, written, new = frame.run(inside, lambda: Packed(call(rebuild(iter(leaves))), frame.birth, refer))
        return [*new, *packed.take()]

    jitted, values = jax.jit(program), [_frame.peek(variable) for variable in variables]
    traced = jitted.trace(values, leaves)
    if frame.missed:
        return None, list(frame.missed)
    index = {variable: i for i, variable in enumerate(variables)}
    made = Program(name, traced, values, leaves, [index[variable] for variable in written], packed)
    if not made.is_closed:
        made.call_once(jitted, values)
    names = reach.variables()
    made.reads = tuple(names.get(variable, variable.label) for variable in frame.reads)
    made.writes = tuple(names.get(variable, variable.label) for variable in written)
    return made, []


class _Places:
    """The place of a module among those in reach, worked out if an output asks for it."""

    def __init__(self, reach: Reach):
        self._reach, self._places = reach, None

    def __call__(self, module: Module) -> Any:
        if self._places is None:
            self._places = {id(part): place for place, part in self._reach.places()}
        return self._places.get(id(module))


def _inputs(jaxpr: Any) -> list[Any]:
    return getattr(jaxpr, "jaxpr", jaxpr).invars


def _used(jaxpr: Any, first: int, count: int) -> list[bool]:
    """For each of ``count`` inputs from ``first`` on, whether the program uses it."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    used = {id(atom) for equation in inner.eqns for atom in equation.invars} | {id(atom) for atom in inner.outvars}
    return [id(var) in used for var in inner.invars[first : first + count]]


def _warn_missed(name: str, found: list[Variable]) -> None:
    warnings.warn(
        f"jit: {name} reads Variables that were found only while it was traced.\n"
        f"  at:       {', '.join(variable.describe() for variable in found[:3])}\n"
        "  got:      a Variable behind a property, a registry or another library's object\n"
        "  fix:      pass its module as an argument: the function is traced once, and equal modules share it",
        MissedReadWarning,
        stacklevel=5,
    )
