# SPDX-License-Identifier: Apache-2.0
"""Predicates of one leaf: is it an array, could it be one, is it a float.

What to hand to ``filter`` and ``partition``. They look at the leaf alone; which *kind* of cell a leaf
of a module comes from (trainable, statistic, key) is what a selection asks, see ``tether.filter``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["is_array", "is_array_like", "is_inexact_array", "is_inexact_array_like"]


def is_array(element: Any) -> bool:
    """Whether it is an array: of JAX (tracers and typed PRNG keys too) or of NumPy (its scalars too).

    A ``jax.ShapeDtypeStruct`` and a Python number are not.

    Example:
        >>> tether.is_array(jnp.zeros(3)), tether.is_array(np.float32(1)), tether.is_array(1.0)
        (True, True, False)
    """
    return isinstance(element, jax.Array | np.ndarray | np.generic)


def is_array_like(element: Any) -> bool:
    """Whether JAX takes it as an array: an array, a Python number or bool, or anything with ``__jax_array__``.

    Example:
        >>> tether.is_array_like(1.0), tether.is_array_like("1.0")
        (True, False)
    """
    return is_array(element) or isinstance(element, bool | int | float | complex) or _converts(element)


def is_inexact_array(element: Any) -> bool:
    """Whether it is an array of floating or complex dtype: what a gradient exists for.

    In a module with BatchNorm that includes the running statistics; ``Param`` leaves them out.

    Example:
        >>> tether.is_inexact_array(jnp.zeros(3)), tether.is_inexact_array(jnp.zeros(3, int))
        (True, False)
    """
    return is_array(element) and bool(jnp.issubdtype(element.dtype, jnp.inexact))


def is_inexact_array_like(element: Any) -> bool:
    """Whether it is an array of floating or complex dtype, or a Python float or complex number.

    Example:
        >>> tether.is_inexact_array_like(1.0), tether.is_inexact_array_like(1)
        (True, False)
    """
    if _converts(element):
        element = element.__jax_array__()
    return isinstance(element, float | complex) or is_inexact_array(element)


def _converts(element: Any) -> bool:
    # Of the type: a class that defines it is no array itself. A tracer has it too, as None.
    return callable(getattr(type(element), "__jax_array__", None))
