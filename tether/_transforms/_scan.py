# SPDX-License-Identifier: Apache-2.0
"""scan and map: a loop over the first axis of arrays and of stacked modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether._core import frame as _frame
from tether._core.lift import unpack
from tether._core.structure import is_module
from tether._modules.capture import cells_for, looking_anew, needs_rows
from tether._modules.views import restacked
from tether._transforms import _arguments
from tether._transforms._body import Body, Operands, Threaded
from tether._transforms._carry import Carry
from tether._transforms._checkpointed import checkpointed_scan
from tether._transforms._eager import is_eager, run_eagerly
from tether._transforms._slices import Slices
from tether._transforms._treeverse import NEVER
from tether.errors import ArgumentError, StructureError, describe


def scan(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    *,
    kind: str = "lax",
    checkpoints: int | str | None = None,
) -> tuple[Any, Any]:
    """Runs ``carry, y = f(carry, x)`` for each ``x`` in turn, and stacks the ``y``.

    Variables that ``f`` writes are carried from turn to turn; all others are closed over. ``f`` may come by its
    modules in any way. Its Python runs once for each compilation. A random stream that is drawn from goes on from
    turn to turn, and advances once outside.

    Args:
        f: The body.
        init: The carry at the entry. A module in it is shared, if ``f`` returns that module; one that ``f`` replaces by
            another of its structure is a value, and is returned as a new module.
        xs: Arrays are sliced along their first axis, and so are stacked modules: ``f`` gets one member, and what it
            writes to the member lands in its row.
        length: Number of turns, where ``xs`` doesn't say it.
        reverse: Whether the last ``x`` comes first.
        unroll: As in ``jax.lax.scan``.
        kind: "lax"; or "checkpointed": the gradient keeps ``checkpoints`` copies of the carry, no other values of the
            turns, and runs turns again. It has one derivative in reverse mode, and that in forward mode.
        checkpoints: Of "checkpointed": how many copies, at least 1, or "all"; left out, ``sqrt(2 * turns)``, with which
            each turn runs again about twice.
    Returns:
        ``(carry, ys)``. A module made by ``f`` comes back stacked among ``ys``.
    Raises:
        ShapeError, DtypeError, StructureError: ``f`` hands on another carry than it was given; lengths that differ.
        StackedError: a module in ``xs`` that isn't stacked.
        GradientError: a derivative that a checkpointed scan doesn't have.
    Example:
        >>> layers = tether.stack([nn.Linear(3, 3) for _ in range(4)])
        >>> y, _ = tether.scan(lambda x, layer: (layer(x), None), jnp.ones(3), layers)
        >>> y.shape
        (3,)
        >>> calls = tether.State(0)
        >>> def count(total, x):
        ...     calls.value = calls.value + 1
        ...     return total + x, None
        >>> float(tether.scan(count, 0.0, jnp.arange(5.0))[0]), int(calls.value)
        (10.0, 5)
    """
    _arguments.checked_callable(f, "scan")
    if kind not in ("lax", "checkpointed"):
        raise ArgumentError("scan: no such kind.", got=describe(kind), expected='"lax" or "checkpointed"')
    options: dict[str, Any] = {"unroll": unroll}
    if kind == "lax":
        return run_scan("scan", f, init, xs, length, reverse=reverse, _split_transpose=_split_transpose, **options)
    if checkpoints not in (None, "all"):
        _arguments.checked_count(checkpoints, "scan", "checkpoints", 1)
    options |= {"loop": checkpointed_scan, "checkpoints": NEVER if checkpoints == "all" else checkpoints}
    return run_scan("scan", f, init, xs, length, reverse=reverse, **options)


def run_scan(
    kind: str,
    f: Callable[..., Any],
    init: Any,
    xs: Any,
    length: int | None = None,
    *,
    reverse: bool = False,
    loop: Callable[..., Any] = jax.lax.scan,
    **options: Any,
) -> tuple[Any, Any]:
    """The loop, on behalf of the transformation that its messages name."""
    slices, carry = Slices(kind, xs, length), Carry(kind, init)

    def check(out: Any) -> Any:
        if not (isinstance(out, tuple | list) and len(out) == 2):
            raise StructureError(
                f"{kind}: the body must return a pair.",
                at=_arguments.name_of(f),
                got=describe(out),
                expected="(carry, y)",
                fix="return carry, None where there is nothing to stack",
            )
        return carry.checked(out[0]), out[1]

    if is_eager() and slices.length:
        turns = range(slices.length)[::-1] if reverse else range(slices.length)
        steps = lambda: _in_python(kind, f, carry.tree, slices, turns, check)
        return run_eagerly(kind, [f], (init, xs), steps, own=slices.given)
    index = [jnp.arange(slices.length)] if needs_rows() else []
    row = jax.ShapeDtypeStruct((), index[0].dtype) if index else None
    trace = lambda: Body(kind, f, Operands(carry.tree, slices.first), slices.given, check, slices.whole, row)
    body = carry.traced(trace, f)
    threaded = Threaded(body)
    packed_carry, packed_ys = body.packed.pair()
    sliced = [variable for variable in body.written if variable in slices.given]
    seen = [variable for variable in body.written if variable.leaves_only]

    def turn(state: Any, x: Any) -> Any:
        (leaves, written), (turn_index, x_leaves, rows) = state, x
        arrays, carried = carry.split(leaves)
        given = dict(zip(slices.given, rows, strict=True))
        out, new = body({**threaded.at(written), **given, **carried}, [*turn_index, *arrays, *x_leaves])
        count = packed_carry.count
        return (out[:count], threaded.state(new)), (out[count:], [new[variable] for variable in [*sliced, *seen]])

    with jax.disable_jit(False) if is_eager() else contextlib.nullcontext():  # no turns: their types must be known
        state, (ys, rows) = loop(
            turn,
            (carry.leaves(), threaded.state()),
            (index, slices.leaves, slices.rows),
            slices.length,
            reverse=reverse,
            **options,
        )
    threaded.write_back(state[1])
    _frame.write_back([*sliced, *cells_for(group.key for group in body.groups)], rows)
    return unpack(packed_carry, state[0]), unpack(packed_ys, ys, born=lambda module: restacked(module, 1))


def _in_python(
    kind: str, f: Callable[..., Any], init: Any, slices: Slices, turns: range, check: Any
) -> tuple[Any, Any]:
    """The loop with concrete values, where nothing is compiled."""
    carry, ys, rows, groups, birth = init, {}, {}, [], _frame.Frame(kind).birth
    for index in turns:
        x, given = slices.turn(index)
        with looking_anew() as seen:
            frame = _frame.Frame(kind)
            frame.row = index
            (carry, ys[index]), written, new = frame.run(given, lambda carry=carry, x=x: check(f(carry, x)))
        groups, after = seen, {**given, **dict(zip(written, new, strict=True))}
        leaving = [*given, *(variable for variable in written if variable.leaves_only)]
        rows[index] = [after.pop(variable) for variable in leaving]
        _frame.write_back(list(after), list(after.values()))
    columns = [jnp.stack(column) for column in zip(*map(rows.get, sorted(rows)), strict=True)]
    _frame.write_back([*slices.given, *cells_for(group.key for group in groups)], columns)

    def stacked(*parts: Any) -> Any:
        if not is_module(parts[0]):
            return jnp.stack(parts)
        if parts[0]._tether.birth < birth and all(part is parts[0] for part in parts):
            return slices.whole(parts[0])
        return restacked(jax.tree.map(stacked, *parts), 1)

    return carry, jax.tree.map(stacked, *map(ys.get, sorted(ys)), is_leaf=is_module)
