# SPDX-License-Identifier: Apache-2.0
"""Maximum, minimum and average over windows of one, two or three space axes: three classes, three ranks.

Channels come first. Windows that follow from the size of the output are in _adaptive_pool.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn._inputs import as_array, at_least_float32, name_of, real_only
from tether.nn._window import (
    Pairs,
    check_fit,
    check_rank,
    explicit_padding,
    extent_of,
    first_best,
    padding_per_axis,
    per_axis,
)


class Pool(Module):
    """Holds what all pooling shares: the window and the checks. A subclass says what becomes of a window."""

    num_spatial_dims: ClassVar[int]

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        *,
        ceil_mode: bool = False,
    ):
        name, axes = name_of(self), self.num_spatial_dims
        self.kernel_size = per_axis(name, "kernel_size", kernel_size, axes)
        self.stride = self.kernel_size if stride is None else per_axis(name, "stride", stride, axes)
        self.padding = padding_per_axis(name, padding, axes)
        self.dilation = per_axis(name, "dilation", dilation, axes)
        self.ceil_mode = bool(ceil_mode)
        if not isinstance(self.padding, str) and any(
            max(pair) >= extent
            for pair, extent in zip(self.padding, extent_of(self.kernel_size, self.dilation), strict=True)
        ):
            raise ArgumentError(
                f"{name}: padding as wide as the window leaves windows without an element.",
                got=f"padding={self.padding}, kernel_size={self.kernel_size}",
                expected="padding < (kernel_size - 1) * dilation + 1 on each side",
                fix="padding=kernel_size // 2",
            )

    def _padding(self, x: jax.Array) -> tuple[Pairs, Pairs]:
        """Gives the padding, and the same with what ceil_mode adds for the last window to be a whole one."""
        sizes, extent = x.shape[-self.num_spatial_dims :], extent_of(self.kernel_size, self.dilation)
        pairs = whole = explicit_padding(sizes, extent, self.stride, self.padding)
        if self.ceil_mode:
            whole = tuple(map(_with_last_window, sizes, extent, self.stride, pairs))
        check_fit(self, x, extent, whole)
        return pairs, whole

    def _reduce(self, x: jax.Array, start: float, operation: Any, padding: Pairs) -> jax.Array:
        """Reduces each window of the trailing axes."""
        one = (1,) * (x.ndim - self.num_spatial_dims)
        pairs = ((0, 0),) * len(one) + padding
        # A NumPy scalar stays concrete in a trace: that is how JAX knows max and sum, which it can differentiate.
        first = np.asarray(start, x.dtype)
        return lax.reduce_window(x, first, operation, one + self.kernel_size, one + self.stride, pairs)


def _with_last_window(size: int, extent: int, stride: int, pair: tuple[int, int]) -> tuple[int, int]:
    before, after = pair
    count = -(-(size + before + after - extent) // stride) + 1
    if (count - 1) * stride >= size + before:  # PyTorch's rule: no window begins in the padding after the end
        count -= 1
    return before, max(after, (count - 1) * stride + extent - size - before)


class ExtremePool(Pool):
    """Holds what MaxPool and MinPool share. Of equal elements the first has the gradient."""

    operation: ClassVar[Callable[..., jax.Array]]
    best: ClassVar[Callable[..., jax.Array]]
    sign: ClassVar[int]

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        check_rank(self, x, self.num_spatial_dims)
        _, padding = self._padding(x)
        if set(self.dilation) == {1}:
            return self._reduce(x, _worst(x.dtype, self.sign), self.operation, padding)
        # JAX doesn't differentiate reduce_window with dilation.
        places = self._places(x, padding)
        for axis in reversed(range(self.num_spatial_dims)):
            x = first_best(x, x.ndim - self.num_spatial_dims + axis, places[axis], self.best)
        return x

    def _places(self, x: jax.Array, padding: Pairs) -> list[np.ndarray]:
        """Says for each space axis where each window has its elements: int[windows, kernel_size]."""
        each = []
        for size, kernel, stride, dilation, (before, after) in zip(
            x.shape[-self.num_spatial_dims :], self.kernel_size, self.stride, self.dilation, padding, strict=True
        ):
            steps = np.arange(kernel) * dilation
            places = np.arange(0, size + before + after - steps[-1], stride)[:, None] - before + steps
            inside = (places >= 0) & (places < size)
            if not inside.any(1).all():
                raise ShapeError(
                    f"{name_of(self)}: a window has all of its elements in the padding.",
                    got=f"{describe(x)}, padding {padding}, dilation {self.dilation}",
                    expected="at least one element of x in each window",
                    fix=["less padding", "a smaller dilation"],
                )
            first = np.take_along_axis(places, inside.argmax(1)[:, None], 1)
            each.append(np.where(inside, places, first))
        return each


class MaxPool(ExtremePool):
    """Gives the maximum of each window; padding never wins."""

    operation, best, sign = staticmethod(lax.max), staticmethod(jnp.argmax), -1


class MinPool(ExtremePool):
    """Gives the minimum of each window; padding never wins."""

    operation, best, sign = staticmethod(lax.min), staticmethod(jnp.argmin), 1


class AvgPool(Pool):
    """Gives the average of each window, summed in float32 or wider."""

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0,
        *,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ):
        super().__init__(kernel_size, stride, padding, ceil_mode=ceil_mode)
        self.count_include_pad = bool(count_include_pad)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        check_rank(self, x, self.num_spatial_dims)
        padding, whole = self._padding(x)
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
        wide = at_least_float32(dtype)
        total = self._reduce(x.astype(wide), 0, lax.add, whole)
        count = jnp.asarray(self._counts(x.shape[-self.num_spatial_dims :], padding, total.shape), wide)
        return (total / jnp.broadcast_to(count, total.shape)).astype(dtype)

    def _counts(self, sizes: tuple[int, ...], padding: Pairs, out: tuple[int, ...]) -> np.ndarray:
        """Counts the elements that each window divides by, known from the shapes alone.

        What ceil_mode adds is never counted, as in PyTorch.
        """
        each = []
        for size, kernel, stride, (before, after), count in zip(
            sizes, self.kernel_size, self.stride, padding, out[-len(sizes) :], strict=True
        ):
            first = np.arange(count) * stride - before
            least, most = (-before, size + after) if self.count_include_pad else (0, size)
            each.append(np.minimum(first + kernel, most) - np.maximum(first, least))
        counts = reduce(np.multiply.outer, each)
        return counts.ravel()[0] if (counts == counts.ravel()[0]).all() else counts


def _worst(dtype: jnp.dtype, sign: int) -> Any:
    """Gives the end of the order that loses against every element: -1 the lowest, 1 the highest."""
    if dtype == jnp.bool_:
        return sign > 0
    if jnp.issubdtype(dtype, jnp.floating):
        return sign * np.inf
    return jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min


class MaxPool1d(MaxPool):
    """Gives the maximum of each window of one space axis. Of equal elements the first has the gradient.

    Args:
        kernel_size: In elements, at least 1.
        stride: In elements, at least 1; None is kernel_size.
        padding: In elements, narrower than the window: an int, a pair for the axis ``((before, after),)``, "SAME",
            "SAME_LOWER", "VALID" or "CAUSAL". Padding never wins.
        dilation: Distance between the elements of a window, at least 1.
        ceil_mode: Whether a last window that begins in x, but reaches beyond the padding, is there too.
    Shapes:
        x: real[..., channels, length] -> real[..., channels, length'];
        length' = floor((length + padding before + padding after - extent) / stride) + 1, with ceil_mode ceil,
        extent = (kernel_size - 1) * dilation + 1
    Raises:
        ShapeError: x lacks axes, is shorter than a window, or has no element in one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.MaxPool1d(2)(jnp.asarray([[1.0, 3.0, 2.0, 0.0]]))
        Array([[3., 2.]], dtype=float32)
    References:
        torch.nn.MaxPool1d, PyTorch 2.13.
    """

    num_spatial_dims = 1


class MaxPool2d(MaxPool):
    """Gives the maximum of each window of two space axes. Of equal elements the first has the gradient.

    Args:
        kernel_size: In elements, at least 1; an int or one for each axis.
        stride: As kernel_size; None is kernel_size.
        padding: In elements, narrower than the window: an int, one for each axis, pairs, "SAME", "SAME_LOWER", "VALID"
            or "CAUSAL". Padding never wins.
        dilation: Distance between the elements of a window, at least 1; an int or one for each axis.
        ceil_mode: Whether a last window that begins in x, but reaches beyond the padding, is there too.
    Shapes:
        x: real[..., channels, height, width] -> real[..., channels, height', width'], as in MaxPool1d
    Raises:
        ShapeError: x lacks axes, is smaller than a window, or has no element in one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.MaxPool2d(2)(jnp.ones((8, 3, 28, 28))).shape
        (8, 3, 14, 14)
    References:
        torch.nn.MaxPool2d, PyTorch 2.13.
    """

    num_spatial_dims = 2


class MaxPool3d(MaxPool):
    """Gives the maximum of each window of three space axes. Of equal elements the first has the gradient.

    Args:
        kernel_size, stride, padding, dilation, ceil_mode: As in MaxPool2d, for three axes.
    Shapes:
        x: real[..., channels, depth, height, width] -> real[..., channels, depth', height', width']
    Raises:
        ShapeError: x lacks axes, is smaller than a window, or has no element in one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.MaxPool3d(2, stride=1)(jnp.ones((3, 4, 4, 4))).shape
        (3, 3, 3, 3)
    References:
        torch.nn.MaxPool3d, PyTorch 2.13.
    """

    num_spatial_dims = 3


class MinPool1d(MinPool):
    """Gives the minimum of each window of one space axis. Of equal elements the first has the gradient.

    Args:
        kernel_size, stride, padding, dilation, ceil_mode: As in MaxPool1d.
    Shapes:
        x: real[..., channels, length] -> real[..., channels, length']
    Raises:
        ShapeError: x lacks axes, is shorter than a window, or has no element in one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.MinPool1d(2)(jnp.asarray([[1.0, 3.0, 2.0, 0.0]]))
        Array([[1., 0.]], dtype=float32)
    References:
        flax.linen.min_pool, Flax 0.12.
    """

    num_spatial_dims = 1


class MinPool2d(MinPool):
    """Gives the minimum of each window of two space axes. Of equal elements the first has the gradient.

    Args:
        kernel_size, stride, padding, dilation, ceil_mode: As in MaxPool2d.
    Shapes:
        x: real[..., channels, height, width] -> real[..., channels, height', width']
    Raises:
        ShapeError: x lacks axes, is smaller than a window, or has no element in one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.MinPool2d(2)(jnp.ones((8, 3, 28, 28))).shape
        (8, 3, 14, 14)
    References:
        flax.linen.min_pool, Flax 0.12.
    """

    num_spatial_dims = 2


class MinPool3d(MinPool):
    """Gives the minimum of each window of three space axes. Of equal elements the first has the gradient.

    Args:
        kernel_size, stride, padding, dilation, ceil_mode: As in MaxPool2d, for three axes.
    Shapes:
        x: real[..., channels, depth, height, width] -> real[..., channels, depth', height', width']
    Raises:
        ShapeError: x lacks axes, is smaller than a window, or has no element in one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.MinPool3d(2, stride=1)(jnp.ones((3, 4, 4, 4))).shape
        (3, 3, 3, 3)
    References:
        flax.linen.min_pool, Flax 0.12.
    """

    num_spatial_dims = 3


class AvgPool1d(AvgPool):
    """Gives the average of each window of one space axis, summed in float32 or wider.

    Args:
        kernel_size: In elements, at least 1.
        stride: In elements, at least 1; None is kernel_size.
        padding: Zeros in elements, below kernel_size: an int, a pair for the axis ``((before, after),)``, "SAME",
            "SAME_LOWER", "VALID" or "CAUSAL".
        ceil_mode: Whether a last window that begins in x, but reaches beyond the padding, is there too. It is divided
            by the number of its elements up to the end of the padding.
        count_include_pad: Whether the padded zeros count as elements of a window.
    Shapes:
        x: float[..., channels, length] -> float[..., channels, length']
    Raises:
        ShapeError: x lacks axes, or is shorter than a window.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.AvgPool1d(2)(jnp.asarray([[1.0, 3.0, 2.0, 0.0]]))
        Array([[2., 1.]], dtype=float32)
    References:
        torch.nn.AvgPool1d, PyTorch 2.13.
    """

    num_spatial_dims = 1


class AvgPool2d(AvgPool):
    """Gives the average of each window of two space axes, summed in float32 or wider.

    Args:
        kernel_size: In elements, at least 1; an int or one for each axis.
        stride: As kernel_size; None is kernel_size.
        padding: Zeros in elements, below kernel_size: an int, one for each axis, pairs, "SAME", "SAME_LOWER", "VALID"
            or "CAUSAL".
        ceil_mode: As in AvgPool1d.
        count_include_pad: Whether the padded zeros count as elements of a window.
    Shapes:
        x: float[..., channels, height, width] -> float[..., channels, height', width']
    Raises:
        ShapeError: x lacks axes, or is smaller than a window.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.AvgPool2d(2)(jnp.ones((8, 3, 28, 28))).shape
        (8, 3, 14, 14)
    References:
        torch.nn.AvgPool2d, PyTorch 2.13.
    """

    num_spatial_dims = 2


class AvgPool3d(AvgPool):
    """Gives the average of each window of three space axes, summed in float32 or wider.

    Args:
        kernel_size, stride, padding, ceil_mode, count_include_pad: As in AvgPool2d, for three axes.
    Shapes:
        x: float[..., channels, depth, height, width] -> float[..., channels, depth', height', width']
    Raises:
        ShapeError: x lacks axes, or is smaller than a window.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.AvgPool3d(2)(jnp.ones((3, 4, 4, 4))).shape
        (3, 2, 2, 2)
    References:
        torch.nn.AvgPool3d, PyTorch 2.13.
    """

    num_spatial_dims = 3
