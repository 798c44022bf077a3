# SPDX-License-Identifier: Apache-2.0
"""Pooling whose windows follow from the size of the output: adaptive, to a given size, and global, to one value.

Channels come first. The window of output i of m, over n elements, is floor(i * n / m) <= place < ceil((i + 1) * n / m),
as in PyTorch: neighbors share at most one element. A window over several axes is a product of one for each, so its
average, or its maximum, is taken axis by axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tether._modules import Module
from tether.errors import ArgumentError
from tether.nn._inputs import as_array, at_least_float32, integer, name_of, real_only
from tether.nn._window import check_rank, first_best, take_windows


class AdaptivePool(Module):
    """Holds what adaptive pooling shares: the size of the output, and where the windows lie."""

    num_spatial_dims: ClassVar[int]

    def __init__(self, output_size: int | Sequence[int | None] | None):
        name, axes = name_of(self), self.num_spatial_dims
        sizes = tuple(output_size) if isinstance(output_size, list | tuple) else (output_size,) * axes
        if len(sizes) != axes:
            raise ArgumentError(
                f"{name}: output_size has {len(sizes)} numbers for {axes} space axes.",
                got=f"output_size={output_size!r}",
                expected=f"an int, or {axes} of them; None keeps the size of an axis",
                fix=f"output_size={(1,) * axes}",
            )
        self.output_size = tuple(size if size is None else integer(name, "output_size", size) for size in sizes)

    def _windows(self, x: jax.Array) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Gives for each space axis, from the last on, its number, the places of the windows, and their lengths.

        A place beyond the end of a window stands for its last element.
        """
        found = []
        for axis, m in zip(range(x.ndim - self.num_spatial_dims, x.ndim), self.output_size, strict=True):
            n = x.shape[axis]
            m = n if m is None else m
            i = np.arange(m)
            first, end = i * n // m, -((i + 1) * -n // m)
            places = first[:, None] + np.arange((end - first).max())
            found.append((axis, np.minimum(places, end[:, None] - 1), end - first))
        return found[::-1]


class AdaptiveAvgPool(AdaptivePool):
    """Gives the average of each window, summed in float32 or wider."""

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        check_rank(self, x, self.num_spatial_dims)
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
        y = x.astype(at_least_float32(dtype))
        for axis, places, lengths in self._windows(x):
            # A choice, not a product with 0 or 1: 0 * NaN would carry a NaN into the window before.
            last = (-1,) + (1,) * (x.ndim - 1 - axis)
            real = (np.arange(places.shape[1]) < lengths[:, None]).reshape(places.shape + last[1:])
            windows = take_windows(y, axis, places)
            total = jnp.where(jnp.broadcast_to(real, windows.shape), windows, 0).sum(axis + 1)
            y = total / jnp.broadcast_to(jnp.asarray(lengths.reshape(last), y.dtype), total.shape)
        return y.astype(dtype)


class AdaptiveMaxPool(AdaptivePool):
    """Gives the maximum of each window."""

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        check_rank(self, x, self.num_spatial_dims)
        for axis, places, _ in self._windows(x):
            x = first_best(x, axis, places, jnp.argmax)
        return x


class GlobalAvgPool(Module):
    """Gives the average of each channel over all space axes, summed in float32 or wider.

    Args:
        num_spatial_dims: Number of space axes, the last ones of x; at least 1.
    Shapes:
        x: float[..., channels, *space] -> float[..., channels]
    Raises:
        ShapeError: x lacks axes, or has an empty one.
        ArgumentError: num_spatial_dims is below 1.
    Example:
        >>> nn.GlobalAvgPool(2)(jnp.ones((8, 16, 7, 7))).shape
        (8, 16)
    References:
        Lin, Chen and Yan 2013, arXiv:1312.4400, section 3.2.
    """

    def __init__(self, num_spatial_dims: int):
        self.num_spatial_dims = integer(name_of(self), "num_spatial_dims", num_spatial_dims)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        check_rank(self, x, self.num_spatial_dims)
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.result_type(float)
        space = tuple(range(-self.num_spatial_dims, 0))
        return x.astype(at_least_float32(dtype)).mean(space).astype(dtype)


class GlobalMaxPool(Module):
    """Gives the maximum of each channel over all space axes. Of equal elements the first has the gradient.

    Args:
        num_spatial_dims: Number of space axes, the last ones of x; at least 1.
    Shapes:
        x: real[..., channels, *space] -> real[..., channels]
    Raises:
        ShapeError: x lacks axes, or has an empty one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: num_spatial_dims is below 1.
    Example:
        >>> nn.GlobalMaxPool(1)(jnp.asarray([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]]))
        Array([3., 0.], dtype=float32)
    References:
        torch.nn.AdaptiveMaxPool1d(1) and its like, PyTorch 2.13, which keep the axes.
    """

    def __init__(self, num_spatial_dims: int):
        self.num_spatial_dims = integer(name_of(self), "num_spatial_dims", num_spatial_dims)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        check_rank(self, x, self.num_spatial_dims)
        kept = x.ndim - self.num_spatial_dims
        size = int(np.prod(x.shape[kept:]))
        y = x.reshape((*x.shape[:kept], size))
        return first_best(y, kept, np.arange(size)[None], jnp.argmax).squeeze(kept)


class AdaptiveAvgPool1d(AdaptiveAvgPool):
    """Gives output_size averages over windows that together cover one space axis.

    The average of output i is over floor(i * length / output_size) <= place < ceil((i + 1) * length / output_size),
    summed in float32 or wider.

    Args:
        output_size: Length of the output, at least 1; None keeps that of x.
    Shapes:
        x: float[..., channels, length] -> float[..., channels, output_size]
    Raises:
        ShapeError: x lacks axes, or has an empty one.
        ArgumentError: output_size is below 1.
    Example:
        >>> nn.AdaptiveAvgPool1d(2)(jnp.asarray([[1.0, 3.0, 8.0]]))
        Array([[2. , 5.5]], dtype=float32)
    References:
        torch.nn.AdaptiveAvgPool1d, PyTorch 2.13. Equinox's windows are others where output_size doesn't divide length.
    """

    num_spatial_dims = 1


class AdaptiveAvgPool2d(AdaptiveAvgPool):
    """Gives output_size averages over windows that together cover two space axes, as AdaptiveAvgPool1d for each.

    Args:
        output_size: Of the output, at least 1: an int, or one for each axis; None keeps the size of an axis.
    Shapes:
        x: float[..., channels, height, width] -> float[..., channels, *output_size]
    Raises:
        ShapeError: x lacks axes, or has an empty one.
        ArgumentError: output_size is below 1, or not of two numbers.
    Example:
        >>> nn.AdaptiveAvgPool2d((3, None))(jnp.ones((8, 16, 7, 5))).shape
        (8, 16, 3, 5)
    References:
        torch.nn.AdaptiveAvgPool2d, PyTorch 2.13.
    """

    num_spatial_dims = 2


class AdaptiveAvgPool3d(AdaptiveAvgPool):
    """Gives output_size averages over windows that together cover three space axes, as AdaptiveAvgPool1d for each.

    Args:
        output_size: As in AdaptiveAvgPool2d, for three axes.
    Shapes:
        x: float[..., channels, depth, height, width] -> float[..., channels, *output_size]
    Raises:
        ShapeError: x lacks axes, or has an empty one.
        ArgumentError: output_size is below 1, or not of three numbers.
    Example:
        >>> nn.AdaptiveAvgPool3d(2)(jnp.ones((3, 4, 5, 6))).shape
        (3, 2, 2, 2)
    References:
        torch.nn.AdaptiveAvgPool3d, PyTorch 2.13.
    """

    num_spatial_dims = 3


class AdaptiveMaxPool1d(AdaptiveMaxPool):
    """Gives output_size maxima over windows that together cover one space axis.

    The windows are those of AdaptiveAvgPool1d. Of equal elements the first has the gradient.

    Args:
        output_size: Length of the output, at least 1; None keeps that of x.
    Shapes:
        x: real[..., channels, length] -> real[..., channels, output_size]
    Raises:
        ShapeError: x lacks axes, or has an empty one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: output_size is below 1.
    Example:
        >>> nn.AdaptiveMaxPool1d(2)(jnp.asarray([[1.0, 3.0, 8.0]]))
        Array([[3., 8.]], dtype=float32)
    References:
        torch.nn.AdaptiveMaxPool1d, PyTorch 2.13. Equinox's windows are others where output_size doesn't divide length.
    """

    num_spatial_dims = 1


class AdaptiveMaxPool2d(AdaptiveMaxPool):
    """Gives output_size maxima over windows that together cover two space axes, as AdaptiveMaxPool1d for each.

    Args:
        output_size: As in AdaptiveAvgPool2d.
    Shapes:
        x: real[..., channels, height, width] -> real[..., channels, *output_size]
    Raises:
        ShapeError: x lacks axes, or has an empty one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: output_size is below 1, or not of two numbers.
    Example:
        >>> nn.AdaptiveMaxPool2d((3, None))(jnp.ones((8, 16, 7, 5))).shape
        (8, 16, 3, 5)
    References:
        torch.nn.AdaptiveMaxPool2d, PyTorch 2.13.
    """

    num_spatial_dims = 2


class AdaptiveMaxPool3d(AdaptiveMaxPool):
    """Gives output_size maxima over windows that together cover three space axes, as AdaptiveMaxPool1d for each.

    Args:
        output_size: As in AdaptiveAvgPool2d, for three axes.
    Shapes:
        x: real[..., channels, depth, height, width] -> real[..., channels, *output_size]
    Raises:
        ShapeError: x lacks axes, or has an empty one.
        DtypeError: x is not an array of real numbers.
        ArgumentError: output_size is below 1, or not of three numbers.
    Example:
        >>> nn.AdaptiveMaxPool3d(2)(jnp.ones((3, 4, 5, 6))).shape
        (3, 2, 2, 2)
    References:
        torch.nn.AdaptiveMaxPool3d, PyTorch 2.13.
    """

    num_spatial_dims = 3
