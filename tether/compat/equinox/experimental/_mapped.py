# SPDX-License-Identifier: Apache-2.0
"""Writes of a ``jax.Ref`` in a program that ``jax.vmap`` maps later: ``vmap`` of ``scan``, ``vmap`` of ``jit``.

| Equinox | here | what differs |
| --- | --- | --- |
| host callbacks | a write that waits for the vmaps around it | lanes that write other values are an error |

JAX refuses to map any write of a Ref that all lanes share. A ``custom_vmap`` stands for the write until it is mapped:
its rule sees which operands differ from lane to lane. It is mapped for sure, because it holds the index of its lane
along each axis: a program with an axis name in it can't be compiled.

Leans on one thing that JAX doesn't document, held by ``tests/compat/equinox/experimental/test_mapped.py`` against every
supported version: the trace of a vmap has ``axis_data.name``.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.custom_batching import custom_vmap

from tether._core import frame as _frame
from tether._core import ref as _ref
from tether._core import trace as _trace
from tether.compat.equinox._errors import StateError
from tether.errors import describe

_LOOPS = ("jit", "scan", "fori_loop")


def axes_around(target: Any) -> list[Any]:
    """The names of the vmaps that map the program recorded in ``target``; none, if one can't be waited for."""
    traces = _trace.chain(target)
    stages = [_trace.stage(trace) for trace in traces]
    if _frame.thread.frames or "BatchTrace" not in stages:
        return []
    first = stages.index("BatchTrace")
    last = len(stages) - stages[::-1].index("BatchTrace")
    names = [trace.axis_data.name for trace in traces[first:last] if hasattr(trace, "axis_data")]
    is_plain = all(stage in _LOOPS for stage in stages[:first]) and len(names) == last - first
    return names if is_plain and all(isinstance(name, str | int | tuple) for name in names) else []


def write(cell: Any, value: Any, axes: list[Any]) -> None:
    """Writes a cell that moves into a Ref, once for all lanes along the axes."""
    _ref.move(cell)
    _when_mapped(cell._value, value, [jax.lax.axis_index(name) for name in axes])


def _when_mapped(ref: Any, value: Any, lanes: list[Any]) -> None:
    @custom_vmap
    def waiting(ref: Any, value: Any, lanes: list[Any]) -> tuple[()]:
        jax.debug.callback(_never)  # an effect, so that nobody drops what has no result
        return ()

    @waiting.def_vmap
    def rule(size: int, mapped: Any, ref: Any, value: Any, lanes: list[Any]) -> tuple[tuple[()], tuple[()]]:
        if mapped[1]:
            raise StateError(
                "set_state: the state differs from lane to lane of a vmap around a loop or a jit.",
                got=f"{describe(value)}, of {size} lanes",
                expected="one value for all lanes",
                fix=["jax.lax.pmean(state, axis_name) before it is saved", "the loop around the vmap: scan(vmap(f))"],
            )
        rest = [lane for lane, is_mapped in zip(lanes, mapped[2], strict=True) if not is_mapped]
        if rest:
            _when_mapped(ref, value, rest)
        else:
            ref[...] = value
        return (), ()

    waiting(ref, value, lanes)


def _never() -> None:
    raise StateError("set_state: a write in a vmap was lost; please report the program.")
