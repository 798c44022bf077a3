# SPDX-License-Identifier: Apache-2.0
"""Normalization by the statistics of each example alone, so no state and no mode. BatchNorm has its own file."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn._inputs import as_array, at_least_float32, computing_dtype, inexact_dtype, integer, name_of, real_only


class LayerNorm(Module):
    """Normalizes the trailing axes of each example by their own mean and variance.

    y = (x - mean) / sqrt(var + eps) * weight + bias, var biased

    Mean and variance are taken in float32 or wider, in two passes; y has the dtype of a floating x, or
    ``compute_dtype``.

    Args:
        shape: Sizes of the trailing axes that are normalized together; an int is one axis.
        eps: Added to the variance, in units of x squared; positive.
        use_weight, use_bias: Whether weight and bias are there.
        dtype: Of the parameters.
    Variables:
        weight: Param, float[*shape]; ones at first; None without use_weight.
        bias: Param, float[*shape]; zeros at first; None without use_bias.
    Shapes:
        x: float[..., *shape] -> float[..., *shape]
    Raises:
        ShapeError: the trailing axes of x are not shape.
        DtypeError: x is not an array of real numbers.
        ArgumentError: an empty shape, or eps not above 0.
    Example:
        >>> norm = nn.LayerNorm(4)
        >>> [round(y, 3) for y in norm(jnp.asarray([1.0, 2.0, 3.0, 4.0])).tolist()]
        [-1.342, -0.447, 0.447, 1.342]
    References:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        self.shape = _shape(name, shape)
        self.eps = _eps(name, eps)
        self.compute_dtype = None
        dtype = inexact_dtype(name, "dtype", dtype)
        self.weight = Param(jnp.ones(self.shape, dtype)) if use_weight else None
        self.bias = Param(jnp.zeros(self.shape, dtype)) if use_bias else None

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        if x.shape[-len(self.shape) :] != self.shape:
            raise ShapeError(
                f"{name_of(self)}: the trailing axes of x are not {self.shape}.",
                got=describe(x),
                expected=f"[..., {', '.join(map(str, self.shape))}]",
                fix="give LayerNorm the sizes of the axes to normalize, the last ones of x",
            )
        weight, bias = self.weight, self.bias
        dtype = computing_dtype(self, x, weight, bias)
        wide = at_least_float32(dtype)
        y = standardize(x.astype(wide), len(self.shape), self.eps)
        with jax.numpy_rank_promotion("allow"):  # as in Linear
            y = y if weight is None else y * weight.astype(wide)
            y = y if bias is None else y + bias.astype(wide)
        return y.astype(dtype)


def standardize(x: jax.Array, rank: int, eps: float) -> jax.Array:
    """Subtracts the mean of the last ``rank`` axes and divides by the root of their biased variance plus eps."""
    axes = tuple(range(-rank, 0))
    # The result doesn't depend on a shift, so neither does its gradient. With one element taken off first, a constant
    # input is zero exactly: the mean of n equal floats can be off by a rounding, which eps would not hide at 1e7.
    x = x - lax.stop_gradient(x[(..., *(slice(0, 1) for _ in axes))])
    x = x - x.mean(axes, keepdims=True)
    return x * lax.rsqrt((x * x).mean(axes, keepdims=True) + eps)


def _shape(name: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
    if not sizes:
        raise ArgumentError(
            f"{name}: shape names no axis.",
            got="shape=()",
            expected="an int or a tuple of ints",
            fix=f"nn.{name}(x.shape[-1]) normalizes the last axis",
        )
    return tuple(integer(name, "shape", size) for size in sizes)


def _eps(name: str, eps: float) -> float:
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < float("inf"):
        raise ArgumentError(
            f"{name}: eps is not a positive number.", got=f"eps={describe(eps)}", expected="a float > 0", fix="eps=1e-5"
        )
    return float(eps)
