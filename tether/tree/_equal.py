# SPDX-License-Identifier: Apache-2.0
"""``tree_equal``: whether trees are equal, structure and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tether.errors import ArgumentError
from tether.tree._predicates import is_array

__all__ = ["tree_equal"]


def tree_equal(*pytrees: Any, typematch: bool = False, rtol: float = 0.0, atol: float = 0.0) -> Any:
    """Whether all trees have one structure and equal leaves.

    Arrays are equal if shape, dtype and elements are; an array and a Python number never are; NaN equals nothing.
    Other leaves are compared by ``==``.

    Args:
        pytrees: Any trees; one alone is equal.
        typematch: An array of NumPy doesn't equal one of JAX, nor 1 the number 1.0.
        rtol, atol: Relative and absolute tolerance for floating and complex arrays, as in ``jnp.allclose``.
    Returns:
        False, as soon as the trees differ in what is known while tracing; else a bool, of Python, NumPy or JAX,
        traced if the leaves are. ``tree_equal(a, b) is False`` is safe inside a transformation.
    Raises:
        ArgumentError: No tree.
    Example:
        >>> bool(tether.tree_equal({"a": jnp.ones(2)}, {"a": jnp.ones(2)}))
        True
        >>> tether.tree_equal([1], (1,))
        False
    """
    if not pytrees:
        raise ArgumentError("tree_equal: no tree was given.", got="tree_equal()", fix="tree_equal(one, other)")
    leaves, treedef = jax.tree.flatten(pytrees[0])
    result: Any = True
    for tree in pytrees[1:]:
        others, other = jax.tree.flatten(tree)
        if other != treedef:
            return False
        for one, two in zip(leaves, others, strict=True):
            same = _equal(one, two, typematch, rtol, atol)
            if same is False:
                return False
            result = _and(result, same)
    return result


def _equal(one: Any, two: Any, typematch: bool, rtol: float, atol: float) -> Any:
    if typematch and _type(one) is not _type(two):
        return False
    if is_array(one) != is_array(two):
        return False
    if not is_array(one):
        return one == two
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, two = jax.random.key_data(one), jax.random.key_data(two)
    one, two, xp = _at_one_place(one, two)
    if (rtol or atol) and jnp.issubdtype(one.dtype, jnp.inexact):
        return xp.allclose(one, two, rtol=rtol, atol=atol)
    return xp.array_equal(one, two)


def _type(leaf: Any) -> type:
    return jax.Array if isinstance(leaf, jax.Array) else type(leaf)  # a tracer is an array


def _at_one_place(one: Any, two: Any) -> tuple[Any, Any, Any]:
    """Both arrays where they can be compared, and the module that does it: JAX refuses two devices."""
    if not isinstance(one, jax.Array) and not isinstance(two, jax.Array):
        return one, two, np
    if _is_elsewhere(one, two):
        return np.asarray(one), np.asarray(two), np
    return one, two, jnp


def _and(one: Any, two: Any) -> Any:
    return np.bool_(bool(one) and bool(two)) if _is_elsewhere(one, two) else one & two


def _is_elsewhere(one: Any, two: Any) -> bool:
    concrete = all(isinstance(x, jax.Array) and not isinstance(x, Tracer) for x in (one, two))
    return concrete and one.sharding.device_set != two.sharding.device_set
