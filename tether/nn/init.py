# SPDX-License-Identifier: Apache-2.0
"""Initializers: functions ``(key, shape, dtype) -> array``.

They are JAX's, under JAX's names. Apart because of one thing: weights here are laid out ``[out, in, *space]``, and
JAX's own defaults read ``[*space, in, out]``, which gives the wrong fan for the layers of this library. These read
ours.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.nn.initializers import Initializer, constant, normal, ones, truncated_normal, uniform, zeros

__all__ = [
    "Initializer",
    "constant",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "lecun_normal",
    "lecun_uniform",
    "normal",
    "ones",
    "orthogonal",
    "symmetric_uniform",
    "truncated_normal",
    "uniform",
    "variance_scaling",
    "zeros",
]

variance_scaling = partial(initializers.variance_scaling, in_axis=1, out_axis=0)
glorot_normal = partial(initializers.glorot_normal, in_axis=1, out_axis=0)
glorot_uniform = partial(initializers.glorot_uniform, in_axis=1, out_axis=0)
he_normal = partial(initializers.he_normal, in_axis=1, out_axis=0)
he_uniform = partial(initializers.he_uniform, in_axis=1, out_axis=0)
lecun_normal = partial(initializers.lecun_normal, in_axis=1, out_axis=0)
lecun_uniform = partial(initializers.lecun_uniform, in_axis=1, out_axis=0)


def orthogonal(scale: float = 1.0, column_axis: int = 0) -> Initializer:
    """Draws matrices with orthonormal rows, or columns where there are fewer of them, times ``scale``.

    JAX's, which has no decomposition for 16 bits: those are drawn in float32 and rounded.

    Args:
        scale: Length of the rows or columns.
        column_axis: Axis of the columns; all others together are that of the rows.
    Example:
        >>> weight = nn.init.orthogonal()(jax.random.key(0), (2, 3), jnp.float32)
        >>> bool(jnp.allclose(weight @ weight.T, jnp.eye(2), atol=1e-6))
        True
    References:
        Saxe et al. 2013, arXiv:1312.6120, section 3.
    """
    exact = initializers.orthogonal(scale, column_axis)

    def initializer(key, shape, dtype=jnp.float32, out_sharding=None):
        wide = dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32
        return exact(key, shape, wide).astype(dtype)

    return initializer


def symmetric_uniform(bound: float) -> Initializer:
    """Draws from U(-bound, bound); JAX's ``uniform(scale)`` is U(0, scale).

    With ``bound = 1 / sqrt(fan_in)`` it is the default of Linear and Conv, for weight and bias, as in PyTorch. Real and
    imaginary part are drawn each by itself.

    Args:
        bound: Half the width of the interval, at least 0.
    Example:
        >>> nn.Linear(4, 2, key=jax.random.key(0), weight_init=nn.init.symmetric_uniform(0.1)).weight.shape
        (2, 4)
    References:
        torch.nn.Linear and torch.nn.Conv2d, section Variables, PyTorch 2.13.
    """

    def initializer(key, shape, dtype=jnp.float32, out_sharding=None):
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            return jax.random.uniform(key, shape, dtype, -bound, bound)
        part = jnp.finfo(dtype).dtype
        real, imaginary = (jax.random.uniform(k, shape, part, -bound, bound) for k in jax.random.split(key))
        return jax.lax.complex(real, imaginary)

    return initializer
