# SPDX-License-Identifier: Apache-2.0
"""Dropout of elements, channels and whole examples: the layers that draw random numbers when called."""

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

# -scale * alpha of SELU, to more digits than float64 has.
_LIMIT = -1.0507009873554804934193349852946 * 1.6732632423543772848170429916717


class Dropout(Module):
    """Sets each element to zero with probability p in training, and is the identity in evaluation.

    y = x * m / (1 - p), m ~ Bernoulli(1 - p), so that E[y] = x

    Draws once a call: from the key given to the call, else from the stream in force (``tether.random.scope``, or the
    default stream). Evaluation, p = 0 (the identity) and p = 1 (all zeros) draw nothing.

    Args:
        p: Probability that an element is dropped, in [0, 1].
        shared_axes: Axes along which all elements share one draw. ``(-2, -1)`` drops whole channels of an image.
            Negative numbers hold for any number of batch axes.
    Shapes:
        x: float[...] -> float[...]
    Raises:
        ArgumentError: p is not in [0, 1].
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
        self.shared_axes = _axes(name_of(self), "shared_axes", shared_axes)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = _floating(self, x)
        shared = _places(self, x, "shared_axes", self.shared_axes)
        return _dropped(self, x, shared)


class DropPath(Module):
    """Sets whole examples to zero with probability p in training: stochastic depth. The identity in evaluation.

    y = x * m / (1 - p), m ~ Bernoulli(1 - p) for each example, so that E[y] = x

    For the branch of a residual block, ``x + drop_path(branch(x))``, which then is skipped for some examples. Draws as
    Dropout does.

    Args:
        p: Probability that an example is dropped, in [0, 1].
        example_axes: Axes of x along which examples lie; each example has a draw of its own. 0 is a batch
            ``[batch, ...]``; ``()`` is one example, as under vmap, where every lane draws for itself. Never read off
            the shape of x: one example given to ``example_axes=0`` has a draw for each place along its first axis.
    Shapes:
        x: float[...] -> float[...]
    Raises:
        ArgumentError: p is not in [0, 1].
        ShapeError: x lacks an axis of examples.
        DtypeError: x is not floating.
    Example:
        >>> y = nn.DropPath(0.5)(jnp.ones((64, 3)), key=jax.random.key(0))
        >>> sorted(set(map(tuple, y.tolist())))
        [(0.0, 0.0, 0.0), (2.0, 2.0, 2.0)]
        >>> tether.vmap(nn.DropPath(0.5, example_axes=()))(jnp.ones((64, 3))).shape
        (64, 3)
    References:
        Huang et al. 2016, arXiv:1603.09382, section 3; scaled in training, as timm and torchvision do.
    """

    def __init__(self, p: float = 0.5, *, example_axes: int | Sequence[int] = 0):
        self.p = _probability(name_of(self), p)
        self.example_axes = _axes(name_of(self), "example_axes", example_axes)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = _floating(self, x)
        examples = _places(self, x, "example_axes", self.example_axes)
        return _dropped(self, x, set(range(x.ndim)) - examples)


class AlphaDropout(Module):
    """Sets elements to the limit of SELU with probability p in training, and keeps mean 0 and variance 1 as they are.

    y = a * (x if kept else c) + b, c = -1.7581, a = ((1 - p) (1 + p c^2))^(-1/2), b = -a p c

    For networks of ``jax.nn.selu``. The identity in evaluation; p = 1 gives zeros. Draws as Dropout does.

    Args:
        p: Probability that an element is dropped, in [0, 1].
        shared_axes: Axes along which all elements share one draw, as in Dropout.
    Shapes:
        x: float[...] -> float[...]
    Raises:
        ArgumentError: p is not in [0, 1].
        ShapeError: x lacks a shared axis.
        DtypeError: x is not floating.
    Example:
        >>> nn.AlphaDropout(0.5).eval()(jnp.ones(2)).tolist()
        [1.0, 1.0]
    References:
        Klambauer et al. 2017, arXiv:1706.02515, "new dropout technique".
    """

    def __init__(self, p: float = 0.5, *, shared_axes: int | Sequence[int] = ()):
        self.p = _probability(name_of(self), p)
        self.shared_axes = _axes(name_of(self), "shared_axes", shared_axes)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = _floating(self, x)
        shared = _places(self, x, "shared_axes", self.shared_axes)
        p = _probability(name_of(self), self.p)  # again: a view may have set it
        if not self.training or p == 0:
            return x
        if p == 1:
            return jnp.zeros_like(x)
        a = ((1 - p) * (1 + p * _LIMIT**2)) ** -0.5
        return a * jnp.where(_kept(x, p, shared), x, _LIMIT) - a * p * _LIMIT


def _floating(module: Module, x: ArrayLike) -> jax.Array:
    """Takes the input of a layer that scales it, which must be floating."""
    x = as_array(module, x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise DtypeError(
            f"{name_of(module)}: x is not floating.",
            got=describe(x),
            expected="a floating array: scaled by 1 / (1 - p), integers would be rounded",
            fix="x.astype(jnp.float32) before dropout",
        )
    return x


def _dropped(module: Dropout | DropPath, x: jax.Array, shared: set[int]) -> jax.Array:
    p = _probability(name_of(module), module.p)  # again: a view may have set it
    if not module.training or p == 0:
        return x
    if p == 1:
        return jnp.zeros_like(x)
    return jnp.where(_kept(x, p, shared), x / (1 - p), 0)


def _kept(x: jax.Array, p: float, shared: set[int]) -> jax.Array:
    """Draws which elements are kept, the same along shared axes."""
    shape = [1 if axis in shared else size for axis, size in enumerate(x.shape)]
    return jnp.broadcast_to(jax.random.bernoulli(draw(), 1 - p, shape), x.shape)


def _places(module: Module, x: jax.Array, argument: str, axes: tuple[int, ...]) -> set[int]:
    for axis in axes:
        if not -x.ndim <= axis < x.ndim:
            role = "to share a draw along" if argument == "shared_axes" else "of examples"
            raise ShapeError(
                f"{name_of(module)}: x has no axis {axis} {role}.",
                got=describe(x),
                expected=f"an array with axes {axes}",
                fix=f"{argument}=() draws {'for each element' if argument == 'shared_axes' else 'once for all of x'}",
            )
    return {axis % x.ndim for axis in axes}


def _probability(name: str, p: float) -> float:
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise ArgumentError(
            f"{name}: p, the probability to drop, is not in [0, 1].",
            got=f"p={describe(p)}",
            expected="a float, 0 <= p <= 1",
            fix="p=1 - keep, if keep is the probability to keep an element",
        )
    return float(p)


def _axes(name: str, argument: str, axes: int | Sequence[int]) -> tuple[int, ...]:
    numbers: tuple[Any, ...] = tuple(axes) if isinstance(axes, list | tuple) else (axes,)
    if not all(isinstance(axis, int) and not isinstance(axis, bool) for axis in numbers):
        raise ArgumentError(
            f"{name}: {argument} are not axis numbers.",
            got=f"{argument}={axes!r}",
            expected="an int or a tuple of ints",
            fix=f"{argument}={(-2, -1) if argument == 'shared_axes' else 0}",
        )
    return numbers
