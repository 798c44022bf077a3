# SPDX-License-Identifier: Apache-2.0
"""Normalization of the channels of each example over its space axes: in groups, or each alone.

Three sorts of axes: one of channels; space axes, over which the statistics are; and all others, each place of which
is an example. Which axis is what is said by the arguments, never read off the shape of x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param, State
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
from tether.nn._norm import NO_VARIANCE, moments
from tether.nn._norm import affine as scaled


class _ChannelNorm(Module):
    """Holds what GroupNorm and InstanceNorm share: where the axes are, and the parameters."""

    def __init__(
        self,
        size: int,
        eps: float,
        affine: bool,
        channel_axis: int,
        space_axes: int | Sequence[int] | None,
        dtype: DTypeLike,
    ):
        name = name_of(self)
        self.size, self.eps = integer(name, "size", size), positive(name, "eps", eps, 1e-5)
        self.channel_axis, self.space_axes = _axes(name, channel_axis, space_axes)
        self.affine, self.compute_dtype = affine, None
        dtype = real_dtype(name, dtype, NO_VARIANCE)
        self.weight = Param(jnp.ones(self.size, dtype)) if affine else None
        self.bias = Param(jnp.zeros(self.size, dtype)) if affine else None

    def _input(self, x: ArrayLike) -> tuple[jax.Array, int, tuple[int, ...], jnp.dtype]:
        """Gives x in the dtype of the statistics, its channel axis and space axes, and the dtype of the output."""
        x = as_array(self, x)
        real_only(self, x)
        if not -x.ndim <= self.channel_axis < x.ndim or x.shape[self.channel_axis] != self.size:
            raise ShapeError(
                f"{name_of(self)}: axis {self.channel_axis} of x does not have {self.size} channels.",
                got=describe(x),
                expected=_layout(self.channel_axis, self.size),
                fix=[
                    "size as the input has channels",
                    "channel_axis=-3 for [..., C, H, W], 0 for one example [C, ...]",
                ],
            )
        channel = self.channel_axis % x.ndim
        dtype = computing_dtype(self, x, self.weight, self.bias)
        return x.astype(at_least_float32(dtype)), channel, self._space(x, channel), dtype

    def _space(self, x: jax.Array, channel: int) -> tuple[int, ...]:
        if self.space_axes is None:
            return tuple(range(channel + 1, x.ndim))
        axes = tuple(axis % x.ndim for axis in self.space_axes if -x.ndim <= axis < x.ndim)
        if len({channel, *axes}) != len(self.space_axes) + 1:
            raise ShapeError(
                f"{name_of(self)}: space_axes are not axes of x beside the channels.",
                got=f"{describe(x)}, space_axes={self.space_axes}, channel_axis={self.channel_axis}",
                expected="different axes of x, none of them that of the channels",
                fix="space_axes=(-3, -2), channel_axis=-1 for [..., H, W, C]",
            )
        return axes

    def _check_count(self, x: jax.Array, count: int) -> None:
        if count < 2:
            raise ShapeError(
                f"{name_of(self)}: a mean and a variance of {count} value(s).",
                got=describe(x),
                expected="at least 2 values in each group of channels of an example",
                fix=["larger space axes", "fewer groups", "nn.LayerNorm(size) for vectors"],
            )

    def _scaled(self, y: jax.Array, channel: int, dtype: jnp.dtype) -> jax.Array:
        weight, bias = (None if p is None else _broad(p, y, channel) for p in (self.weight, self.bias))
        return scaled(y, weight, bias).astype(dtype)


class GroupNorm(_ChannelNorm):
    """Normalizes each group of channels of an example over its channels and space axes.

    y = (x - mean) / sqrt(var + eps) * weight + bias, mean and biased var of each group of size / groups channels

    Groups are of channels that follow each other. Mean and variance are taken in float32 or wider, in two passes; y has
    the dtype of a floating x, or ``compute_dtype``.

    Args:
        groups: Number of groups, at least 1; divides size.
        size: Number of channels, at least 1.
        eps: Added to the variance, in units of x squared; positive.
        affine: Whether weight and bias are there.
        channel_axis: Where x has its channels. From the end, such as -3 for images, any number of axes may lead, none
            included; 0 is for one example, as under vmap.
        space_axes: Axes that the statistics are over, beside those of the channels of a group; None is all behind
            channel_axis. With channel_axis=-1 they must be said: (-3, -2) for [..., H, W, C], () for vectors.
        dtype: Of the parameters.
    Variables:
        weight, bias: Param, float[size]; ones and zeros at first; None without affine.
    Shapes:
        x: float[batch, size, ...] -> float[batch, size, ...]
    Raises:
        ShapeError: x has no such axes, or one value in a group.
        DtypeError: x is not an array of real numbers.
        ArgumentError: groups does not divide size, or an option is out of its range.
    Example:
        >>> norm = nn.GroupNorm(2, 4)
        >>> norm(jnp.ones((1, 4, 8, 8))).shape
        (1, 4, 8, 8)
    References:
        Wu and He 2018, arXiv:1803.08494, equation 7.
    """

    def __init__(
        self,
        groups: int,
        size: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        channel_axis: int = 1,
        space_axes: int | Sequence[int] | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        super().__init__(size, eps, affine, channel_axis, space_axes, dtype)
        self.groups = integer(name_of(self), "groups", groups)
        if self.size % self.groups:
            raise ArgumentError(
                f"{name_of(self)}: groups does not divide size.",
                got=f"groups={self.groups}, size={self.size}",
                expected="size a multiple of groups",
                fix=f"groups={math.gcd(self.groups, self.size)}",
            )

    def __call__(self, x: ArrayLike) -> jax.Array:
        h, channel, space, dtype = self._input(x)
        inside = self.size // self.groups
        self._check_count(h, inside * math.prod(h.shape[axis] for axis in space))
        parted = h.reshape(*h.shape[:channel], self.groups, inside, *h.shape[channel + 1 :])
        deviation, var = moments(parted, (channel + 1, *(axis + (axis > channel) for axis in space)))
        return self._scaled((deviation * lax.rsqrt(var + self.eps)).reshape(h.shape), channel, dtype)


class InstanceNorm(_ChannelNorm):
    """Normalizes each channel of an example over its space axes.

    y = (x - mean) / sqrt(var + eps) * weight + bias, mean and biased var of each channel of each example

    With track_running_stats, evaluation uses running statistics in their place, which training moves by the averages
    over the examples: mean <- decay * mean + (1 - decay) * E[mean], and var likewise by the unbiased variances. A batch
    whose statistics of a channel aren't finite leaves those alone. Under vmap the lanes are averaged.

    Args:
        size: Number of channels, at least 1.
        eps: Added to the variance, in units of x squared; positive.
        affine: Whether weight and bias are there.
        track_running_stats: Whether mean and var are there.
        decay: Weight of the old statistic in each step, in [0, 1); unitless. PyTorch's momentum is 1 - decay.
        channel_axis, space_axes, dtype: As in GroupNorm.
    Variables:
        weight, bias: Param, float[size]; ones and zeros at first; None without affine.
        mean, var: State, float[size]; written when training; only with track_running_stats.
    Shapes:
        x: float[batch, size, ...] -> float[batch, size, ...]
    Raises:
        ShapeError: x has no such axes, or one value in a channel.
        DtypeError: x is not an array of real numbers.
        ArgumentError: an option out of its range.
    Example:
        >>> norm = nn.InstanceNorm(3, channel_axis=-3)
        >>> norm(jnp.ones((3, 8, 8))).shape
        (3, 8, 8)
    References:
        Ulyanov, Vedaldi and Lempitsky 2016, arXiv:1607.08022, equation 2.
        torch.nn.InstanceNorm2d, PyTorch 2.13, for the running statistics.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        affine: bool = False,
        track_running_stats: bool = False,
        decay: float = 0.9,
        channel_axis: int = 1,
        space_axes: int | Sequence[int] | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        super().__init__(size, eps, affine, channel_axis, space_axes, dtype)
        self.track_running_stats, self.decay = track_running_stats, _decay(name_of(self), decay)
        if track_running_stats:
            stored = at_least_float32(jnp.dtype(dtype))
            self.mean = State(jnp.zeros(self.size, stored), reduce="mean")
            self.var = State(jnp.ones(self.size, stored), reduce="mean")

    def __call__(self, x: ArrayLike) -> jax.Array:
        h, channel, space, dtype = self._input(x)
        if self.track_running_stats and not self.training:
            mean, var = (_broad(s, h, channel).astype(h.dtype) for s in (self.mean, self.var))
            return self._scaled((h - mean) * lax.rsqrt(var + self.eps), channel, dtype)
        count = math.prod(h.shape[axis] for axis in space)
        self._check_count(h, count)
        deviation, var = moments(h, space)
        if self.track_running_stats:
            self._move(lax.stop_gradient(h), lax.stop_gradient(var) * (count / (count - 1)), channel)
        return self._scaled(deviation * lax.rsqrt(var + self.eps), channel, dtype)

    def _move(self, h: jax.Array, var: jax.Array, channel: int) -> None:
        others = tuple(axis for axis in range(h.ndim) if axis != channel)
        mean, var = (s.mean(others).astype(self.mean.dtype) for s in (h, var))
        taken = jnp.isfinite(mean) & jnp.isfinite(var)
        self.mean = jnp.where(taken, self.decay * self.mean + (1 - self.decay) * mean, self.mean)
        self.var = jnp.where(taken, self.decay * self.var + (1 - self.decay) * var, self.var)


def _broad(p: jax.Array, y: jax.Array, channel: int) -> jax.Array:
    return p.reshape([-1 if axis == channel else 1 for axis in range(y.ndim)])


def _axes(name: str, channel: Any, space: Any) -> tuple[int, tuple[int, ...] | None]:
    """Reads channel_axis and space_axes."""
    axes = () if space is None else tuple(space) if isinstance(space, list | tuple) else (space,)
    if not all(isinstance(axis, int) and not isinstance(axis, bool) for axis in (channel, *axes)):
        raise ArgumentError(
            f"{name}: channel_axis and space_axes are not axis numbers.",
            got=f"channel_axis={describe(channel)}, space_axes={space!r}",
            expected="an int for the channels; an int, ints or None for the space axes",
            fix="channel_axis=-1, space_axes=(-3, -2)",
        )
    if channel == -1 and space is None:
        raise ArgumentError(
            f"{name}: channels come last, and no axis is behind them that could be space.",
            got="channel_axis=-1, space_axes=None",
            expected="the space axes",
            fix=["space_axes=(-3, -2) for [..., H, W, C]", "space_axes=() for vectors [..., C]"],
        )
    return channel, None if space is None else axes


def _decay(name: str, decay: float) -> float:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ArgumentError(
            f"{name}: decay is not a number in [0, 1).",
            got=f"decay={describe(decay)}",
            expected="a float, 0 <= decay < 1",
            fix="decay=1 - momentum, if momentum is as in PyTorch",
        )
    return float(decay)


def _layout(channel_axis: int, size: int) -> str:
    """Writes the shape that x should have, such as [_, 16, ...]."""
    if channel_axis < 0:
        return f"[{', '.join(['...', str(size), *['_'] * (-1 - channel_axis)])}]"
    return f"[{', '.join([*['_'] * channel_axis, str(size), '...'])}]"
