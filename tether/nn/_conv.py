# SPDX-License-Identifier: Apache-2.0
"""Convolutions over one, two or three space axes: one class, three ranks.

Channels come first, kernels are [out, in, *space].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module
from tether.errors import ArgumentError
from tether.nn import init
from tether.nn._inputs import as_array, cast, inexact_dtype, initial, integer, name_of
from tether.nn._window import (
    check_fit,
    check_rank,
    explicit_padding,
    extent_of,
    join_leading,
    mode_of_padding,
    pad,
    padding_per_axis,
    part_leading,
    per_axis,
)
from tether.random import keys


class Conv(Module):
    """Holds what Conv1d, Conv2d and Conv3d share; ``num_spatial_dims`` is all that they add."""

    num_spatial_dims: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        *,
        padding_mode: str = "zeros",
        use_bias: bool = True,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
        weight_init: init.Initializer | None = None,
        bias_init: init.Initializer | None = None,
    ):
        name, axes = name_of(self), self.num_spatial_dims
        self.in_channels = integer(name, "in_channels", in_channels)
        self.out_channels = integer(name, "out_channels", out_channels)
        self.kernel_size = per_axis(name, "kernel_size", kernel_size, axes)
        self.stride = per_axis(name, "stride", stride, axes)
        self.padding = padding_per_axis(name, padding, axes)
        self.padding_mode = mode_of_padding(name, padding_mode, self.padding)
        self.dilation = per_axis(name, "dilation", dilation, axes)
        self.groups = divisor_of_channels(name, groups, self.in_channels, self.out_channels)
        self.compute_dtype = None
        shape = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        self.weight, self.bias = first_values(
            name, shape, self.out_channels, use_bias, key, dtype, weight_init, bias_init
        )

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        check_rank(self, x, self.num_spatial_dims, self.in_channels)
        extent = extent_of(self.kernel_size, self.dilation)
        pairs = explicit_padding(x.shape[-self.num_spatial_dims :], extent, self.stride, self.padding)
        check_fit(self, x, extent, pairs)
        h, weight, bias = cast(self, x, self.weight, self.bias)
        if self.padding_mode != "zeros":
            h, pairs = pad(self, h, pairs, self.padding_mode), ((0, 0),) * self.num_spatial_dims
        batch, leading = join_leading(h, self.num_spatial_dims + 1)
        y = lax.conv_general_dilated(
            batch, weight, self.stride, pairs, rhs_dilation=self.dilation, feature_group_count=self.groups
        )
        if bias is not None:
            y = y + lax.broadcast_in_dim(bias, (1, self.out_channels, *[1] * self.num_spatial_dims), (1,))
        return part_leading(y, leading)


def first_values(
    name: str,
    shape: tuple[int, ...],
    out_channels: int,
    use_bias: bool,
    key: jax.Array | None,
    dtype: DTypeLike,
    weight_init: init.Initializer | None,
    bias_init: init.Initializer | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Draws weight and bias; PyTorch's fan_in is the number of elements along all axes of the weight but the first."""
    dtype = inexact_dtype(name, "dtype", dtype)
    default = init.symmetric_uniform(1 / math.sqrt(math.prod(shape[1:])))
    # Two keys whether or not there is a bias: the weight of a seed doesn't depend on use_bias.
    weight_key, bias_key = keys(key, 2)
    weight = Param(initial(name, "weight", weight_init, default, weight_key, shape, dtype))
    if not use_bias:
        return weight, None
    return weight, Param(initial(name, "bias", bias_init, default, bias_key, (out_channels,), dtype))


def divisor_of_channels(name: str, groups: int, in_channels: int, out_channels: int) -> int:
    """Reads the number of groups, which must divide both numbers of channels."""
    groups = integer(name, "groups", groups)
    if in_channels % groups or out_channels % groups:
        raise ArgumentError(
            f"{name}: groups doesn't divide the channels.",
            got=f"groups={groups}, in_channels={in_channels}, out_channels={out_channels}",
            expected="in_channels and out_channels both multiples of groups",
            fix=f"groups={math.gcd(in_channels, out_channels)}",
        )
    return groups


class Conv1d(Conv):
    """Convolves over one space axis.

    y[o] = b[o] + sum over i of w[o, i] * x[i], where * is cross-correlation over the space axis. Dtypes as in Linear.

    Args:
        in_channels, out_channels: Numbers of channels, at least 1, multiples of groups.
        kernel_size, stride, dilation: In elements, at least 1; one int.
        padding: In elements: an int for both sides, or a pair for the axis ``((before, after),)``; or "SAME",
            "SAME_LOWER", "VALID" as JAX means them; or "CAUSAL", all of it before, so that y[t] depends on no x after
            t * stride.
        groups: Number of groups of channels that don't mix.
        padding_mode: What the padding is: "zeros"; "reflect" (c b | a b c | b a), which must be shorter than x;
            "replicate" (a a | a b c | c c); "circular" (b c | a b c | a b), the sequence over and over.
        use_bias, key, dtype, weight_init, bias_init: As in Linear; the default is U(-k, k), k = 1 / sqrt(fan_in), where
            fan_in = in_channels / groups * kernel_size.
    Variables:
        weight: Param, float[out_channels, in_channels / groups, kernel].
        bias: Param, float[out_channels]; None without use_bias.
    Shapes:
        x: float[..., in_channels, length] -> float[..., out_channels, length']
    Raises:
        ShapeError: x lacks axes, has other channels, is shorter than the kernel, or too short to be
            reflected.
        DtypeError: x is not an array of numbers.
        ArgumentError: an option out of its range, or groups that don't divide the channels.
    Example:
        >>> conv = nn.Conv1d(2, 4, 3, key=jax.random.key(0))
        >>> conv(jnp.ones((8, 2, 10))).shape
        (8, 4, 8)
    References:
        torch.nn.Conv1d, PyTorch 2.13, for layout and first values.
    """

    num_spatial_dims = 1


class Conv2d(Conv):
    """Convolves over two space axes.

    y[o] = b[o] + sum over i of w[o, i] * x[i], where * is cross-correlation over the space axes. Dtypes as in Linear.

    Args:
        in_channels, out_channels: Numbers of channels, at least 1, multiples of groups.
        kernel_size, stride, dilation: In elements, at least 1; one int or one for each space axis.
        padding: In elements: an int, one for each axis, or pairs ``((top, bottom), (left, right))``; or "SAME",
            "SAME_LOWER", "VALID" as JAX means them; or "CAUSAL", all of it before, on each axis.
        groups: Number of groups of channels that don't mix.
        padding_mode: "zeros", "reflect", "replicate" or "circular", as in Conv1d.
        use_bias, key, dtype, weight_init, bias_init: As in Linear; the default is U(-k, k), k = 1 / sqrt(fan_in), where
            fan_in = in_channels / groups * height * width of the kernel.
    Variables:
        weight: Param, float[out_channels, in_channels / groups, kernel height, kernel width].
        bias: Param, float[out_channels]; None without use_bias.
    Shapes:
        x: float[..., in_channels, height, width] -> float[..., out_channels, height', width']
    Raises:
        ShapeError: x lacks axes, has other channels, is smaller than the kernel, or too small to be
            reflected.
        DtypeError: x is not an array of numbers.
        ArgumentError: an option out of its range, or groups that don't divide the channels.
    Example:
        >>> conv = nn.Conv2d(1, 16, 3, padding="SAME", key=jax.random.key(0))
        >>> conv(jnp.ones((1, 28, 28))).shape
        (16, 28, 28)
    References:
        torch.nn.Conv2d, PyTorch 2.13, for layout and first values.
    """

    num_spatial_dims = 2


class Conv3d(Conv):
    """Convolves over three space axes.

    y[o] = b[o] + sum over i of w[o, i] * x[i], where * is cross-correlation over the space axes. Dtypes as in Linear.

    Args:
        in_channels, out_channels: Numbers of channels, at least 1, multiples of groups.
        kernel_size, stride, dilation: In elements, at least 1; one int or one for each space axis.
        padding: As in Conv2d, for three axes.
        groups: Number of groups of channels that don't mix.
        padding_mode: "zeros", "reflect", "replicate" or "circular", as in Conv1d.
        use_bias, key, dtype, weight_init, bias_init: As in Linear; the default is U(-k, k), k = 1 / sqrt(fan_in), where
            fan_in = in_channels / groups * number of elements of the kernel.
    Variables:
        weight: Param, float[out_channels, in_channels / groups, kernel depth, kernel height, kernel width].
        bias: Param, float[out_channels]; None without use_bias.
    Shapes:
        x: float[..., in_channels, depth, height, width] -> float[..., out_channels, depth', height', width']
    Raises:
        ShapeError: x lacks axes, has other channels, is smaller than the kernel, or too small to be
            reflected.
        DtypeError: x is not an array of numbers.
        ArgumentError: an option out of its range, or groups that don't divide the channels.
    Example:
        >>> conv = nn.Conv3d(1, 2, 3, stride=2, key=jax.random.key(0))
        >>> conv(jnp.ones((4, 1, 9, 9, 9))).shape
        (4, 2, 4, 4, 4)
    References:
        torch.nn.Conv3d, PyTorch 2.13, for layout and first values.
    """

    num_spatial_dims = 3
