# SPDX-License-Identifier: Apache-2.0
"""The affine map of a vector, and no map at all.

| Equinox | here | what differs |
| --- | --- | --- |
| Linear, Identity | the same fields and draws | |
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.equinox.module import Module, static_field
from tether.compat.equinox.nn._arguments import uniform

__all__ = ["Identity", "Linear"]


class Linear(Module):
    """Maps a vector affinely: y = W x + b.

    Args:
        in_features: Size of x.
        out_features: Size of y.
        use_bias: Whether b is there.
        key: PRNG key of the first values, which are U(-k, k), k = 1 / sqrt(in_features).
    Shapes:
        x: float[in_features] -> float[out_features]
    Example:
        >>> linear = eqx.nn.Linear(2, 3, key=jax.random.PRNGKey(0))
        >>> jax.vmap(linear)(jnp.ones((5, 2))).shape
        (5, 3)
    """

    weight: jax.Array
    bias: jax.Array | None
    in_features: int = static_field()
    out_features: int = static_field()
    use_bias: bool = static_field()

    def __init__(self, in_features: int, out_features: int, use_bias: bool = True, *, key: Any):
        super().__init__()
        weight_key, bias_key = jax.random.split(key, 2)
        limit = 1 / math.sqrt(in_features)
        self.weight = uniform(weight_key, (out_features, in_features), limit)
        self.bias = uniform(bias_key, (out_features,), limit) if use_bias else None
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The mapped vector; the key is ignored."""
        y = jnp.asarray(self.weight) @ x
        return y if self.bias is None else y + jnp.asarray(self.bias)


class Identity(Module):
    """Gives back what it is called with.

    Args:
        args: Ignored.
        kwargs: Ignored.
    Example:
        >>> eqx.nn.Identity(64, any="thing")(3)
        3
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        """What came; the key is ignored."""
        return x
