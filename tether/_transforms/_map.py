# SPDX-License-Identifier: Apache-2.0
"""map: a function applied to row after row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether._core.frame import births
from tether._core.structure import is_module
from tether._modules.views import restacked
from tether._transforms import _arguments
from tether._transforms._call import is_stateful
from tether._transforms._eager import run_eagerly
from tether._transforms._scan import run_scan
from tether._transforms._slices import Slices
from tether._transforms._vmap import vmap
from tether.errors import ArgumentError, describe


def map(f: Callable[..., Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """Applies ``f`` to each row of ``xs`` in turn, and stacks the results; the rules are those of ``scan``.

    Args:
        f: The function.
        xs: Arrays and stacked modules, as in ``scan``.
        batch_size: How many rows are computed together, by ``vmap``, whose rules for writes then hold.
    Example:
        >>> tether.map(lambda x: x**2, jnp.arange(4.0)).tolist()
        [0.0, 1.0, 4.0, 9.0]
    """
    _arguments.checked_callable(f, "map")
    if batch_size is None:
        return run_scan("map", functools.partial(_without_carry, f), None, xs)[1]
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ArgumentError(
            "map: no such batch size.",
            got=repr(batch_size),
            expected="a whole number, at least 1",
            fix="leave batch_size= out to take one row after another",
        )
    leaves, treedef = jax.tree.flatten(xs, is_leaf=is_stateful)
    if any(is_stateful(leaf) for leaf in leaves):
        raise ArgumentError(
            "map: with batch_size= it runs over arrays alone.",
            got=", ".join(describe(leaf) for leaf in leaves if is_stateful(leaf)),
            fix=["tether.vmap over a stacked module", "tether.map without batch_size="],
        )
    length = Slices("map", xs, None).length
    whole = length - length % batch_size
    batches = [leaf[:whole].reshape(-1, batch_size, *leaf.shape[1:]) for leaf in leaves]
    rest = [leaf[whole:] for leaf in leaves]
    batched, joined = vmap(f), _Joined(whole)

    def steps() -> Any:
        ys = run_scan("map", functools.partial(_without_carry, batched), None, jax.tree.unflatten(treedef, batches))[1]
        parts = [ys] if whole == length else [ys, batched(jax.tree.unflatten(treedef, rest))]
        return jax.tree.map(joined, *parts, is_leaf=is_module)

    return run_eagerly("map", [f], (xs,), steps)


class _Joined:
    """Joins the results of whole batches, ``[batches, batch_size, ...]``, and those of the rest, ``[rows, ...]``."""

    def __init__(self, count: int):
        self._count, self._birth = count, next(births)

    def __call__(self, batches: Any, *rest: Any) -> Any:
        if not is_module(batches):
            return jnp.concatenate([batches.reshape(self._count, *batches.shape[2:]), *rest])
        if batches._tether.birth < self._birth:  # it was there before
            return batches
        columns = zip(*[jax.tree.leaves(part) for part in (batches, *rest)], strict=True)
        return jax.tree.unflatten(jax.tree.structure(restacked(batches, -1)), [self(*column) for column in columns])


def _without_carry(f: Callable[..., Any], _: None, x: Any) -> tuple[None, Any]:
    return None, f(x)
