# SPDX-License-Identifier: Apache-2.0
"""The bilinear map of two last axes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module
from tether.errors import ShapeError, describe
from tether.nn import init
from tether.nn._inputs import as_array, cast, inexact_dtype, initial, integer, name_of
from tether.random import keys


class Bilinear(Module):
    """Maps the last axes of two arrays bilinearly.

    y[o] = x1^T W[o] x2 + b[o]

    Args:
        in1_features, in2_features: Sizes of the last axes of x1 and x2, at least 1.
        out_features: Size of the last axis of y, at least 1.
        use_bias, key, dtype, weight_init, bias_init: As in Linear; the default is U(-k, k), k = 1 / sqrt(in1_features).
    Variables:
        weight: Param, float[out_features, in1_features, in2_features].
        bias: Param, float[out_features]; None without use_bias.
    Shapes:
        x1, x2: float[..., in1_features], float[..., in2_features] -> float[..., out_features]
    Raises:
        ShapeError: a last axis of another size, or different leading axes; they are never broadcast.
        DtypeError: an input is not an array of numbers.
        ArgumentError: a size below 1, or a dtype that isn't floating.
    Example:
        >>> bilinear = nn.Bilinear(5, 4, 3, key=jax.random.key(0))
        >>> bilinear(jnp.ones((2, 5)), jnp.ones((2, 4))).shape
        (2, 3)
    References:
        torch.nn.Bilinear, PyTorch 2.13, for layout and first values.
    """

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
        weight_init: init.Initializer | None = None,
        bias_init: init.Initializer | None = None,
    ):
        name = name_of(self)
        self.in1_features = integer(name, "in1_features", in1_features)
        self.in2_features = integer(name, "in2_features", in2_features)
        self.out_features = integer(name, "out_features", out_features)
        self.compute_dtype = None
        dtype = inexact_dtype(name, "dtype", dtype)
        default = init.symmetric_uniform(1 / math.sqrt(self.in1_features))
        weight_key, bias_key = keys(key, 2)
        shape = (self.out_features, self.in1_features, self.in2_features)
        self.weight = Param(initial(name, "weight", weight_init, default, weight_key, shape, dtype))
        self.bias = None
        if use_bias:
            self.bias = Param(initial(name, "bias", bias_init, default, bias_key, shape[:1], dtype))

    def __call__(self, x1: ArrayLike, x2: ArrayLike) -> jax.Array:
        x1, x2 = as_array(self, x1), as_array(self, x2)
        sizes = (self.in1_features, self.in2_features)
        if (x1.shape[-1:], x2.shape[-1:]) != (sizes[:1], sizes[1:]) or x1.shape[:-1] != x2.shape[:-1]:
            raise ShapeError(
                f"{name_of(self)}: x1 and x2 don't fit the layer, or each other.",
                got=f"{describe(x1)} and {describe(x2)}",
                expected=f"[..., {sizes[0]}] and [..., {sizes[1]}] with the same leading axes",
                fix="jnp.broadcast_to the smaller of the two, should it stand for all of the other's rows",
            )
        x1, weight, bias, x2 = cast(self, x1, self.weight, self.bias, x2)
        y = jnp.einsum("...i,oij,...j->...o", x1, weight, x2)
        return y if bias is None else y + jnp.broadcast_to(bias, y.shape)
