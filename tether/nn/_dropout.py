# SPDX-License-Identifier: Apache-2.0
"""Dropout: the one layer here that draws random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tether._modules import Module
from tether.errors import ArgumentError, DtypeError, ShapeError, describe
from tether.nn._inputs import as_array, name_of
from tether.random import draw


class Dropout(Module):
    """Sets each element to zero with probability p in training, and is the identity in evaluation.

    y = x * m / (1 - p), m ~ Bernoulli(1 - p), so that E[y] = x

    Draws once a call: from the key given to the call, else from the stream in force (``tether.random.scope``, or the
    default stream). Evaluation and p = 0 draw nothing.

    Args:
        p: Probability that an element is dropped, in [0, 1).
        shared_axes: Axes along which all elements share one draw. ``(-2, -1)`` drops whole channels of an image.
            Negative numbers hold for any number of batch axes.
    Shapes:
        x: float[...] -> float[...]
    Raises:
        ArgumentError: p is not in [0, 1).
        ShapeError: x lacks a shared axis.
        DtypeError: x is not floating: scaled integers would be rounded.
    Example:
        >>> dropout = nn.Dropout(0.5)
        >>> dropout.eval()(jnp.ones(4))
        Array([1., 1., 1., 1.], dtype=float32)
        >>> sorted(set(dropout(jnp.ones(64), key=jax.random.key(0)).tolist()))
        [0.0, 2.0]
    References:
        Srivastava et al. 2014, JMLR 15, section 10, for the scaling in training.
        Tompson et al. 2015, arXiv:1411.4280, section 3.2, for whole channels.
    """

    def __init__(self, p: float = 0.5, *, shared_axes: int | Sequence[int] = ()):
        self.p = _probability(name_of(self), p)
        self.shared_axes = _axes(name_of(self), shared_axes)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise DtypeError(
                f"{name_of(self)}: x is not floating.",
                got=describe(x),
                expected="a floating array: scaled by 1 / (1 - p), integers would be rounded",
                fix="x.astype(jnp.float32) before dropout",
            )
        shape = self._mask_shape(x)
        p = _probability(name_of(self), self.p)  # again: a view may have set it
        if not self.training or p == 0:
            return x
        keep = jax.random.bernoulli(draw(), 1 - p, shape)
        return jnp.where(jnp.broadcast_to(keep, x.shape), x / (1 - p), 0)

    def _mask_shape(self, x: jax.Array) -> tuple[int, ...]:
        shape = list(x.shape)
        for axis in self.shared_axes:
            if not -x.ndim <= axis < x.ndim:
                raise ShapeError(
                    f"{name_of(self)}: x has no axis {axis} to share a draw along.",
                    got=describe(x),
                    expected=f"an array with axes {self.shared_axes}",
                    fix="shared_axes=() draws for each element",
                )
            shape[axis] = 1
        return tuple(shape)


def _probability(name: str, p: float) -> float:
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise ArgumentError(
            f"{name}: p, the probability to drop, is not in [0, 1).",
            got=f"p={describe(p)}",
            expected="a float, 0 <= p < 1",
            fix="p=1 - keep, if keep is the probability to keep an element",
        )
    return float(p)


def _axes(name: str, axes: int | Sequence[int]) -> tuple[int, ...]:
    numbers: tuple[Any, ...] = tuple(axes) if isinstance(axes, list | tuple) else (axes,)
    if not all(isinstance(axis, int) and not isinstance(axis, bool) for axis in numbers):
        raise ArgumentError(
            f"{name}: shared_axes are not axis numbers.",
            got=f"shared_axes={axes!r}",
            expected="an int or a tuple of ints",
            fix="shared_axes=(-2, -1)",
        )
    return numbers
