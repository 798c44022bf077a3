# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions over one, two or three space axes: one class, three ranks, the two conventions of the field.

Libraries differ in which way round the kernel lies, and in what padding counts. Here the first is ``convention``. The
second is one for all: stride, padding and dilation are those of the Conv that goes the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn import init
from tether.nn._conv import divisor_of_channels, first_values
from tether.nn._inputs import as_array, cast, integer, name_of
from tether.nn._window import Pairs, check_rank, extent_of, join_leading, padding_per_axis, part_leading, per_axis

_CONVENTIONS = ("gradient", "correlation")


class ConvTranspose(Module):
    """Holds what ConvTranspose1d, 2d and 3d share; ``num_spatial_dims`` is all that they add."""

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
        output_padding: int | Sequence[int] = 0,
        convention: Literal["gradient", "correlation"] = "gradient",
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
        self.padding = padding_per_axis(name, padding, axes, ("SAME", "SAME_LOWER", "VALID"))
        self.dilation = per_axis(name, "dilation", dilation, axes)
        self.groups = divisor_of_channels(name, groups, self.in_channels, self.out_channels)
        self.output_padding = self._output_padding(output_padding)
        self.convention = _convention(name, convention)
        self.compute_dtype = None
        shape = (self.in_channels, self.out_channels // self.groups, *self.kernel_size)
        self.weight, self.bias = first_values(
            name, shape, self.out_channels, use_bias, key, dtype, weight_init, bias_init
        )

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        check_rank(self, x, self.num_spatial_dims, self.in_channels)
        padding = self._zeros_around()
        self._check_size(x, padding)
        h, weight, bias = cast(self, x, self.weight, self.bias)
        batch, leading = join_leading(h, self.num_spatial_dims + 1)
        y = lax.conv_general_dilated(
            batch,
            self._kernel(weight),
            (1,) * self.num_spatial_dims,
            padding,
            lhs_dilation=self.stride,
            rhs_dilation=self.dilation,
            feature_group_count=self.groups,
        )
        if bias is not None:
            y = y + lax.broadcast_in_dim(bias, (1, self.out_channels, *[1] * self.num_spatial_dims), (1,))
        return part_leading(y, leading)

    def _kernel(self, weight: jax.Array) -> jax.Array:
        """Makes the kernel of the cross-correlation, [out_channels, in_channels / groups, *kernel_size]."""
        in_group, out_group, *space = self.in_channels // self.groups, *weight.shape[1:]
        kernel = weight.reshape(self.groups, in_group, out_group, *space).swapaxes(1, 2)
        kernel = kernel.reshape(self.out_channels, in_group, *space)
        return lax.rev(kernel, range(2, kernel.ndim)) if self.convention == "gradient" else kernel

    def _zeros_around(self) -> Pairs:
        """Counts the zeros around x, after stride - 1 of them between its elements; a negative count takes off."""
        extent = extent_of(self.kernel_size, self.dilation)
        if isinstance(self.padding, str):
            totals = [max(e - s, 0) if "SAME" in self.padding else 0 for e, s in zip(extent, self.stride, strict=True)]
            lower = self.padding == "SAME_LOWER"
            pairs = [((total + lower) // 2, total - (total + lower) // 2) for total in totals]
            added = [max(s - e, 0) for e, s in zip(extent, self.stride, strict=True)]
        else:
            pairs, added = self.padding, self.output_padding
        return tuple((e - 1 - a, e - 1 - b + more) for e, (a, b), more in zip(extent, pairs, added, strict=True))

    def _check_size(self, x: jax.Array, padding: Pairs) -> None:
        extent, sizes = extent_of(self.kernel_size, self.dilation), x.shape[-self.num_spatial_dims :]
        size = tuple(
            (n - 1) * s + 2 - e + sum(pair) for n, s, e, pair in zip(sizes, self.stride, extent, padding, strict=True)
        )
        if min(size) < 1:
            raise ShapeError(
                f"{name_of(self)}: padding takes the whole output off.",
                got=f"{describe(x)}, padding {self.padding}: space axes {size} would be left",
                expected="at least 1 of (size - 1) * stride + (kernel_size - 1) * dilation + 1 on each axis",
                fix=["padding='SAME'", "a larger input"],
            )

    def _output_padding(self, value: int | Sequence[int]) -> tuple[int, ...]:
        name, numbers = name_of(self), per_axis(name_of(self), "output_padding", value, self.num_spatial_dims, least=0)
        most = tuple(max(s, d) - 1 for s, d in zip(self.stride, self.dilation, strict=True))
        if any(number > limit for number, limit in zip(numbers, most, strict=True)):
            raise ArgumentError(
                f"{name}: output_padding is not below the larger of stride and dilation.",
                got=f"output_padding={numbers}, stride={self.stride}, dilation={self.dilation}",
                expected=f"at most {most}",
                fix="less padding makes the output larger too",
            )
        if isinstance(self.padding, str) and any(numbers):
            raise ArgumentError(
                f"{name}: padding {self.padding!r} already says how large the output is.",
                got=f"output_padding={numbers}, padding={self.padding!r}",
                expected="output_padding=0, or padding in numbers",
                fix=["output_padding=0", "padding=0"],
            )
        return numbers


def _convention(name: str, value: str) -> str:
    if value not in _CONVENTIONS:
        raise ArgumentError(
            f"{name}: convention is none that there is.",
            got=f"convention={describe(value)}",
            expected="'gradient' (PyTorch) or 'correlation' (Equinox, Flax, Haiku)",
            fix="convention='gradient'",
        )
    return value


class ConvTranspose1d(ConvTranspose):
    """Convolves, transposed, over one space axis: what takes the output of a Conv1d back to the size of its input.

    y[o, p] = b[o] + sum over i, q, j of w[i, o, j] * x[i, q], where q * stride + j * dilation = p + padding before

    This is the gradient of a Conv1d with the same kernel_size, stride, padding, dilation, groups and weight, by its
    input. With convention="correlation" the kernel lies the other way round, w[i, o, kernel_size - 1 - j]: the
    cross-correlation of w with x, after stride - 1 zeros between the elements of x. Dtypes as in Linear.

    length' = (length - 1) * stride + extent - padding before - padding after + output_padding,
    extent = (kernel_size - 1) * dilation + 1

    Args:
        in_channels, out_channels: Numbers of channels, at least 1, multiples of groups.
        kernel_size, stride, dilation: In elements, at least 1; one int.
        padding: What is taken off the output, in elements: an int for both sides, or a pair for the axis
            ``((before, after),)``; or "SAME", "SAME_LOWER": that of the Conv1d from length' = length * stride to
            length; or "VALID": nothing, so that length' = length * stride + max(extent - stride, 0).
        groups: Number of groups of channels that don't mix.
        output_padding: Elements more after the end, below the larger of stride and dilation; only with padding in
            numbers. A Conv1d with a stride takes several lengths to one: this says which.
        convention: "gradient", as PyTorch and with transpose_kernel Flax have it; "correlation", as Equinox, Flax and
            Haiku. Flax counts padding in numbers as zeros around x: what is ``n`` there is extent - 1 - n here.
        use_bias, key, dtype, weight_init, bias_init: As in Linear; the default is U(-k, k),
            k = 1 / sqrt(out_channels / groups * kernel_size).
    Variables:
        weight: Param, float[in_channels, out_channels / groups, kernel].
        bias: Param, float[out_channels]; None without use_bias.
    Shapes:
        x: float[..., in_channels, length] -> float[..., out_channels, length']
    Raises:
        ShapeError: x lacks axes, has other channels, or padding leaves nothing.
        DtypeError: x is not an array of numbers.
        ArgumentError: an option out of its range, or groups that don't divide the channels.
    Example:
        >>> up = nn.ConvTranspose1d(4, 2, 3, stride=2, padding="SAME", key=jax.random.key(0))
        >>> up(jnp.ones((8, 4, 10))).shape
        (8, 2, 20)
    References:
        Dumoulin and Visin 2016, arXiv:1603.07285, section 4.
        torch.nn.ConvTranspose1d, PyTorch 2.13, for layout and first values; jax.lax.conv_transpose for the words.
    """

    num_spatial_dims = 1


class ConvTranspose2d(ConvTranspose):
    """Convolves, transposed, over two space axes: what takes the output of a Conv2d back to the size of its input.

    The formulas are those of ConvTranspose1d, for each axis. Dtypes as in Linear.

    Args:
        in_channels, out_channels: Numbers of channels, at least 1, multiples of groups.
        kernel_size, stride, dilation: In elements, at least 1; one int or one for each space axis.
        padding: What is taken off the output, in elements: an int, one for each axis, or pairs
            ``((top, bottom), (left, right))``; or "SAME", "SAME_LOWER" (height' = height * stride) or "VALID"
            (nothing), as in ConvTranspose1d.
        groups: Number of groups of channels that don't mix.
        output_padding: Elements more after the end, below the larger of stride and dilation: an int or one for each
            axis; only with padding in numbers.
        convention: "gradient", as PyTorch has it, or "correlation", as Equinox, Flax and Haiku.
        use_bias, key, dtype, weight_init, bias_init: As in Linear; the default is U(-k, k),
            k = 1 / sqrt(out_channels / groups * height * width of the kernel).
    Variables:
        weight: Param, float[in_channels, out_channels / groups, kernel height, kernel width].
        bias: Param, float[out_channels]; None without use_bias.
    Shapes:
        x: float[..., in_channels, height, width] -> float[..., out_channels, height', width']
    Raises:
        ShapeError: x lacks axes, has other channels, or padding leaves nothing.
        DtypeError: x is not an array of numbers.
        ArgumentError: an option out of its range, or groups that don't divide the channels.
    Example:
        >>> up = nn.ConvTranspose2d(16, 1, 3, stride=2, padding=1, output_padding=1, key=jax.random.key(0))
        >>> up(jnp.ones((16, 14, 14))).shape
        (1, 28, 28)
    References:
        Dumoulin and Visin 2016, arXiv:1603.07285, section 4.
        torch.nn.ConvTranspose2d, PyTorch 2.13, for layout and first values; jax.lax.conv_transpose for the words.
    """

    num_spatial_dims = 2


class ConvTranspose3d(ConvTranspose):
    """Convolves, transposed, over three space axes: what takes the output of a Conv3d back to the size of its input.

    The formulas are those of ConvTranspose1d, for each axis. Dtypes as in Linear.

    Args:
        in_channels, out_channels: Numbers of channels, at least 1, multiples of groups.
        kernel_size, stride, dilation: In elements, at least 1; one int or one for each space axis.
        padding, output_padding: As in ConvTranspose2d, for three axes.
        groups: Number of groups of channels that don't mix.
        convention: "gradient", as PyTorch has it, or "correlation", as Equinox, Flax and Haiku.
        use_bias, key, dtype, weight_init, bias_init: As in Linear; the default is U(-k, k),
            k = 1 / sqrt(out_channels / groups * number of elements of the kernel).
    Variables:
        weight: Param, float[in_channels, out_channels / groups, kernel depth, kernel height, kernel width].
        bias: Param, float[out_channels]; None without use_bias.
    Shapes:
        x: float[..., in_channels, depth, height, width] -> float[..., out_channels, depth', height', width']
    Raises:
        ShapeError: x lacks axes, has other channels, or padding leaves nothing.
        DtypeError: x is not an array of numbers.
        ArgumentError: an option out of its range, or groups that don't divide the channels.
    Example:
        >>> up = nn.ConvTranspose3d(2, 1, 2, stride=2, key=jax.random.key(0))
        >>> up(jnp.ones((4, 2, 3, 4, 5))).shape
        (4, 1, 6, 8, 10)
    References:
        Dumoulin and Visin 2016, arXiv:1603.07285, section 4.
        torch.nn.ConvTranspose3d, PyTorch 2.13, for layout and first values; jax.lax.conv_transpose for the words.
    """

    num_spatial_dims = 3
