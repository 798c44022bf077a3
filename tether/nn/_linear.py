# SPDX-License-Identifier: Apache-2.0
"""The affine map of the last axis."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module
from tether.errors import ShapeError, describe
from tether.nn import init
from tether.nn._inputs import as_array, cast, inexact_dtype, initial, integer, name_of
from tether.random import keys


class Linear(Module):
    """Maps the last axis affinely.

    y = x W^T + b

    Computes in the dtype of a floating x, for an integer x in the dtype of the weight; ``compute_dtype``, set by a
    view, goes before both.

    Args:
        in_features: Size of the last axis of x, at least 1.
        out_features: Size of the last axis of y, at least 1.
        use_bias: Whether b is there.
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
        weight_init, bias_init: Functions (key, shape, dtype) -> array as in ``nn.init``; None is U(-k, k),
            k = 1 / sqrt(in_features).
    Variables:
        weight: Param, float[out_features, in_features].
        bias: Param, float[out_features]; None without use_bias.
    Shapes:
        x: float[..., in_features] -> float[..., out_features]
    Raises:
        ShapeError: the last axis of x is not in_features.
        DtypeError: x is not an array of numbers.
        ArgumentError: a size below 1, or a dtype that isn't floating.
    Example:
        >>> linear = nn.Linear(5, 3, key=jax.random.key(0))
        >>> linear(jnp.ones((2, 7, 5))).shape
        (2, 7, 3)
    References:
        torch.nn.Linear, PyTorch 2.13, for layout and first values.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
        weight_init: init.Initializer | None = None,
        bias_init: init.Initializer | None = None,
    ):
        name = name_of(self)
        self.in_features = integer(name, "in_features", in_features)
        self.out_features = integer(name, "out_features", out_features)
        self.compute_dtype = None
        dtype = inexact_dtype(name, "dtype", dtype)
        default = init.symmetric_uniform(1 / math.sqrt(self.in_features))
        # Two keys whether or not there is a bias: the weight of a seed doesn't depend on use_bias.
        weight_key, bias_key = keys(key, 2)
        shape = (self.out_features, self.in_features)
        self.weight = Param(initial(name, "weight", weight_init, default, weight_key, shape, dtype))
        self.bias = None
        if use_bias:
            self.bias = Param(initial(name, "bias", bias_init, default, bias_key, shape[:1], dtype))

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        if x.shape[-1:] != (self.in_features,):
            raise ShapeError(
                f"{name_of(self)}: the last axis of x is not in_features, {self.in_features}.",
                got=describe(x),
                expected=f"[..., {self.in_features}]",
                fix=[
                    "in_features as the input has them",
                    "x.reshape(x.shape[0], -1), or nn.Flatten, before this layer",
                ],
            )
        h, weight, bias = cast(self, x, self.weight, self.bias)
        # h W^T, contracting the last axes; h @ weight.T would dispatch a transpose of its own in an eager call.
        y = lax.dot_general(h, weight, (((h.ndim - 1,), (1,)), ((), ())))
        if bias is None:
            return y
        # For users who run with "raise". In an eager call an explicit broadcast would cost more than the sum.
        with jax.numpy_rank_promotion("allow"):
            return y + bias
