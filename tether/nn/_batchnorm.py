# SPDX-License-Identifier: Apache-2.0
"""Batch normalization, in all its flavors.

The class says which values make one batch, checks them, and keeps the running statistics. The arithmetic is functions
of arrays, in _batch_statistics.py but for the last step of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param, State
from tether._modules import Module
from tether.errors import ArgumentError, DtypeError, ShapeError, describe
from tether.nn._batch_statistics import Recipe, moments, moved
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
        sync: Name or names of device axes along which the batch is split (``tether.shard_map``): the same as
            axis_name, for shards that hold a batch each. Counts, sums and squared deviations are combined, so that
            the statistics are those of the whole batch, however unequal its parts. Under ``tether.jit`` alone, an
            array that lies on many devices is one batch without it. A view sets it for a whole model:
            ``tether.view(model, nn.BatchNorm, sync="devices")``. Lanes inside shards, with axis_name too, need
            ``check_vma=False``: else JAX knows no sum over a vmapped axis there.
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
        ArgumentError: an option out of its range; training outside the axes in axis_name and sync.
    Example:
        >>> norm = nn.BatchNorm(2, decay=0.5)
        >>> y = norm(jnp.array([[1.0, 10.0], [3.0, 20.0], [5.0, 30.0], [7.0, 40.0]]))
        >>> print(norm.mean, norm.var)
        [ 2.  12.5] [ 3. 63.]
    References:
        Ioffe and Szegedy 2015, arXiv:1502.03167, algorithms 1 and 2.
        Kingma and Ba 2015, arXiv:1412.6980, section 3, for debias.
        Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115, for axis_name and sync.
    """

    def __init__(
        self,
        size: int,
        *,
        mode: Literal["batch", "ema"] = "batch",
        axis_name: str | Sequence[str] | None = None,
        sync: str | Sequence[str] | None = None,
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
        self.axis_name, self.sync = (tuple(a) if isinstance(a, list) else a for a in (axis_name, sync))
        # A NumPy number would be taken for an array of the module.
        self.decay, self.eps = (float(a) if isinstance(a, Real) else a for a in (decay, eps))
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
        self.count = State(jnp.zeros(self.size, jnp.int32)) if self._counts() else None

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
        if name not in list(_PRESETS):
            raise _bad_option(cls.__name__, "name", name, "one of " + ", ".join(map(repr, _PRESETS)), "torch")
        return cls(size, **{**_PRESETS[name], **options})

    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        self._check_options()  # again: a view may have set them
        weight, bias, mean, var, count = self.weight, self.bias, self.mean, self.var, self.count
        names = _names(self.axis_name) + _names(self.sync)
        lanes = self._lanes(names) if self.training else 1
        channel = self._channel(x, mean.shape[0])
        valid = None if mask is None else self._valid(mask, x)
        options = {
            "channel": channel,
            "dtype": computing_dtype(self, x, mean if weight is None else weight),
            "recipe": Recipe(self.mode, names, float(self.decay), float(self.eps), self.variance, self.debias),
        }
        if not self.training:
            return _evaluate(x, weight, bias, mean, var, **options)
        self._check_counted(count)
        self._check_values(x, channel, lanes)
        y, (self.mean, self.var, count) = _train(x, weight, bias, (mean, var, count), valid, **options)
        if count is not None:
            self.count = count
        return y

    def _counts(self) -> bool:
        """Tells whether the weight of a batch depends on the number of those before it."""
        return self.mode == "ema" or bool(self.debias)

    def _check_options(self) -> None:
        decay = isinstance(self.decay, Real) and 0 <= self.decay < 1
        eps = isinstance(self.eps, Real) and 0 <= self.eps < math.inf
        axis = isinstance(self.channel_axis, int) and not isinstance(self.channel_axis, bool)
        for argument, holds, expected, example in (
            ("mode", self.mode in ("batch", "ema"), '"batch" or "ema"', "batch"),
            ("axis_name", _are_names(self.axis_name), "a name or a tuple of names", "batch"),
            ("sync", _are_names(self.sync), "a name or a tuple of names", "devices"),
            ("decay", decay, "a number in [0, 1)", 0.9),
            ("eps", eps, "a finite number of at least 0", 1e-5),
            ("variance", self.variance in ("biased", "unbiased"), '"biased" or "unbiased"', "biased"),
            ("debias", self.debias in (False, True, "equinox"), "False or True", False),
            ("channel_axis", axis, "an int or None", 1),
        ):
            if not holds:
                raise _bad_option(name_of(self), argument, getattr(self, argument), expected, example)
        names = _names(self.axis_name) + _names(self.sync)
        if len(set(names)) < len(names):
            raise ArgumentError(
                f"{name_of(self)}: an axis is named twice.",
                got=f"axis_name={self.axis_name!r}, sync={self.sync!r}",
                expected="each mapped axis once, in axis_name or in sync",
                fix="axis_name for lanes of one example, sync for shards that hold a batch each",
            )

    def _check_counted(self, count: jax.Array | None) -> None:
        """Refuses a view in whose mode batches are counted, of a layer that has no count."""
        if count is None and self._counts():
            options = f"mode={self.mode!r}, debias={self.debias!r}"
            raise ArgumentError(
                f"{name_of(self)}: this view needs a count of batches, which the layer doesn't keep.",
                got=f"a view with {options}",
                expected="the mode and debias that the layer was made with",
                fix=f"{name_of(self)}({self.size}, {options})",
            )

    def _lanes(self, names: tuple[str, ...]) -> int:
        """Counts the lanes and shards that share the batch; an error outside of a named axis."""
        missing = [axis for axis in names if not _is_bound(axis)]
        if not missing:
            return lax.axis_size(names)
        model = "model"
        for axis in reversed(_names(self.axis_name)):
            model = f"tether.vmap({model}, axis_name={axis!r})"
        if self.sync is not None:
            spec = f"PartitionSpec({self.sync!r})"
            model = f"tether.shard_map({model}, mesh=mesh, in_specs={spec}, out_specs={spec})"
        given = [f"{a}={v!r}" for a, v in (("axis_name", self.axis_name), ("sync", self.sync)) if v is not None]
        raise ArgumentError(
            f"{name_of(self)}: training outside of the mapped axis {missing[0]!r}.",
            got=f"{', '.join(given)}, and no axis {' or '.join(map(repr, missing))} around this call",
            expected="a vmap or shard_map around it that names the axis",
            fix=[
                f"{model}(x)",
                "model(x, training=False), which needs no axis",
                f"{name_of(self)}({self.size}) without {given[0].split('=')[0]}, for input that holds the whole batch",
            ],
        )

    def _channel(self, x: jax.Array, size: int) -> int:
        """Finds the channel axis of x, counted from the front."""
        axis = self.channel_axis + (x.ndim if self.channel_axis < 0 else 0)
        there = 0 <= axis < x.ndim
        if there and x.shape[axis] == size:
            return axis
        if self.axis_name is None:
            other = "under tether.vmap, which takes the batch away: BatchNorm(size, axis_name=...)"
        else:
            other = "channel_axis=1 where each lane holds a batch"
        count = f"BatchNorm({x.shape[axis]}), if those are the channels" if there else "x[None] for a single example"
        missing = f"has {x.shape[axis]} channels" if there else "does not exist, for want of a batch axis"
        raise ShapeError(
            f"{name_of(self)}: axis {self.channel_axis} of x {missing}; it should have {size}.",
            got=describe(x),
            expected=_layout(self.channel_axis, size),
            fix=[count, other, "channel_axis=-1 for channels last"],
        )

    def _check_values(self, x: jax.Array, channel: int, lanes: int) -> None:
        """Refuses a batch that has one value of each channel, or none."""
        n = math.prod(x.shape[:channel] + x.shape[channel + 1 :]) * lanes
        if n < 2:
            raise ShapeError(
                f"{name_of(self)}: training needs two or more values of each channel, and this batch has {n}.",
                got=f"{describe(x)}, with the channels on axis {channel}",
                expected="two or more, over batch, space and the axes in axis_name and sync",
                fix=["a larger batch; drop the last one of an epoch if it is of one", "model(x, training=False)"],
            )

    def _valid(self, mask: ArrayLike, x: jax.Array) -> jax.Array:
        """Brings the mask to the shape of x."""
        if getattr(mask, "dtype", None) != jnp.bool_:
            raise DtypeError(
                f"{name_of(self)}: the mask is not an array of bools.",
                got=describe(mask),
                expected="a JAX or NumPy array of bool",
                fix=["mask > 0", "jnp.asarray(mask) for a list or a Python bool"],
            )
        mask = jnp.asarray(mask)
        fits = mask.ndim == x.ndim and all(m in (1, size) for m, size in zip(mask.shape, x.shape, strict=True))
        if mask.ndim and not fits:
            raise ShapeError(
                f"{name_of(self)}: the mask doesn't fit x.",
                got=f"mask {describe(mask)}, x {describe(x)}",
                expected="a mask of x's rank, with each axis 1 or as in x",
                fix=[
                    f"mask.reshape(-1{', 1' * (x.ndim - 1)}) for a mask of whole examples",
                    "bool[] for all of x, as where a lane holds one example",
                ],
            )
        return jnp.broadcast_to(mask, x.shape)


# _evaluate and _train are functions of arrays alone, and jitted as jnp's own functions are: eager code dispatches once
# and not 25 times, and 50 layers of one shape are traced once. Inside another trace they are inlined.
@functools.partial(jax.jit, static_argnames=("channel", "dtype", "recipe"), inline=True)
def _evaluate(x, weight, bias, mean, var, *, channel, dtype, recipe):
    """Normalizes by the running statistics."""
    h = x.astype(at_least_float32(dtype))
    mean, var = (_broad(s, h, channel) for s in (mean, var))
    return _scale(h - mean, var, weight, bias, recipe, channel).astype(dtype)


@functools.partial(jax.jit, static_argnames=("channel", "dtype", "recipe"), inline=True)
def _train(x, weight, bias, running, valid, *, channel, dtype, recipe):
    """Normalizes by the batch's statistics, or by the running ones that it moves; gives y and the running ones."""
    h = x.astype(at_least_float32(dtype))
    if valid is not None:
        # Else NaN in the padding, or what overflows on the way, reaches the gradient as 0 * NaN.
        h = jnp.where(valid | (jnp.abs(h) < math.sqrt(jnp.finfo(h.dtype).max)), h, 0)
    deviation, mean, var, n = moments(h, channel, recipe.names, valid)
    if recipe.mode == "batch":
        new = moved(running, lax.stop_gradient(mean), lax.stop_gradient(var), n, recipe)
    else:
        new = moved(running, mean, var, n, recipe)
        var = _broad(new[1], h, channel)
        deviation = h - _broad(new[0], h, channel)
    if valid is not None:  # without any valid value, the running statistics stand in
        mean, old_var = (_broad(s, h, channel) for s in running[:2])
        deviation, var = jnp.where(n > 0, deviation, h - mean), jnp.where(n > 0, var, old_var)
    y = _scale(deviation, var, weight, bias, recipe, channel)
    return y.astype(dtype), lax.stop_gradient(new)


def _scale(deviation, var, weight, bias, recipe, channel):
    y = deviation * lax.rsqrt(var + recipe.eps)
    return y if weight is None else y * _broad(weight, y, channel) + _broad(bias, y, channel)


def _broad(statistic: jax.Array, h: jax.Array, channel: int) -> jax.Array:
    """Brings a [size] vector to the dtype of h and to the shape that broadcasts to it."""
    return statistic.astype(h.dtype).reshape([-1 if axis == channel else 1 for axis in range(h.ndim)])


def _names(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _are_names(axes: Any) -> bool:
    return axes is None or (isinstance(axes, str | tuple) and bool(axes) and all(isinstance(a, str) for a in axes))


def _is_bound(axis: str) -> bool:
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


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
