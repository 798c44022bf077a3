# SPDX-License-Identifier: Apache-2.0
"""Shapes of what functions of anything would return.

| Equinox | here | what differs |
| --- | --- | --- |
| filter_eval_shape | ``jax.eval_shape`` of the arrays | nothing |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tether.compat.equinox.module import Static
from tether.tree import combine, is_array, partition

__all__ = ["filter_eval_shape"]


def _has_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or is_array(leaf)


def filter_eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``fun(*args, **kwargs)`` would return, with a ``jax.ShapeDtypeStruct`` for each array.

    Args:
        fun: Takes and returns anything; a module, too.
        args, kwargs: Arrays, or a ``jax.ShapeDtypeStruct`` for each, and anything else.
    Example:
        >>> eqx.filter_eval_shape(lambda x, name: (x @ x.T, name), jax.ShapeDtypeStruct((2, 3), "float32"), "a")
        (ShapeDtypeStruct(shape=(2, 2), dtype=float32), 'a')
    """
    arrays, rest = partition((fun, args, kwargs), _has_shape)

    def of_arrays(arrays: Any) -> Any:
        fun, args, kwargs = combine(arrays, rest)
        traced, others = partition(fun(*args, **kwargs), _has_shape)
        return traced, Static(others)

    struct, static = jax.eval_shape(of_arrays, arrays)
    return combine(struct, static.value)
