# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of batch normalization alone, against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tether.nn._batch_statistics import Recipe, moments, moved

X = np.random.default_rng(0).normal(5, 2, (4, 6, 3)).astype(np.float32)  # parts, values, channels
COUNTS = np.array([6, 1, 0, 3])
MASK = np.arange(6)[None, :, None] < COUNTS[:, None, None]


def close(actual, desired) -> None:
    np.testing.assert_allclose(actual, desired, rtol=2e-6, atol=2e-6)


def check(statistics, x: np.ndarray, valid: np.ndarray) -> None:
    """Compares with those of the valid values among all."""
    deviation, mean, var, n = statistics
    kept = x[np.broadcast_to(valid, x.shape)].reshape(-1, x.shape[-1]).astype(np.float64)
    assert int(np.ravel(n)[0]) == len(kept)
    close(np.reshape(mean, (-1, 3))[0], kept.mean(0))
    close(np.reshape(var, (-1, 3))[0], kept.var(0))
    close(deviation, x - kept.mean(0))


def test_one_part():
    everything = np.ones((6, 1), bool)
    check(moments(jnp.asarray(X[0]), 1, (), None), X[0], everything)
    check(moments(jnp.asarray(X[3]), 1, (), jnp.broadcast_to(MASK[3], (6, 3))), X[3], MASK[3])
    assert moments(jnp.asarray(X[0]), 1, (), None)[-1] == 6  # a number of Python: nothing to compute


def test_parts_are_one_batch():
    f = jax.vmap(lambda x: moments(x, 1, ("part",), None), axis_name="part", out_axes=(0, 0, 0, None))
    check(f(jnp.asarray(X)), X, np.ones((4, 6, 1), bool))


def test_parts_of_unequal_counts_are_no_average_of_averages():
    f = jax.vmap(lambda x, valid: moments(x, 1, ("part",), valid), axis_name="part")
    valid = np.broadcast_to(MASK, X.shape)
    check(f(jnp.asarray(X), valid), X, MASK)
    averages = X[0].mean(0) + X[1, :1].mean(0) + X[3, :3].mean(0)
    assert np.abs(averages / 3 - X[valid].reshape(-1, 3).mean(0)).min() > 1e-2


def test_two_axes_of_parts():
    f = lambda x, valid: moments(x, 1, ("i", "j"), valid)
    f = jax.vmap(jax.vmap(f, axis_name="j"), axis_name="i")
    deviation, *rest = f(jnp.asarray(X.reshape(2, 2, 6, 3)), np.broadcast_to(MASK, X.shape).reshape(2, 2, 6, 3))
    check((deviation.reshape(X.shape), *rest), X, MASK)


@pytest.mark.parametrize("variance", ["biased", "unbiased"])
@pytest.mark.parametrize("debias", [False, True])
def test_running_statistics(variance: str, debias: bool):
    recipe = Recipe("batch", (), 0.9, 1e-5, variance, debias)
    running = (jnp.zeros(3), jnp.ones(3), jnp.zeros(3, jnp.int32) if debias else None)
    mean, var = np.zeros(3), np.zeros(3) if debias else np.ones(3)
    for step, x in enumerate(X, 1):
        _, *statistics = moments(jnp.asarray(x), 1, (), None)
        running = moved(running, *statistics, recipe)
        wide = x.astype(np.float64)
        mean = 0.9 * mean + 0.1 * wide.mean(0)
        var = 0.9 * var + 0.1 * wide.var(0, ddof=int(variance == "unbiased"))
        scale = 1 - 0.9**step if debias else 1
        close(running[:2], [mean / scale, var / scale])
