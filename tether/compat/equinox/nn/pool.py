# SPDX-License-Identifier: Apache-2.0
"""Pooling of one example.

| Equinox | here | what differs |
| --- | --- | --- |
| Pool, AvgPool1d to MaxPool3d | ``lax.reduce_window`` | |
| AvgPool1D to MaxPool3D | old names | |
| AdaptivePool, AdaptiveAvgPool1d to AdaptiveMaxPool3d | _adaptive_pool.py | see there |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tether.compat.equinox._errors import CallError, RankError
from tether.compat.equinox.module import Module, static_field
from tether.compat.equinox.nn._adaptive_pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AdaptivePool,
)
from tether.compat.equinox.nn._arguments import Numbers, Padding, check_rank, pairs
from tether.nn._inputs import name_of
from tether.nn._window import per_axis

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AdaptivePool",
    "AvgPool1D",
    "AvgPool1d",
    "AvgPool2D",
    "AvgPool2d",
    "AvgPool3D",
    "AvgPool3d",
    "MaxPool1D",
    "MaxPool1d",
    "MaxPool2D",
    "MaxPool2d",
    "MaxPool3D",
    "MaxPool3d",
    "Pool",
]


class Pool(Module):
    """Reduces windows over any number of space axes.

    Args:
        init: What a reduction begins with; padding is filled with it. A leaf, and so is operation.
        operation: Of two elements. It can be differentiated if it is ``lax.add`` or ``lax.max`` and init is neutral.
        num_spatial_dims: Number of space axes.
        kernel_size, stride: Of a window: a number, or one for each space axis.
        padding: A number, one for each space axis, or pairs of before and after.
        use_ceil: Whether a last window that reaches beyond the padding is there too.
    Shapes:
        x: [channels, *space] -> [channels, *space']
    Raises:
        ValueError: a wrong kernel_size, stride or padding.
        AssertionError: x isn't one example.
        RuntimeError: padding, with what use_ceil adds, is wider than the window.
    Example:
        >>> eqx.nn.Pool(1.0, jax.lax.mul, 1, kernel_size=2)(jnp.array([[1.0, 2.0, 3.0]])).tolist()
        [[2.0, 6.0]]
    """

    init: Any
    operation: Callable[..., Any]
    num_spatial_dims: int = static_field()
    kernel_size: tuple[int, ...] = static_field()
    stride: tuple[int, ...] = static_field()
    padding: tuple[tuple[int, int], ...] = static_field()
    use_ceil: bool = static_field()

    def __init__(
        self,
        init: Any,
        operation: Callable[..., Any],
        num_spatial_dims: int,
        kernel_size: Numbers,
        stride: Numbers = 1,
        padding: Padding = 0,
        use_ceil: bool = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        name = name_of(self)
        self.init = init
        self.operation = operation
        self.num_spatial_dims = num_spatial_dims
        self.kernel_size = per_axis(name, "kernel_size", kernel_size, num_spatial_dims)
        self.stride = per_axis(name, "stride", stride, num_spatial_dims)
        self.padding = pairs(name, padding, num_spatial_dims)
        self.use_ceil = use_ceil

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The reduced windows; the key is ignored."""
        check_rank(self, x, self.num_spatial_dims, RankError)
        padding = self.padding
        if self.use_ceil:
            padding = tuple(map(_with_last_window, x.shape[1:], padding, self.kernel_size, self.stride))
        if any(max(pair) > size for pair, size in zip(padding, self.kernel_size, strict=True)):
            raise CallError(
                f"{name_of(self)}: padding is wider than the window{', with what use_ceil adds' * self.use_ceil}.",
                got=f"padding {padding}, kernel_size {self.kernel_size}, stride {self.stride}",
                expected="padding <= kernel_size, on each side",
                fix=["use_ceil=False", "a smaller stride or padding"] if self.use_ceil else "padding=kernel_size // 2",
            )
        kernel, stride = (1, *self.kernel_size), (1, *self.stride)
        return lax.reduce_window(jnp.asarray(x), self.init, self.operation, kernel, stride, ((0, 0), *padding))


def _with_last_window(size: int, pair: tuple[int, int], kernel: int, stride: int) -> tuple[int, int]:
    before, after = pair
    return (before, after + stride) if (size + before + after - kernel) % stride else pair


class _PoolOfRank(Pool):
    """What AvgPool1d to MaxPool3d share."""

    _axes: ClassVar[int]
    _init: ClassVar[float]
    _operation: ClassVar[Callable[..., Any]]

    def __init__(
        self, kernel_size: Numbers, stride: Numbers, padding: Padding = 0, use_ceil: bool = False, **kwargs: Any
    ):
        super().__init__(self._init, self._operation, self._axes, kernel_size, stride, padding, use_ceil, **kwargs)


class _AvgPool(_PoolOfRank):
    """The sum of each window, divided by its size."""

    _init, _operation = 0, staticmethod(lax.add)

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The means of the windows; the key is ignored."""
        return super().__call__(x) / math.prod(self.kernel_size)


class _MaxPool(_PoolOfRank):
    """The maximum of each window."""

    _init, _operation = -jnp.inf, staticmethod(lax.max)


class AvgPool1d(_AvgPool):
    """The mean of each window of one space axis; padding counts, as zeros.

    Args:
        kernel_size, stride, padding, use_ceil: As in Pool.
    Example:
        >>> eqx.nn.AvgPool1d(2, 2)(jnp.array([[1.0, 3.0, 2.0, 0.0]])).tolist()
        [[2.0, 1.0]]
    """

    _axes = 1


class AvgPool2d(_AvgPool):
    """The mean of each window of two space axes; padding counts, as zeros.

    Args:
        kernel_size, stride, padding, use_ceil: As in Pool.
    Example:
        >>> eqx.nn.AvgPool2d(2, 2)(jnp.ones((3, 4, 6))).shape
        (3, 2, 3)
    """

    _axes = 2


class AvgPool3d(_AvgPool):
    """The mean of each window of three space axes; padding counts, as zeros.

    Args:
        kernel_size, stride, padding, use_ceil: As in Pool.
    Example:
        >>> eqx.nn.AvgPool3d(2, 2)(jnp.ones((3, 4, 6, 8))).shape
        (3, 2, 3, 4)
    """

    _axes = 3


class MaxPool1d(_MaxPool):
    """The maximum of each window of one space axis; padding never is it.

    Args:
        kernel_size, stride, padding, use_ceil: As in Pool.
    Example:
        >>> eqx.nn.MaxPool1d(2, 2)(jnp.array([[1.0, 3.0, 2.0, 0.0]])).tolist()
        [[3.0, 2.0]]
    """

    _axes = 1


class MaxPool2d(_MaxPool):
    """The maximum of each window of two space axes; padding never is it.

    Args:
        kernel_size, stride, padding, use_ceil: As in Pool.
    Example:
        >>> eqx.nn.MaxPool2d(3, 2, padding=1)(jnp.ones((3, 5, 7))).shape
        (3, 3, 4)
    """

    _axes = 2


class MaxPool3d(_MaxPool):
    """The maximum of each window of three space axes; padding never is it.

    Args:
        kernel_size, stride, padding, use_ceil: As in Pool.
    Example:
        >>> eqx.nn.MaxPool3d(2, 2)(jnp.ones((3, 4, 6, 8))).shape
        (3, 2, 3, 4)
    """

    _axes = 3


AvgPool1D, AvgPool2D, AvgPool3D = AvgPool1d, AvgPool2d, AvgPool3d
MaxPool1D, MaxPool2D, MaxPool3D = MaxPool1d, MaxPool2d, MaxPool3d
