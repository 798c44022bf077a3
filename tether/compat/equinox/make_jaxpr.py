# SPDX-License-Identifier: Apache-2.0
"""Jaxprs of functions of anything.

| Equinox | here | what differs |
| --- | --- | --- |
| filter_make_jaxpr | ``jax.make_jaxpr`` of the arrays | nothing |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tether.compat.equinox.module import Module, Static
from tether.tree import combine, is_array, partition

__all__ = ["filter_make_jaxpr"]


def _has_shape(leaf: Any) -> bool:
    return is_array(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


class _MakeJaxpr(Module):
    fn: Callable[..., Any]

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        arrays, rest = partition((args, kwargs), _has_shape)
        leaves, treedef = jax.tree.flatten(arrays)

        def of_arrays(*leaves: Any) -> Any:
            args, kwargs = combine(jax.tree.unflatten(treedef, leaves), rest)
            traced, others = partition(self.fn(*args, **kwargs), is_array)
            return traced, Static(others)

        jaxpr, (struct, static) = jax.make_jaxpr(of_arrays, return_shape=True)(*leaves)
        return jaxpr, struct, static.value


def filter_make_jaxpr(fun: Callable[..., Any]) -> Any:
    """Makes a function that returns the jaxpr of ``fun``, the shapes of its arrays, and the rest of its result.

    Args:
        fun: Takes and returns anything. What has a shape and a dtype is traced.
    Example:
        >>> jaxpr, struct, rest = eqx.filter_make_jaxpr(lambda x, n: (x * n, n))(jnp.zeros(2), 3)
        >>> struct[0].shape, rest[1]
        ((2,), 3)
    """
    return _MakeJaxpr(fun)
