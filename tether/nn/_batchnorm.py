# SPDX-License-Identifier: Apache-2.0
"""Batch normalization, in all its flavors.

The class says which values make one batch, checks them, and keeps the running statistics. The arithmetic is functions
of arrays: ``_moments`` is what a batch says of its channels, ``_move`` how the running statistics take that in,
``_scale`` the rest. A statistic of the batch has the shape that broadcasts to x, such as [1, size, 1, 1].
"""

from __future__ import annotations

import functools
import math
from numbers import Real
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param, State
from tether._modules import Module
from tether.errors import ArgumentError, DtypeError, ShapeError, describe
from tether.nn._inputs import as_array, at_least_float32, computing_dtype, inexact_dtype, integer, name_of, real_only

_PRESETS: dict[str, dict[str, Any]] = {
    "torch": {"decay": 0.9, "variance": "unbiased"},
    "flax": {"decay": 0.99},
    "haiku": {"decay": 0.99, "debias": True},
    "objax": {"decay": 0.999, "eps": 1e-6},
    "equinox-ema": {"decay": 0.99, "mode": "ema"},
    "equinox-batch": {"decay": 0.99, "debias": "equinox"},
}


class BatchNorm(Module):
    """Normalizes each channel by the statistics of the batch.

    y = (x - E[x]) / sqrt(Var[x] + eps) * weight + bias

    Var is the biased variance. Training also moves the running statistics, mean <- decay * mean + (1 - decay) * E[x]
    and var likewise, by which evaluation normalizes. They start at 0 and 1: evaluation before any training gives
    x / sqrt(1 + eps), which is x but for eps. After n batches of variance v, var is decay^n + (1 - decay^n) v; with
    ``debias`` it is v.

    In ``mode="ema"`` the running statistics, those after this batch, normalize in training too, and the first batch
    initializes them. The output of one batch then moves from step to step, and of the gradient through E and Var only
    the share that this batch has in the running statistics is left, 1 - decay from the second batch on.

    A batch with fewer than two valid values of a channel, or with statistics that aren't finite, leaves the running
    statistics of that channel alone.

    Args:
        size: Number of channels, at least 1.
        mode: "batch" or "ema": which statistics normalize in training.
        axis_name: Name or names of mapped axes that belong to the batch (``tether.vmap(norm, axis_name="batch")``);
            all lanes store the same statistics. Evaluation doesn't need the axes.
        decay: Weight of the old statistic in each step, in [0, 1); unitless. PyTorch's momentum is 1 - decay.
        eps: Added to the variance, at least 0; in units of x squared.
        affine: Whether weight and bias are there.
        variance: Which variance is stored, "biased" or "unbiased", n / (n - 1) times the former.
        debias: Whether the running statistics forget the 0 and 1 they started at: averages from zero, divided by
            1 - decay^n. "equinox" is for its preset: divided, though var's average starts at 1.
        channel_axis: Where x has its channels; all other axes belong to the batch. None is 1, or 0 with axis_name;
            1 with axis_name says that each lane holds a batch of its own. Never read off the shape of x.
        dtype: Of weight and bias; mean and var are at least float32.
    Variables:
        weight, bias: Param, float[size]; None without affine.
        mean, var: State, float[size]; written when training.
        count: State, int32[size], the batches that each channel has seen; written when training; only with mode="ema"
            or debias.
    Shapes:
        x: float[batch, size, ...] -> float[batch, size, ...]; with axis_name float[size, ...] -> float[size, ...]
        mask: bool, each axis 1 or as in x, or bool[]; only True elements count in training. All are normalized.
    Raises:
        ShapeError: x has no such channel axis, or one value per channel in training; mask doesn't fit x.
        DtypeError: x is not an array of real numbers, or mask not of bools.
        ArgumentError: an option out of its range; training outside the axes in axis_name.
    Example:
        >>> norm = nn.BatchNorm(2, decay=0.5)
        >>> y = norm(jnp.array([[1.0, 10.0], [3.0, 20.0], [5.0, 30.0], [7.0, 40.0]]))
        >>> print(norm.mean, norm.var)
        [ 2.  12.5] [ 3. 63.]
    References:
        Ioffe and Szegedy 2015, arXiv:1502.03167, algorithms 1 and 2.
        Kingma and Ba 2015, arXiv:1412.6980, section 3, for debias.
    """

    def __init__(
        self,
        size: int,
        *,
        mode: Literal["batch", "ema"] = "batch",
        axis_name: str | tuple[str, ...] | list[str] | None = None,
        decay: float = 0.9,
        eps: float = 1e-5,
        affine: bool = True,
        variance: Literal["biased", "unbiased"] = "biased",
        debias: bool | Literal["equinox"] = False,
        channel_axis: int | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        self.size = integer(name, "size", size)
        self.mode, self.variance, self.debias = mode, variance, debias
        self.axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        self.decay, self.eps = decay, eps
        self.affine, self.compute_dtype = affine, None
        self.channel_axis = (1 if axis_name is None else 0) if channel_axis is None else channel_axis
        self._check_options()

        dtype = inexact_dtype(name, "dtype", dtype)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise _bad_option(name, "dtype", dtype, "a real floating dtype", "float32")
        stored = at_least_float32(dtype)
        self.weight = Param(jnp.ones(self.size, dtype)) if affine else None
        self.bias = Param(jnp.zeros(self.size, dtype)) if affine else None
        self.mean = State(jnp.zeros(self.size, stored))
        self.var = State(jnp.ones(self.size, stored))
        if self._counts():
            self.count = State(jnp.zeros(self.size, jnp.int32))

    @classmethod
    def preset(cls, name: str, size: int, **options: Any) -> BatchNorm:
        """Makes the layer that gives another library's numbers: output, gradient and running statistics.

        Of that library it takes mode, decay, eps, variance and debias, not the layout: where x has its channels and
        the names of mapped axes are options as always (``channel_axis=-1`` for Flax and Haiku). Haiku names no default
        decay; here it is 0.99. The Equinox presets work with ``axis_name`` and, on batched input, without.
        "equinox-batch" repeats a fault: var's average starts at 1 and is divided as if it had started at 0, so that var
        is too large by decay^n / (1 - decay^n). After one step of decay 0.99 on data of variance 1 it is 100.

        Args:
            name: "torch", "flax", "haiku", "objax", "equinox-ema" or "equinox-batch".
            size: Number of channels.
            options: Arguments of BatchNorm, which go before the preset's.
        Raises:
            ArgumentError: no such preset.
        Example:
            >>> nn.BatchNorm.preset("torch", 16).variance
            'unbiased'
        References:
            PyTorch 2.13, Flax 0.12 (nnx), Haiku 0.0.17, Objax 1.8, Equinox 0.13.8.
        """
        if name not in _PRESETS:
            raise _bad_option(cls.__name__, "name", name, "one of " + ", ".join(map(repr, _PRESETS)), "torch")
        return cls(size, **{**_PRESETS[name], **options})

    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        lanes = self._lanes() if self.training else 1
        channel = self._channel(x)
        options = {"channel": channel, "dtype": computing_dtype(self, x), "recipe": self._recipe()}
        if not self.training:
            return _evaluate(x, self.weight, self.bias, self.mean, self.var, **options)
        n = self._values(x, channel, lanes)
        valid = None if mask is None else self._valid(mask, x)
        running = (self.mean, self.var, self.count if self._counts() else None)
        y, (self.mean, self.var, count) = _train(x, self.weight, self.bias, running, valid, n=n, **options)
        if self._counts():
            self.count = count
        return y

    def _recipe(self) -> _Recipe:
        return _Recipe(self.mode, self.axis_name, self.decay, self.eps, self.variance, self.debias)

    def _counts(self) -> bool:
        """Tells whether the weight of a batch depends on the number of those before it."""
        return self.mode == "ema" or bool(self.debias)

    def _check_options(self) -> None:
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        named = self.axis_name is None or (len(names) > 0 and all(isinstance(axis, str) for axis in names))
        decay = isinstance(self.decay, Real) and 0 <= self.decay < 1
        eps = isinstance(self.eps, Real) and 0 <= self.eps < math.inf
        for argument, holds, expected, example in (
            ("mode", self.mode in ("batch", "ema"), '"batch" or "ema"', "batch"),
            ("axis_name", named, "a name or a tuple of names", "batch"),
            ("decay", decay, "a number in [0, 1)", 0.9),
            ("eps", eps, "a finite number of at least 0", 1e-5),
            ("variance", self.variance in ("biased", "unbiased"), '"biased" or "unbiased"', "biased"),
            ("debias", self.debias in (False, True, "equinox"), "False or True", False),
            ("channel_axis", isinstance(self.channel_axis, int), "an int or None", 1),
        ):
            if not holds:
                raise _bad_option(name_of(self), argument, getattr(self, argument), expected, example)

    def _lanes(self) -> int:
        """Counts the lanes that share the batch; an error outside of the named axes."""
        if self.axis_name is None:
            return 1
        try:
            return lax.axis_size(self.axis_name)
        except NameError:
            names = [self.axis_name] if isinstance(self.axis_name, str) else self.axis_name
            mapped = functools.reduce(lambda f, axis: f"tether.vmap({f}, axis_name={axis!r})", reversed(names), "model")
            raise ArgumentError(
                f"{name_of(self)}: training outside of the mapped axis {self.axis_name!r}.",
                got=f"axis_name={self.axis_name!r}, and not every such axis around this call",
                expected=f"a vmap or shard_map with axis_name={self.axis_name!r}",
                fix=[
                    f"{mapped}(x)",
                    "model(x, training=False), which needs no axis",
                    f"BatchNorm({self.size}) without axis_name, for batched input",
                ],
            ) from None

    def _channel(self, x: jax.Array) -> int:
        """Finds the channel axis of x, counted from the front."""
        axis = self.channel_axis + (x.ndim if self.channel_axis < 0 else 0)
        there = 0 <= axis < x.ndim
        if there and x.shape[axis] == self.size:
            return axis
        if self.axis_name is None:
            other = "under tether.vmap, which takes the batch away: BatchNorm(size, axis_name=...)"
        else:
            other = "channel_axis=1 where each lane holds a batch"
        count = f"BatchNorm({x.shape[axis]}), if those are the channels" if there else "x[None] for a single example"
        missing = f"has {x.shape[axis]} channels" if there else "does not exist, for want of a batch axis"
        raise ShapeError(
            f"{name_of(self)}: axis {self.channel_axis} of x {missing}; it should have {self.size}.",
            got=describe(x),
            expected=_layout(self.channel_axis, self.size),
            fix=[count, other, "channel_axis=-1 for channels last"],
        )

    def _values(self, x: jax.Array, channel: int, lanes: int) -> int:
        """Counts the values of each channel in the whole batch."""
        n = math.prod(x.shape[:channel] + x.shape[channel + 1 :]) * lanes
        if n < 2:
            raise ShapeError(
                f"{name_of(self)}: training needs two or more values of each channel, and this batch has {n}.",
                got=f"{describe(x)}, with the channels on axis {channel}",
                expected="two or more, over batch, space and the axes in axis_name",
                fix=["a larger batch; drop the last one of an epoch if it is of one", "model(x, training=False)"],
            )
        return n

    def _valid(self, mask: ArrayLike, x: jax.Array) -> jax.Array:
        """Brings the mask to the shape of x."""
        mask = as_array(self, mask)
        if mask.dtype != jnp.bool_:
            name = name_of(self)
            raise DtypeError(f"{name}: the mask is not bool.", got=describe(mask), expected="bool", fix="mask > 0")
        fits = mask.ndim == x.ndim and all(m in (1, size) for m, size in zip(mask.shape, x.shape, strict=True))
        if mask.ndim and not fits:
            raise ShapeError(
                f"{name_of(self)}: the mask doesn't fit x.",
                got=f"mask {describe(mask)}, x {describe(x)}",
                expected="a mask of x's rank, with each axis 1 or as in x",
                fix=f"mask.reshape(-1{', 1' * (x.ndim - 1)}) for a mask of whole examples",
            )
        return jnp.broadcast_to(mask, x.shape)


class _Recipe(NamedTuple):
    """The options of a layer that decide its arithmetic."""

    mode: str
    names: str | tuple[str, ...] | None
    decay: float
    eps: float
    variance: str
    debias: bool | str


# _evaluate and _train are functions of arrays alone, and jitted as jnp's own functions are: eager code dispatches once
# and not 25 times, and 50 layers of one shape are traced once. Inside another trace they are inlined.
@functools.partial(jax.jit, static_argnames=("channel", "dtype", "recipe"), inline=True)
def _evaluate(x, weight, bias, mean, var, *, channel, dtype, recipe):
    """Normalizes by the running statistics."""
    h = x.astype(at_least_float32(dtype))
    mean, var = (_broad(s, h, channel) for s in (mean, var))
    return _scale(h - mean, var, weight, bias, recipe, channel).astype(dtype)


@functools.partial(jax.jit, static_argnames=("n", "channel", "dtype", "recipe"), inline=True)
def _train(x, weight, bias, running, valid, *, n, channel, dtype, recipe):
    """Normalizes by the batch's statistics, or by the running ones that it moves; gives y and the running ones."""
    h = x.astype(at_least_float32(dtype))
    if valid is not None:
        h = jnp.where(valid | jnp.isfinite(h), h, 0)  # else NaN in the padding reaches the gradient as 0 * NaN
    deviation, mean, var, n = _moments(h, channel, recipe.names, n, valid)
    if recipe.mode == "batch":
        moved = _move(running, lax.stop_gradient(mean), lax.stop_gradient(var), n, recipe)
    else:
        moved = _move(running, mean, var, n, recipe)
        var = _broad(moved[1], h, channel)
        deviation = h - _broad(moved[0], h, channel)
    if valid is not None:  # without any valid value, the running statistics stand in
        mean, old_var = (_broad(s, h, channel) for s in running[:2])
        deviation, var = jnp.where(n > 0, deviation, h - mean), jnp.where(n > 0, var, old_var)
    y = _scale(deviation, var, weight, bias, recipe, channel)
    return y.astype(dtype), lax.stop_gradient(moved)


def _moments(h, channel, names, n, valid):
    """Gives each channel's deviations from its mean, mean, biased variance, and number of (valid) values.

    In two passes, around a value of the channel itself: a mean of equal floats may miss them by some units in the
    last place, and eps hides no such thing in a channel of 1e7. Around one of them it is exact.
    """
    axes = tuple(axis for axis in range(h.ndim) if axis != channel)
    together = (lambda total: total) if names is None else (lambda total: lax.psum(total, names))
    fixed = lax.stop_gradient(h)
    if valid is None:
        origin = lax.slice(fixed, [0] * h.ndim, [size if axis == channel else 1 for axis, size in enumerate(h.shape)])
    else:
        n = together(valid.sum(axes, dtype=h.dtype, keepdims=True))
        origin = jnp.where(valid, fixed, -jnp.inf).max(axes, keepdims=True)
    if names is not None:
        origin = lax.pmax(origin, names)
    if valid is not None:
        origin = jnp.where(n > 0, origin, 0)

    def average(values):
        if valid is None:
            return together(values.sum(axes, keepdims=True)) / n
        return together(jnp.where(valid, values, 0).sum(axes, keepdims=True)) / jnp.maximum(n, 1)

    deviation = h - origin
    center = average(deviation)
    deviation = deviation - center
    return deviation, origin + center, average(jnp.square(deviation)), n


def _move(running, mean, var, n, recipe):
    """Moves the running statistics (mean, var, count), each [size], by those of a batch of n values."""
    old_mean, old_var, count = running
    masked = isinstance(n, jax.Array)
    if recipe.variance == "unbiased":
        var = var * (n / jnp.maximum(n - 1, 1) if masked else n / (n - 1))
    mean, var = (s.reshape(old_mean.shape).astype(old_mean.dtype) for s in (mean, var))
    taken = jnp.isfinite(mean) & jnp.isfinite(var)
    if masked:
        taken &= n.reshape(taken.shape) > 1
    old, new = recipe.decay, 1 - recipe.decay
    if count is not None:
        old, new = _weights(count + 1, recipe, mean.dtype)
        count = jnp.where(taken, count + 1, count)
    mean = jnp.where(taken, old * old_mean + new * mean, old_mean)
    var = jnp.where(taken, old * old_var + new * var, old_var)
    return mean, var, count


def _weights(seen, recipe, dtype):
    """Weights of the old and of the new statistic at batch number ``seen``, where the first batch initializes.

    With debias, s_n = S_n / (1 - d^n) where S_n = d S_(n-1) + (1 - d) v and S_0 = 0. Written for s itself, that is
    s_n = (1 - r) s_(n-1) + r v with r = (1 - d) / (1 - d^n), which is 1 at the first batch.
    """
    first, decay = seen == 1, recipe.decay
    if not recipe.debias:
        old = jnp.where(first, 0, jnp.asarray(decay, dtype))
        return old, 1 - old
    log_decay = math.log(max(decay, 1e-300))  # expm1, since 1 - d^n in float32 keeps four digits of d = 0.999
    new = jnp.where(first, 1, (decay - 1) / jnp.expm1(seen.astype(dtype) * log_decay))
    # In Equinox var's S_0 is 1, and its s_1 so d / (1 - d) + v.
    old = jnp.where(first, decay / (1 - decay), 1 - new) if recipe.debias == "equinox" else 1 - new
    return old, new


def _scale(deviation, var, weight, bias, recipe, channel):
    y = deviation * lax.rsqrt(var + recipe.eps)
    return y if weight is None else y * _broad(weight, y, channel) + _broad(bias, y, channel)


def _broad(statistic: jax.Array, h: jax.Array, channel: int) -> jax.Array:
    """Brings a [size] vector to the dtype of h and to the shape that broadcasts to it."""
    return statistic.astype(h.dtype).reshape([-1 if axis == channel else 1 for axis in range(h.ndim)])


def _layout(channel_axis: int, size: int) -> str:
    """Writes the shape that x should have, such as float[batch, 16, ...]."""
    if channel_axis < 0:
        return f"float[{', '.join(['...', str(size), *['_'] * (-1 - channel_axis)])}]"
    return f"float[{', '.join([*['batch', *['_'] * channel_axis][:channel_axis], str(size), '...'])}]"


def _bad_option(name: str, argument: str, value: Any, expected: str, example: Any) -> ArgumentError:
    return ArgumentError(
        f"{name}: {argument} is not {expected}.",
        got=f"{argument}={describe(value)}",
        expected=expected,
        fix=f"{argument}={example!r}",
    )
