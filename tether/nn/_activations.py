# SPDX-License-Identifier: Apache-2.0
"""Activations: JAX's functions under JAX's names, and the one that has a parameter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.nn import (
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_tanh,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    mish,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    squareplus,
    swish,
    tanh,
)
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn._inputs import as_array, cast, inexact_dtype, integer, name_of, real_only

FUNCTIONS = (
    *(celu, elu, gelu, glu, hard_sigmoid, hard_silu, hard_tanh, leaky_relu, log_sigmoid, log_softmax, mish),
    *(relu, relu6, selu, sigmoid, silu, soft_sign, softmax, softplus, squareplus, swish, tanh),
)


class PReLU(Module):
    """A rectifier that learns its slope below zero.

    y = max(0, x) + weight * min(0, x)

    Args:
        num_parameters: 1 for one slope, or the number of channels for one each.
        init: First value of the slopes.
        channel_axis: Axis of the channels in x, where there is more than one slope.
        dtype: Of the parameters.
    Variables:
        weight: Param, float[num_parameters].
    Shapes:
        x: float[..., channels, ...] -> the same
    Raises:
        ShapeError: channel_axis of x is not num_parameters.
        DtypeError: x is not an array of real numbers.
        ArgumentError: num_parameters below 1, or an init that isn't a number.
    Example:
        >>> nn.PReLU()(jnp.array([-4.0, 2.0])).tolist()
        [-1.0, 2.0]
    References:
        He et al. 2015, arXiv:1502.01852, equation 1.
    """

    def __init__(
        self,
        num_parameters: int = 1,
        init: float = 0.25,
        *,
        channel_axis: int = 1,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        self.num_parameters = integer(name, "num_parameters", num_parameters)
        self.channel_axis = channel_axis
        self.compute_dtype = None
        if isinstance(init, bool) or not isinstance(init, int | float):
            raise ArgumentError(
                f"{name}: init is not a number.", got=f"init={describe(init)}", expected="a float", fix="init=0.25"
            )
        self.weight = Param(jnp.full(self.num_parameters, init, inexact_dtype(name, "dtype", dtype)))

    def __call__(self, x: ArrayLike) -> jax.Array:
        h = as_array(self, x)
        real_only(self, h)
        h, slope = cast(self, h, self.weight)
        if self.num_parameters > 1:
            axis = self.channel_axis + h.ndim if self.channel_axis < 0 else self.channel_axis
            if not 0 <= axis < h.ndim or h.shape[axis] != self.num_parameters:
                raise ShapeError(
                    f"{name_of(self)}: axis {self.channel_axis} of x is not num_parameters, {self.num_parameters}.",
                    got=describe(h),
                    expected=f"{self.num_parameters} channels at axis {self.channel_axis}",
                    fix="channel_axis=-3 for images with any number of batch axes, or num_parameters=1",
                )
            slope = slope.reshape(-1, *[1] * (h.ndim - axis - 1))
        slope = jnp.broadcast_to(slope if self.num_parameters > 1 else slope[0], h.shape)
        return jnp.where(h >= 0, h, slope * h)
