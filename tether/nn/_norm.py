# SPDX-License-Identifier: Apache-2.0
"""Normalization of the trailing axes of each example by its own statistics, so no state and no mode."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn._inputs import (
    as_array,
    at_least_float32,
    computing_dtype,
    integer,
    name_of,
    positive,
    real_dtype,
    real_only,
)

NO_VARIANCE = "complex numbers have no variance here"


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
        self.eps = positive(name, "eps", eps, 1e-5)
        self.compute_dtype = None
        dtype = real_dtype(name, dtype, NO_VARIANCE)
        self.weight = Param(jnp.ones(self.shape, dtype)) if use_weight else None
        self.bias = Param(jnp.zeros(self.shape, dtype)) if use_bias else None

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        _check_trailing(self, x)
        weight, bias = self.weight, self.bias
        dtype = computing_dtype(self, x, weight, bias)
        deviation, var = moments(x.astype(at_least_float32(dtype)), tuple(range(-len(self.shape), 0)))
        return affine(deviation * lax.rsqrt(var + self.eps), weight, bias).astype(dtype)


class RMSNorm(Module):
    """Divides the trailing axes of each example by the root of their mean square.

    y = x / sqrt(mean(x^2) + eps) * weight + bias

    The mean is taken in float32 or wider; y has the dtype of a floating x, or ``compute_dtype``.

    Args:
        shape: Sizes of the trailing axes that are normalized together; an int is one axis.
        eps: Added to the mean square, in units of x squared; positive.
        use_weight, use_bias: Whether weight and bias are there; the paper has no bias.
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
        >>> norm = nn.RMSNorm(2)
        >>> [round(y, 3) for y in norm(jnp.asarray([3.0, 4.0])).tolist()]
        [0.849, 1.131]
    References:
        Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        eps: float = 1e-6,
        use_weight: bool = True,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        self.shape = _shape(name, shape)
        self.eps = positive(name, "eps", eps, 1e-6)
        self.compute_dtype = None
        dtype = real_dtype(name, dtype, NO_VARIANCE)
        self.weight = Param(jnp.ones(self.shape, dtype)) if use_weight else None
        self.bias = Param(jnp.zeros(self.shape, dtype)) if use_bias else None

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        _check_trailing(self, x)
        weight, bias = self.weight, self.bias
        dtype = computing_dtype(self, x, weight, bias)
        h = x.astype(at_least_float32(dtype))
        square = jnp.square(h).mean(tuple(range(-len(self.shape), 0)), keepdims=True)
        return affine(h * lax.rsqrt(square + self.eps), weight, bias).astype(dtype)


def moments(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Gives the deviations from the mean along axes and the biased variance, in two passes."""
    # Neither depends on a shift, so neither does their gradient. With one element taken off first, a constant input
    # is zero exactly: the mean of n equal floats can be off by a rounding, which eps would not hide at 1e7.
    counted = {axis % x.ndim for axis in axes}
    first = x[tuple(slice(0, 1) if axis in counted else slice(None) for axis in range(x.ndim))]
    deviation = x - lax.stop_gradient(first)
    deviation = deviation - deviation.mean(axes, keepdims=True)
    return deviation, jnp.square(deviation).mean(axes, keepdims=True)


def affine(y: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """Multiplies by the weight and adds the bias, each in the dtype of y, where there is one."""
    with jax.numpy_rank_promotion("allow"):  # as in Linear
        y = y if weight is None else y * weight.astype(y.dtype)
        return y if bias is None else y + bias.astype(y.dtype)


def _check_trailing(module: LayerNorm | RMSNorm, x: jax.Array) -> None:
    if x.shape[-len(module.shape) :] != module.shape:
        name = name_of(module)
        raise ShapeError(
            f"{name}: the trailing axes of x are not {module.shape}.",
            got=describe(x),
            expected=f"[..., {', '.join(map(str, module.shape))}]",
            fix=f"give {name} the sizes of the axes to normalize, the last ones of x",
        )


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
