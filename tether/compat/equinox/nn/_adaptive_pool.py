# SPDX-License-Identifier: Apache-2.0
"""Pooling of one example to a given shape.

| Equinox | here | what differs |
| --- | --- | --- |
| AdaptivePool, AdaptiveAvgPool1d to AdaptiveMaxPool3d | the same windows, which aren't PyTorch's | a window goes \
through ``operation`` once, where it went through it twice if all were of one length |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tether.compat.equinox.module import Module, static_field
from tether.compat.equinox.nn._arguments import Numbers, check_rank
from tether.errors import ShapeError, describe
from tether.nn._inputs import name_of
from tether.nn._window import per_axis


class AdaptivePool(Module):
    """Reduces each space axis to a given length, whatever it was.

    Of n elements and m windows the first n % m have n // m + 1 elements, the others n // m; none overlap.

    Args:
        target_shape: Lengths of the space axes of y: a number, or one for each.
        num_spatial_dims: Number of space axes.
        operation: Function of the elements of a window, a vector, to a number; a leaf. Axis after axis it is applied.
    Shapes:
        x: [channels, *space] -> [channels, *target_shape]
    Raises:
        ValueError: a wrong target_shape.
        ShapeError: x isn't one example, or has an axis shorter than it should become.
    Example:
        >>> eqx.nn.AdaptivePool(2, 1, jnp.sum)(jnp.arange(5.0)[None]).tolist()
        [[3.0, 7.0]]
    """

    target_shape: tuple[int, ...] = static_field()
    operation: Callable[..., Any]

    def __init__(self, target_shape: Numbers, num_spatial_dims: int, operation: Callable[..., Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.target_shape = per_axis(name_of(self), "target_shape", target_shape, num_spatial_dims)
        self.operation = operation

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The reduced windows; the key is ignored."""
        check_rank(self, x, len(self.target_shape))
        if any(n < m for n, m in zip(x.shape[1:], self.target_shape, strict=True)):
            raise ShapeError(
                f"{name_of(self)}: x has an axis that is shorter than it should become.",
                got=describe(x),
                expected=f"space axes of at least {self.target_shape}",
                fix="a smaller target_shape",
            )
        for axis, count in enumerate(self.target_shape, 1):
            x = _reduced(jnp.asarray(x), axis, count, self.operation)
        return x


def _reduced(x: jax.Array, axis: int, count: int, operation: Callable[..., Any]) -> jax.Array:
    x = jnp.moveaxis(x, axis, -1)
    length, longer = divmod(x.shape[-1], count)
    end = longer * (length + 1)
    parts = [(x[..., :end], length + 1), (x[..., end:], length)]
    windows = [part.reshape(*x.shape[:-1], -1, size) for part, size in parts if part.shape[-1]]
    y = jnp.concatenate([jnp.apply_along_axis(operation, -1, each) for each in windows], -1)
    return jnp.moveaxis(y, -1, axis)


class _AdaptivePoolOfRank(AdaptivePool):
    """What AdaptiveAvgPool1d to AdaptiveMaxPool3d share."""

    _axes: ClassVar[int]
    _operation: ClassVar[Callable[..., Any]]

    def __init__(self, target_shape: Numbers, **kwargs: Any):
        super().__init__(target_shape, self._axes, self._operation, **kwargs)


class _AdaptiveAvgPool(_AdaptivePoolOfRank):
    _operation = staticmethod(jnp.mean)


class _AdaptiveMaxPool(_AdaptivePoolOfRank):
    _operation = staticmethod(jnp.max)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """The mean of each window of one space axis; where they lie is said in AdaptivePool.

    Args:
        target_shape: Length of y: a number.
    Example:
        >>> eqx.nn.AdaptiveAvgPool1d(2)(jnp.arange(5.0)[None]).tolist()
        [[1.0, 3.5]]
    """

    _axes = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """The mean of each window of two space axes; where they lie is said in AdaptivePool.

    Args:
        target_shape: Lengths of y: a number, or two.
    Example:
        >>> eqx.nn.AdaptiveAvgPool2d((2, 3))(jnp.ones((4, 5, 7))).shape
        (4, 2, 3)
    """

    _axes = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """The mean of each window of three space axes; where they lie is said in AdaptivePool.

    Args:
        target_shape: Lengths of y: a number, or three.
    Example:
        >>> eqx.nn.AdaptiveAvgPool3d(2)(jnp.ones((4, 5, 6, 7))).shape
        (4, 2, 2, 2)
    """

    _axes = 3


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
    """The maximum of each window of one space axis; where they lie is said in AdaptivePool.

    Args:
        target_shape: Length of y: a number.
    Example:
        >>> eqx.nn.AdaptiveMaxPool1d(2)(jnp.arange(5.0)[None]).tolist()
        [[2.0, 4.0]]
    """

    _axes = 1


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
    """The maximum of each window of two space axes; where they lie is said in AdaptivePool.

    Args:
        target_shape: Lengths of y: a number, or two.
    Example:
        >>> eqx.nn.AdaptiveMaxPool2d((2, 3))(jnp.ones((4, 5, 7))).shape
        (4, 2, 3)
    """

    _axes = 2


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
    """The maximum of each window of three space axes; where they lie is said in AdaptivePool.

    Args:
        target_shape: Lengths of y: a number, or three.
    Example:
        >>> eqx.nn.AdaptiveMaxPool3d(2)(jnp.ones((4, 5, 6, 7))).shape
        (4, 2, 2, 2)
    """

    _axes = 3
