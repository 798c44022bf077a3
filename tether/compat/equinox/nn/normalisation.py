# SPDX-License-Identifier: Apache-2.0
"""Normalization of one example by its own statistics.

| Equinox | here | what differs |
| --- | --- | --- |
| LayerNorm, GroupNorm | the same fields | |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tether.compat.equinox._errors import SpecError
from tether.compat.equinox.module import Module, static_field

__all__ = ["GroupNorm", "LayerNorm"]


class LayerNorm(Module):
    """Normalizes a whole array by its mean and variance.

    y = (x - mean) / sqrt(var + eps) * weight + bias, var biased

    Args:
        shape: Of x; None, if there is no weight.
        eps: Added to the variance.
        elementwise_affine: Whether weight and bias are there.
    Shapes:
        x: float[*shape] -> float[*shape]
    Example:
        >>> [round(y, 3) for y in eqx.nn.LayerNorm(4)(jnp.array([1.0, 2.0, 3.0, 4.0])).tolist()]
        [-1.342, -0.447, 0.447, 1.342]
    References:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4.
    """

    shape: int | Sequence[int] | None = static_field()
    eps: float = static_field()
    elementwise_affine: bool = static_field()
    weight: jax.Array | None
    bias: jax.Array | None

    def __init__(
        self,
        shape: int | Sequence[int] | None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.shape = tuple(shape) if isinstance(shape, list) else shape
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.weight = jnp.ones(self.shape) if elementwise_affine else None
        self.bias = jnp.zeros(self.shape) if elementwise_affine else None

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The normalized array; the key is ignored."""
        y = _normalized(x, tuple(range(x.ndim)), self.eps)
        return jnp.asarray(self.weight) * y + jnp.asarray(self.bias) if self.elementwise_affine else y


class GroupNorm(Module):
    """Normalizes each group of channels of an array by its mean and variance.

    y = (x - mean) / sqrt(var + eps) * weight + bias, mean and biased var of each group

    Args:
        groups: Number of groups; divides channels.
        channels: Size of the first axis of x; None, if there is no weight.
        eps: Added to the variance.
        channelwise_affine: Whether weight and bias are there.
    Shapes:
        x: float[channels, ...] -> float[channels, ...]
    Raises:
        ValueError: groups doesn't divide channels, or channels is None and a weight needs it.
    Example:
        >>> eqx.nn.GroupNorm(2, 4)(jnp.arange(8.0).reshape(4, 2)).sum().round(3).tolist()
        0.0
    References:
        Wu and He 2018, arXiv:1803.08494, equation 7.
    """

    groups: int = static_field()
    channels: int | None = static_field()
    eps: float = static_field()
    channelwise_affine: bool = static_field()
    weight: jax.Array | None
    bias: jax.Array | None

    def __init__(
        self,
        groups: int,
        channels: int | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        **kwargs: Any,
    ):
        if channels is None and channelwise_affine:
            raise SpecError(
                "GroupNorm: weight and bias need the number of channels.",
                got="channels=None, channelwise_affine=True",
                fix=["GroupNorm(groups, channels)", "channelwise_affine=False, for neither weight nor bias"],
            )
        if channels is not None and channels % groups:
            raise SpecError(
                "GroupNorm: groups doesn't divide channels.",
                got=f"groups={groups}, channels={channels}",
                expected="channels a multiple of groups",
                fix=f"groups={math.gcd(groups, channels)}",
            )
        super().__init__(**kwargs)
        self.groups = groups
        self.channels = channels
        self.eps = eps
        self.channelwise_affine = channelwise_affine
        self.weight = jnp.ones(channels) if channels is not None and channelwise_affine else None
        self.bias = jnp.zeros(channels) if channels is not None and channelwise_affine else None

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The normalized array; the key is ignored."""
        parted = x.reshape(self.groups, x.shape[0] // self.groups, *x.shape[1:])
        y = _normalized(parted, tuple(range(1, parted.ndim)), self.eps).reshape(x.shape)
        if not self.channelwise_affine:
            return y
        column = (-1, *[1] * (x.ndim - 1))
        weight, bias = (jnp.broadcast_to(jnp.asarray(p).reshape(column), x.shape) for p in (self.weight, self.bias))
        return weight * y + bias


def _normalized(x: Any, axes: tuple[int, ...], eps: float) -> jax.Array:
    deviation = x - jnp.mean(x, axes, keepdims=True)
    return deviation * lax.rsqrt(jnp.var(x, axes, keepdims=True) + eps)
