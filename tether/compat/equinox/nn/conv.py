# SPDX-License-Identifier: Apache-2.0
"""Convolutions of one example (cross-correlations, as the field has it), and transposed ones.

| Equinox | here | what differs |
| --- | --- | --- |
| Conv, Conv1d to Conv3d | the same fields and draws | |
| ConvTranspose, ConvTranspose1d to ConvTranspose3d | the same; as there, the kernel isn't turned round | |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tether.compat.equinox._errors import SpecError
from tether.compat.equinox.module import Module, static_field
from tether.compat.equinox.nn._arguments import Numbers, Padding, check_rank, pairs, uniform
from tether.nn._inputs import name_of
from tether.nn._window import per_axis

__all__ = [
    "Conv",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
]


class Conv(Module):
    """Convolves over any number of space axes.

    Args:
        num_spatial_dims: Number of space axes.
        in_channels: Number of channels of x; a multiple of groups.
        out_channels: Number of channels of y.
        kernel_size, stride, dilation: In elements: a number, or one for each space axis.
        padding: Zeros around x: a number, one for each space axis, or pairs of before and after.
        groups: Number of groups of channels that don't mix.
        use_bias: Whether a bias is added.
        key: PRNG key of the first values, which are U(-k, k), k = 1 / sqrt(fan_in), where fan_in = in_channels / groups
            * number of elements of the kernel.
    Shapes:
        x: float[in_channels, *space] -> float[out_channels, *space']
    Raises:
        ValueError: groups that don't divide in_channels, or a wrong kernel_size, stride, dilation or padding.
        ShapeError: x isn't one example.
    Example:
        >>> conv = eqx.nn.Conv(2, 3, 8, kernel_size=3, padding=1, key=jax.random.PRNGKey(0))
        >>> jax.vmap(conv)(jnp.ones((4, 3, 9, 9))).shape
        (4, 8, 9, 9)
    """

    num_spatial_dims: int = static_field()
    weight: jax.Array
    bias: jax.Array | None
    in_channels: int = static_field()
    out_channels: int = static_field()
    kernel_size: tuple[int, ...] = static_field()
    stride: tuple[int, ...] = static_field()
    padding: tuple[tuple[int, int], ...] = static_field()
    dilation: tuple[int, ...] = static_field()
    groups: int = static_field()
    use_bias: bool = static_field()

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Numbers,
        stride: Numbers = 1,
        padding: Padding = 0,
        dilation: Numbers = 1,
        groups: int = 1,
        use_bias: bool = True,
        *,
        key: Any,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        name = name_of(self)
        if in_channels % groups:
            raise SpecError(
                f"{name}: groups doesn't divide in_channels.",
                got=f"in_channels={in_channels}, groups={groups}",
                expected="in_channels a multiple of groups",
                fix=f"groups={math.gcd(in_channels, groups)}",
            )
        self.num_spatial_dims = num_spatial_dims
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = per_axis(name, "kernel_size", kernel_size, num_spatial_dims)
        self.stride = per_axis(name, "stride", stride, num_spatial_dims)
        self.padding = pairs(name, padding, num_spatial_dims)
        self.dilation = per_axis(name, "dilation", dilation, num_spatial_dims)
        self.groups = groups
        self.use_bias = use_bias
        self.weight, self.bias = _first_values(self, key)

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The convolved example; the key is ignored."""
        return _convolved(self, x, self.padding, window_strides=self.stride)


class ConvTranspose(Module):
    """Convolves, transposed, over any number of space axes: from the shape of an output of a Conv to that of its input.

    length' = (length - 1) * stride + (kernel_size - 1) * dilation + 1 - padding before - padding after + output_padding

    Args:
        num_spatial_dims: Number of space axes.
        in_channels: Number of channels of x.
        out_channels: Number of channels of y.
        kernel_size, stride, dilation: Those of the Conv: a number, or one for each space axis.
        padding: That of the Conv: a number, one for each space axis, or pairs of before and after.
        output_padding: Elements more after the end, below stride: a number, or one for each space axis.
        groups: Number of groups of channels that don't mix.
        use_bias: Whether a bias is added.
        key: PRNG key of the first values, which are as in Conv.
    Shapes:
        x: float[in_channels, *space] -> float[out_channels, *space']
    Raises:
        ValueError: a wrong kernel_size, stride, dilation, padding or output_padding.
        ShapeError: x isn't one example.
    Example:
        >>> up = eqx.nn.ConvTranspose(2, 3, 8, 3, stride=2, padding=1, output_padding=1, key=jax.random.PRNGKey(0))
        >>> up(jnp.ones((3, 5, 5))).shape
        (8, 10, 10)
    References:
        Dumoulin and Visin 2016, arXiv:1603.07285, relationship 14.
    """

    num_spatial_dims: int = static_field()
    weight: jax.Array
    bias: jax.Array | None
    in_channels: int = static_field()
    out_channels: int = static_field()
    kernel_size: tuple[int, ...] = static_field()
    stride: tuple[int, ...] = static_field()
    padding: tuple[tuple[int, int], ...] = static_field()
    output_padding: tuple[int, ...] = static_field()
    dilation: tuple[int, ...] = static_field()
    groups: int = static_field()
    use_bias: bool = static_field()

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Numbers,
        stride: Numbers = 1,
        padding: Padding = 0,
        output_padding: Numbers = 0,
        dilation: Numbers = 1,
        groups: int = 1,
        use_bias: bool = True,
        *,
        key: Any,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        name = name_of(self)
        self.num_spatial_dims = num_spatial_dims
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = per_axis(name, "kernel_size", kernel_size, num_spatial_dims)
        self.stride = per_axis(name, "stride", stride, num_spatial_dims)
        self.padding = pairs(name, padding, num_spatial_dims)
        self.output_padding = per_axis(name, "output_padding", output_padding, num_spatial_dims, least=0)
        self.dilation = per_axis(name, "dilation", dilation, num_spatial_dims)
        self.groups = groups
        self.use_bias = use_bias
        # Tuples, in the order of words, as 0.9.2 compared them: what was made there is made here.
        if self.output_padding >= self.stride:
            raise SpecError(
                f"{name}: output_padding is not below stride.",
                got=f"output_padding={self.output_padding}, stride={self.stride}",
                expected="output_padding < stride, on each axis",
                fix="less padding makes the output larger too",
            )
        self.weight, self.bias = _first_values(self, key)

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The convolved example; the key is ignored."""
        reach = [d * (k - 1) for k, d in zip(self.kernel_size, self.dilation, strict=True)]
        padding = [
            (r - before, r - after + more)
            for r, (before, after), more in zip(reach, self.padding, self.output_padding, strict=True)
        ]
        ones = (1,) * self.num_spatial_dims
        return _convolved(self, x, padding, window_strides=ones, lhs_dilation=self.stride)


def _first_values(layer: Conv | ConvTranspose, key: Any) -> tuple[jax.Array, jax.Array | None]:
    weight_key, bias_key = jax.random.split(key, 2)
    shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
    limit = 1 / math.sqrt(math.prod(shape[1:]))
    weight = uniform(weight_key, shape, limit)
    bias_shape = (layer.out_channels, *[1] * layer.num_spatial_dims)
    return weight, uniform(bias_key, bias_shape, limit) if layer.use_bias else None


def _convolved(layer: Conv | ConvTranspose, x: Any, padding: Sequence[tuple[int, int]], **options: Any) -> jax.Array:
    check_rank(layer, x, layer.num_spatial_dims)
    y = lax.conv_general_dilated(
        jnp.asarray(x)[None],
        jnp.asarray(layer.weight),
        padding=padding,
        rhs_dilation=layer.dilation,
        feature_group_count=layer.groups,
        **options,
    )[0]
    return y + jnp.asarray(layer.bias) if layer.use_bias else y


class _ConvOfRank(Conv):
    """What Conv1d, Conv2d and Conv3d share."""

    _axes: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Numbers,
        stride: Numbers = 1,
        padding: Padding = 0,
        dilation: Numbers = 1,
        groups: int = 1,
        use_bias: bool = True,
        *,
        key: Any,
        **kwargs: Any,
    ):
        super().__init__(
            self._axes,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            use_bias,
            key=key,
            **kwargs,
        )


class Conv1d(_ConvOfRank):
    """Convolves over one space axis: a Conv that says so.

    Example:
        >>> eqx.nn.Conv1d(1, 4, 3, key=jax.random.PRNGKey(0))(jnp.ones((1, 10))).shape
        (4, 8)
    """

    _axes = 1


class Conv2d(_ConvOfRank):
    """Convolves over two space axes: a Conv that says so.

    Example:
        >>> eqx.nn.Conv2d(3, 4, (3, 1), key=jax.random.PRNGKey(0))(jnp.ones((3, 10, 10))).shape
        (4, 8, 10)
    """

    _axes = 2


class Conv3d(_ConvOfRank):
    """Convolves over three space axes: a Conv that says so.

    Example:
        >>> eqx.nn.Conv3d(3, 4, 2, stride=2, key=jax.random.PRNGKey(0))(jnp.ones((3, 4, 4, 4))).shape
        (4, 2, 2, 2)
    """

    _axes = 3


class _ConvTransposeOfRank(ConvTranspose):
    """What ConvTranspose1d, ConvTranspose2d and ConvTranspose3d share; output_padding comes before padding here."""

    _axes: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Numbers,
        stride: Numbers = 1,
        output_padding: Numbers = 0,
        padding: Padding = 0,
        dilation: Numbers = 1,
        groups: int = 1,
        use_bias: bool = True,
        *,
        key: Any,
        **kwargs: Any,
    ):
        super().__init__(
            self._axes,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            use_bias,
            key=key,
            **kwargs,
        )


class ConvTranspose1d(_ConvTransposeOfRank):
    """Convolves, transposed, over one space axis: a ConvTranspose that says so.

    Example:
        >>> eqx.nn.ConvTranspose1d(1, 4, 3, key=jax.random.PRNGKey(0))(jnp.ones((1, 8))).shape
        (4, 10)
    """

    _axes = 1


class ConvTranspose2d(_ConvTransposeOfRank):
    """Convolves, transposed, over two space axes: a ConvTranspose that says so.

    Example:
        >>> eqx.nn.ConvTranspose2d(3, 4, 2, stride=2, key=jax.random.PRNGKey(0))(jnp.ones((3, 5, 5))).shape
        (4, 10, 10)
    """

    _axes = 2


class ConvTranspose3d(_ConvTransposeOfRank):
    """Convolves, transposed, over three space axes: a ConvTranspose that says so.

    Example:
        >>> eqx.nn.ConvTranspose3d(3, 4, 2, stride=2, key=jax.random.PRNGKey(0))(jnp.ones((3, 2, 2, 2))).shape
        (4, 4, 4, 4)
    """

    _axes = 3
