# SPDX-License-Identifier: Apache-2.0
"""cond and switch: one of several branches; what the others would have written stays as it was."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._core.frame import write_back
from tether._core.lift import Kept, Packed, unpack
from tether._core.structure import is_module
from tether._core.variable import Variable
from tether._modules.capture import Group, cells_for
from tether._transforms import _arguments
from tether._transforms._body import Body, Operands, Threaded
from tether._transforms._eager import is_eager, run_eagerly
from tether.errors import ArgumentError, StructureError, describe


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any) -> Any:
    """Runs ``true_fun(*operands)`` or ``false_fun(*operands)``.

    What the branch that is taken writes is kept; the other one changes nothing. The branches may write different
    Variables. The Python of each runs once for each compilation.

    Args:
        pred: A scalar.
        true_fun: The branch for True.
        false_fun: The branch for False.
        *operands: Arguments of both, modules among them.
    Returns:
        The result of the branch; both must return the same structure, shapes and dtypes.
    Raises:
        ArgumentError: ``pred`` is no scalar.
        StructureError: the results of the branches differ.
    Example:
        >>> seen = tether.State(0)
        >>> def count(x):
        ...     seen.value = seen.value + 1
        ...     return x
        >>> float(tether.cond(True, count, jnp.negative, 2.0)), float(tether.cond(False, count, jnp.negative, 2.0))
        (2.0, -2.0)
        >>> int(seen.value)
        1
    """
    pred = _scalar("cond", "pred", pred)
    choice = pred if pred.dtype == jnp.bool_ else pred != 0
    branches = {"true_fun": true_fun, "false_fun": false_fun}
    return _chosen(
        "cond", branches, operands, lambda: 1 - int(choice), lambda t, f, *args: jax.lax.cond(choice, t, f, *args)
    )


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Runs one of several branches, ``branches[index](*operands)``; an index out of range is clamped.

    The rules are those of ``cond``.

    Example:
        >>> float(tether.switch(2, [jnp.sin, jnp.cos, jnp.negative], 3.0))
        -3.0
    """
    index = _scalar("switch", "index", index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise ArgumentError(
            "switch: the index is no integer.",
            got=describe(index),
            expected="an integer scalar",
            fix=["tether.cond, for True or False", "index.astype(jnp.int32)"],
        )
    if not isinstance(branches, Sequence) or not branches:
        raise ArgumentError(
            "switch: there are no branches.",
            got=describe(branches),
            expected="a list of functions",
            fix="tether.switch(index, [first, second], x)",
        )
    named = {f"branches[{place}]": branch for place, branch in enumerate(branches)}
    taken = lambda: int(np.clip(int(index), 0, len(branches) - 1))
    return _chosen("switch", named, operands, taken, lambda *parts: jax.lax.switch(index, parts[:-1], parts[-1]))


def _chosen(kind: str, branches: dict[str, Any], operands: Any, taken: Callable[[], int], choose: Any) -> Any:
    for name, fun in branches.items():
        _arguments.checked_callable(fun, f"{kind}, {name}")
    funs = list(branches.values())
    if is_eager():
        with contextlib.suppress(jax.errors.ConcretizationTypeError):  # lanes differ: both branches are needed
            return run_eagerly(kind, funs, operands, lambda: funs[taken()](*operands))
    given = Operands(*operands)
    bodies = [Body(kind, fun, given) for fun in funs]
    _check_alike(kind, dict(zip(branches, bodies, strict=True)))
    threaded, seen = Threaded(*bodies), _captured(bodies)

    def program(place: int) -> Callable[[Any], Any]:
        def run(leaves: list[Any]) -> Any:
            out, new = bodies[place](threaded.values, leaves)
            return out, threaded.state(new), [_values(groups.get(place), groups, bodies, new) for groups in seen]

        return run

    out, state, captured = choose(*map(program, range(len(bodies))), given.leaves)
    threaded.write_back(state)
    write_back(cells_for(next(iter(groups.values())).key for groups in seen), itertools.chain(*captured))
    return unpack(bodies[0].packed, out)


def _captured(bodies: list[Body]) -> list[dict[int, Group]]:
    """What the branches captured: for each value, the branches that have it."""
    found: dict[Any, dict[int, Group]] = {}
    for place, body in enumerate(bodies):
        counts: collections.Counter[Any] = collections.Counter()
        for group in body.groups:
            avals = tuple((body.new_avals[cell].shape, body.new_avals[cell].dtype) for cell in group.cells.variables)
            counts[group.key] += 1
            found.setdefault((group.key, avals, counts[group.key]), {})[place] = group
    return list(found.values())


def _values(group: Group | None, groups: dict[int, Group], bodies: list[Body], new: dict[Variable, Any]) -> list[Any]:
    """What a branch gives for one captured value: zeros, if it has none."""
    if group is not None:
        return [new[variable] for variable in group.cells.variables]
    place, other = next(iter(groups.items()))
    avals = [bodies[place].new_avals[variable] for variable in other.cells.variables]
    return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]


def _scalar(kind: str, name: str, value: Any) -> Any:
    try:
        scalar = jnp.asarray(value)
    except (TypeError, ValueError):
        scalar = None
    if scalar is None or scalar.ndim:
        raise ArgumentError(
            f"{kind}: {name} is no scalar.",
            got=describe(value),
            expected="a scalar",
            fix=[".any() or .all() of it", "jnp.where chooses element by element"],
        )
    return scalar


def _check_alike(kind: str, bodies: dict[str, Body]) -> None:
    """Raises if two branches return different things."""
    (first, one), *others = bodies.items()
    for name, other in others:
        if one.packed.treedef != other.packed.treedef:
            got = [f"{name}: {_shown(body.packed)}" for name, body in ((first, one), (name, other))]
            where = "jax.tree.map(lambda a, b: jnp.where(pred, a, b), one, other) is a new module of the chosen values"
            others = [where] if one.packed.has_kept or other.packed.has_kept else []
            raise _differ(kind, "structures", "the result", got, others)
        for place, (a, b) in enumerate(zip(one.avals, other.avals, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype:
                got = [f"{first}: {describe(a)}", f"{name}: {describe(b)}"]
                raise _differ(kind, "shapes or dtypes", f"leaf {place} of the result", got)


class _Text:
    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _shown(packed: Packed) -> str:
    """The tree of a result, with * for an array."""

    def text(part: Any) -> Any:
        if isinstance(part, Kept):
            return _Text(f"<an existing {type(part.target).__name__} {part.target._tether.label}".rstrip() + ">")
        return _Text(f"<a new {type(part).__name__}>") if is_module(part) else part

    tree = jax.tree.unflatten(packed.treedef, [_Text("*")] * packed.count)
    return repr(jax.tree.map(text, tree, is_leaf=lambda part: isinstance(part, Kept) or is_module(part)))


def _differ(kind: str, what: str, at: str, got: list[str], others: Sequence[str] = ()) -> StructureError:
    return StructureError(
        f"{kind}: the branches return different {what}.",
        at=at,
        got=", ".join(got),
        expected="the same structure, shapes and dtypes of all",
        fix=["return the same tree of the same modules from each branch, cast with .astype", *others],
    )
