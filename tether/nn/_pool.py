# SPDX-License-Identifier: Apache-2.0
"""Maximum and average over windows of one, two or three space axes: two classes, three ranks. Channels come first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from tether._modules import Module
from tether.errors import ArgumentError
from tether.nn._inputs import as_array, at_least_float32, name_of, real_only
from tether.nn._window import Pairs, check_rank, explicit_padding, padding_per_axis, per_axis


class Pool(Module):
    """Holds what all pooling shares: the window and the checks. A subclass says what becomes of a window."""

    num_spatial_dims: ClassVar[int]

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0,
    ):
        name, axes = name_of(self), self.num_spatial_dims
        self.kernel_size = per_axis(name, "kernel_size", kernel_size, axes)
        self.stride = self.kernel_size if stride is None else per_axis(name, "stride", stride, axes)
        self.padding = padding_per_axis(name, padding, axes)
        if not isinstance(self.padding, str) and any(
            max(pair) >= extent for pair, extent in zip(self.padding, self.kernel_size, strict=True)
        ):
            raise ArgumentError(
                f"{name}: padding as wide as the window leaves windows without an element.",
                got=f"padding={self.padding}, kernel_size={self.kernel_size}",
                expected="padding < kernel_size on each side",
                fix="padding=kernel_size // 2",
            )

    def _reduce(self, x: jax.Array, start: float, operation: Any, padding: Pairs) -> jax.Array:
        """Reduces each window of the trailing axes."""
        one = (1,) * (x.ndim - self.num_spatial_dims)
        pairs = ((0, 0),) * len(one) + padding
        # A NumPy scalar stays concrete in a trace: that is how JAX knows max and sum, which it can differentiate.
        first = np.asarray(start, x.dtype)
        return lax.reduce_window(x, first, operation, one + self.kernel_size, one + self.stride, pairs)


class MaxPool(Pool):
    """Gives the maximum of each window; padding never wins."""

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        check_rank(self, x, self.num_spatial_dims)
        padding = explicit_padding(self, x, self.kernel_size, self.stride, self.padding)
        return self._reduce(x, _lowest(x.dtype), lax.max, padding)


class AvgPool(Pool):
    """Gives the average of each window, summed in float32 or wider."""

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = 0,
        *,
        count_include_pad: bool = True,
    ):
        super().__init__(kernel_size, stride, padding)
        self.count_include_pad = bool(count_include_pad)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        check_rank(self, x, self.num_spatial_dims)
        padding = explicit_padding(self, x, self.kernel_size, self.stride, self.padding)
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
        wide = at_least_float32(dtype)
        total = self._reduce(x.astype(wide), 0, lax.add, padding)
        count = jnp.asarray(self._counts(x.shape[-self.num_spatial_dims :], padding), wide)
        return (total / jnp.broadcast_to(count, total.shape)).astype(dtype)

    def _counts(self, sizes: tuple[int, ...], padding: Pairs) -> np.ndarray:
        """Counts the elements that each window divides by, known from the shapes alone."""
        if self.count_include_pad:
            return np.asarray(np.prod(self.kernel_size))
        each = []
        for size, extent, stride, (before, after) in zip(sizes, self.kernel_size, self.stride, padding, strict=True):
            first = np.arange(0, size + before + after - extent + 1, stride) - before
            each.append(np.minimum(first + extent, size) - np.maximum(first, 0))
        return reduce(np.multiply.outer, each)


def _lowest(dtype: jnp.dtype) -> Any:
    if dtype == jnp.bool_:
        return False
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


class MaxPool1d(MaxPool):
    """Gives the maximum of each window of one space axis.

    Args:
        kernel_size: In elements, at least 1.
        stride: In elements, at least 1; None is kernel_size.
        padding: In elements, below kernel_size: an int, a pair for the axis ``((before, after),)``, "SAME",
            "SAME_LOWER" or "VALID". Padding never wins. A window that would leave the padded input is left out, as in
            PyTorch without ceil_mode.
    Shapes:
        x: real[..., channels, length] -> real[..., channels, length']
    Raises:
        ShapeError: x lacks axes, or is shorter than a window.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.MaxPool1d(2)(jnp.asarray([[1.0, 3.0, 2.0, 0.0]]))
        Array([[3., 2.]], dtype=float32)
    References:
        torch.nn.MaxPool1d, PyTorch 2.13.
    """

    num_spatial_dims = 1


class MaxPool2d(MaxPool):
    """Gives the maximum of each window of two space axes.

    Args:
        kernel_size: In elements, at least 1; an int or one for each axis.
        stride: As kernel_size; None is kernel_size.
        padding: In elements, below kernel_size: an int, one for each axis, pairs, "SAME", "SAME_LOWER" or "VALID".
            Padding never wins. A window that would leave the padded input is left out, as in PyTorch without ceil_mode.
    Shapes:
        x: real[..., channels, height, width] -> real[..., channels, height', width']
    Raises:
        ShapeError: x lacks axes, or is smaller than a window.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.MaxPool2d(2)(jnp.ones((8, 3, 28, 28))).shape
        (8, 3, 14, 14)
    References:
        torch.nn.MaxPool2d, PyTorch 2.13.
    """

    num_spatial_dims = 2


class MaxPool3d(MaxPool):
    """Gives the maximum of each window of three space axes.

    Args:
        kernel_size, stride, padding: As in MaxPool2d, for three axes.
    Shapes:
        x: real[..., channels, depth, height, width] -> real[..., channels, depth', height', width']
    Raises:
        ShapeError: x lacks axes, or is smaller than a window.
        ArgumentError: a number out of its range.
    Example:
        >>> nn.MaxPool3d(2, stride=1)(jnp.ones((3, 4, 4, 4))).shape
        (3, 3, 3, 3)
    References:
        torch.nn.MaxPool3d, PyTorch 2.13.
    """

    num_spatial_dims = 3


class AvgPool1d(AvgPool):
    """Gives the average of each window of one space axis, summed in float32 or wider.

    Args:
        kernel_size: In elements, at least 1.
        stride: In elements, at least 1; None is kernel_size.
        padding: Zeros in elements, below kernel_size: an int, a pair for the axis ``((before, after),)``, "SAME",
            "SAME_LOWER" or "VALID".
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
        padding: Zeros in elements, below kernel_size: an int, one for each axis, pairs, "SAME", "SAME_LOWER" or
            "VALID".
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
        kernel_size, stride, padding, count_include_pad: As in AvgPool2d, for three axes.
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
