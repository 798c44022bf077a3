# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of batch normalization, as functions of arrays that know no Variable and no Module.

``moments`` is what a batch says of its channels, ``combined`` what the parts of a batch say together, ``moved`` how the
running statistics take that in. A statistic of the batch has the shape that broadcasts to x, such as [1, size, 1, 1].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Recipe(NamedTuple):
    """The options of a layer that decide its arithmetic.

    Args:
        mode: "batch" or "ema".
        names: The mapped axes over which the batch is spread, none included.
        decay, eps, variance, debias: As in BatchNorm.
    """

    mode: str
    names: tuple[str, ...]
    decay: float
    eps: float
    variance: str
    debias: bool | str


def moments(h, channel, names, valid):
    """Gives each channel's deviations from its mean, mean, biased variance, and number of (valid) values.

    In two passes, around a value of the channel itself: a mean of equal floats may miss them by some units in the
    last place, and eps hides no such thing in a channel of 1e7. Around one of them it is exact.
    """
    axes = tuple(axis for axis in range(h.ndim) if axis != channel)
    fixed = lax.stop_gradient(h)
    if valid is None:
        n = h.size // h.shape[channel]
        origin = lax.slice(fixed, [0] * h.ndim, [size if axis == channel else 1 for axis, size in enumerate(h.shape)])
    else:
        # Counted in integers: a float32 that grows by ones stops at 2^24.
        n = valid.sum(axes, dtype=jnp.int32, keepdims=True).astype(h.dtype)
        origin = jnp.where(n > 0, jnp.where(valid, fixed, -jnp.inf).max(axes, keepdims=True), 0)

    def total(values):
        return (values if valid is None else jnp.where(valid, values, 0)).sum(axes, keepdims=True)

    deviation = h - origin
    center = total(deviation) / _at_least_one(n)
    deviation = deviation - center
    squares = total(jnp.square(deviation))
    if names:
        return combined(names, deviation, origin, center, squares, n)
    return deviation, origin + center, squares / _at_least_one(n), n


def combined(names, deviation, origin, center, squares, n):
    """Gives what ``moments`` gives, for the batch whose parts lie along the mapped axes ``names``.

    A part has n values around its mean, origin + center, and the sum of their squares. With N = sum n and d = mean - a,
    for any a, the mean of all is a + sum(n d) / N, and the variance sum(squares + n d^2) / N - (sum(n d) / N)^2. Here
    a is that mean but for rounding, so that the difference cancels nothing. It costs two rounds of messages forward and
    one backward, since a is a constant.

    References:
        Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
    """
    whole = lax.psum(n, names)
    mean = lax.stop_gradient(origin + center)
    least, most = lax.pmax((jnp.where(n > 0, -mean, -jnp.inf), jnp.where(n > 0, mean, -jnp.inf)), names)
    about = lax.psum(mean * (n / _at_least_one(whole)), names)
    about = jnp.where(whole > 0, jnp.clip(about, -least, most), 0)  # between the parts' means: equal ones are exact
    shift = origin - about + center
    moment = n * shift  # 0 for a part without values, and so times shift, the square of which may overflow
    shifts, squares = lax.psum((moment, squares + moment * shift), names)
    rest = shifts / _at_least_one(whole)
    var = squares / _at_least_one(whole) - jnp.square(rest)
    return deviation + (shift - rest), about + rest, var, whole


def moved(running, mean, var, n, recipe):
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


def _at_least_one(n):
    return jnp.maximum(n, 1) if isinstance(n, jax.Array) else n
