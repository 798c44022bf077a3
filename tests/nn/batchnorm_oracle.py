# SPDX-License-Identifier: Apache-2.0
"""What the tests of BatchNorm measure by: float64 NumPy, and the layer as one would write it in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(0)
X = np.array([[1, 10], [3, 20], [5, 30], [7, 40]], np.float32)
STANDARD = np.array([-1.341639, -0.447213, 0.447213, 1.341639])


def oracle(x: np.ndarray, axes: tuple[int, ...], eps: float = 1e-5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, mean and biased variance in float64."""
    x = np.asarray(x, np.float64)
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(var + eps), mean.ravel(), var.ravel()


def normal(*shape: int, loc: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return RNG.normal(loc, scale, shape).astype(np.float32)


def close(actual, desired, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual), desired, rtol=tolerance, atol=tolerance)


def by_hand(x, weight, bias):
    """BatchNorm of float[batch, size] as one would write it."""
    mean, var = x.mean(0, keepdims=True), x.var(0, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * weight[None] + bias[None]


def step_by_hand(x, weight, bias, valid, old=(0.0, 1.0, 0), mode="batch", variance="biased", decay=0.9):
    """Output and new (mean, var, count) of one training step on all of float[batch, size, ...], in plain JAX.

    ``valid`` is bool of x's shape and counts for all channels alike. ``old`` is (mean, var, count); in mode "ema" the
    first batch initializes.
    """
    axes = (0, *range(2, x.ndim))
    wide = lambda s: jnp.reshape(s, (1, -1, *[1] * (x.ndim - 2)))
    n = int(np.sum(valid)) // x.shape[1]
    mean = jnp.where(valid, x, 0).sum(axes) / max(n, 1)
    var = jnp.where(valid, (x - wide(mean)) ** 2, 0).sum(axes) / max(n, 1)
    new = old
    if n > 1:
        keep = 0.0 if mode == "ema" and old[2] == 0 else decay
        stored = var * n / (n - 1) if variance == "unbiased" else var
        new = (keep * old[0] + (1 - keep) * mean, keep * old[1] + (1 - keep) * stored, old[2] + 1)
    if mode == "ema" or n == 0:
        mean, var = (jnp.broadcast_to(s, x.shape[1:2]) for s in new[:2])
    return (x - wide(mean)) / jnp.sqrt(wide(var) + 1e-5) * wide(weight) + wide(bias), new
