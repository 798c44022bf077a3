# SPDX-License-Identifier: Apache-2.0
"""Variables in a ``jax.Ref``: those that a plain JAX transformation, outside all Frames, reads or writes.

Such a transformation caches its traces by the identity of the function and knows nothing of Variables. What it does
know is ``jax.Ref``: it makes reads inputs of the program, and keeps writes in order. So the Variable's array moves
into a Ref, once and for good: a cached trace holds that Ref. Every access goes through it from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from tether._core import trace as _trace

if TYPE_CHECKING:
    from tether._core.variable import Variable

moved: dict[weakref.ref[Variable], str] = {}  # Variable -> the line that made it so; empty in most programs
cached: list[bool] = []  # filled with the first: JAX's caches may hold Refs from then on, also of dead Variables
_PROVEN = ("jit", "scan", "fori_loop", "while_body", "while_cond", "cond", "switch", "closure_convert")
_BRANCHING = {"while_cond", "cond", "switch"}


def holds(variable: Variable) -> bool:
    """Whether a Variable's array lives in a Ref."""
    return bool(moved) and isinstance(variable._value, jax.Ref)


def where(variable: Variable) -> str | None:
    """File and line of the access that moved a Variable into a Ref; None, if none has."""
    return moved.get(weakref.ref(variable))


def refusal(variable: Variable, traces: list[Any], action: str) -> str | None:
    """Why a Ref can't do it in these traces, innermost first; None, if it can."""
    if not isinstance(variable._value, jax.Array | jax.Ref):
        return "the cell holds no array"
    stages = [_trace.stage(trace) for trace in traces]
    staged = [stage for stage, trace in zip(stages, traces, strict=True) if _trace.is_staged(trace)]
    wrong = [stage for stage in staged if stage not in _PROVEN or (stage == "while_cond" and action == "write")]
    if wrong or _trace.has_lost_parent(traces[-1]):
        return f"JAX gets a {action} of a jax.Ref wrong in {(wrong or staged)[0]}"
    is_mapped = "BatchTrace" in stages[stages.index(staged[0]) :]
    if is_mapped and (action == "write" or not _BRANCHING.isdisjoint(staged)):
        return f"JAX can't batch a {action} of a jax.Ref in {staged[0]}"
    return None


def get(variable: Variable, trace: Any) -> Any:
    """The value as of now, as a value of ``trace``, which is this one or around it."""
    if not holds(variable):
        return variable._value
    with _trace.inside(trace):
        return variable._value[...]


def fetched(values: list[Any]) -> list[Any]:
    """Values as they are now, where some stand in Refs; outside all traces."""
    return [value[...] if isinstance(value, jax.Ref) else value for value in values]


def without(variables: Sequence[Variable], values: Iterable[Any]) -> tuple[list[Variable], list[Any]]:
    """Writes those of many that live in Refs; the others, and their values. Outside all traces."""
    pairs = list(zip(variables, values, strict=True))
    for variable, value in pairs:
        if holds(variable):
            variable._value[...] = _brought(value, variable._value)
    rest = [pair for pair in pairs if not holds(pair[0])]
    return [variable for variable, _ in rest], [value for _, value in rest]


def put(variable: Variable, value: Any, trace: Any) -> None:
    """Writes the Ref, as a step of ``trace``."""
    with _trace.inside(trace):
        variable._value[...] = _brought(value, variable._value)


def _brought(value: Any, ref: Any) -> Any:
    """The value on the devices of a Ref, which stays where it was made."""
    return jax.device_put(value, ref.sharding) if _trace.owner(value) is None else value


def move(variable: Variable) -> None:
    """Moves the array into a Ref, if it isn't in one."""
    if holds(variable):
        return
    place = _trace.user_line()
    with _trace.inside(_trace.EVALUATING):
        new = jax.new_ref(variable._value)
    cached[:] = [True]
    moved[weakref.ref(variable, lambda gone: moved.pop(gone, None))] = place
    variable._value = new
