# SPDX-License-Identifier: Apache-2.0
"""Python functions of anything, called from inside compiled ones.

| Equinox | here | what differs |
| --- | --- | --- |
| filter_pure_callback | ``jax.pure_callback`` of the arrays | ``vectorized=`` is JAX's ``vmap_method=`` today |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tether.compat.equinox._errors import StateError
from tether.tree import combine, is_array, partition, tree_equal

__all__ = ["filter_pure_callback"]


def _has_shape(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def filter_pure_callback(
    callback: Callable[..., Any], *args: Any, result_shape_dtypes: Any, vectorized: bool = False, **kwargs: Any
) -> Any:
    """Calls a Python function, also where a compiled one runs.

    Args:
        callback: The function; it gets concrete arrays.
        args, kwargs: Its arguments, anything.
        result_shape_dtypes: What it returns, with a ``jax.ShapeDtypeStruct`` for each array.
        vectorized: Whether ``jax.vmap`` calls it once with all lanes in front, and not lane by lane.
    Raises:
        RuntimeError: It returned something else than ``result_shape_dtypes`` says.
    Example:
        >>> shape = jax.ShapeDtypeStruct((), jnp.float32)
        >>> call = lambda x: eqx.filter_pure_callback(np.cos, x, result_shape_dtypes=shape)
        >>> float(eqx.filter_jit(call)(jnp.array(0.0)))
        1.0
    """
    arrays, rest = partition((args, kwargs), is_array)
    struct, static = partition(result_shape_dtypes, _has_shape)

    def of_arrays(arrays: Any) -> Any:
        args, kwargs = combine(arrays, rest)
        traced, others = partition(callback(*args, **kwargs), is_array)
        if not tree_equal(others, static):
            raise StateError(
                "filter_pure_callback: the function returned something else than result_shape_dtypes says.",
                got=repr(others),
                expected=repr(static),
                fix="what is no array must be equal to what stands in result_shape_dtypes",
            )
        return traced

    method = "expand_dims" if vectorized else "sequential"
    return combine(jax.pure_callback(of_arrays, struct, arrays, vmap_method=method), static)
