# SPDX-License-Identifier: Apache-2.0
"""BatchNorm where floating point is hard, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.nn.batchnorm_oracle import RNG, close, normal, oracle, step_by_hand
from tether import nn


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order():
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.mark.parametrize("split", ["batch", "space", "lanes"])
def test_large_mean_and_small_variance(split: str):
    """Offset 1e4, spread 1e-2: ten units in the last place. One pass, E[x^2] - E[x]^2, has no digit right there."""
    x = (1e4 + 0.01 * RNG.normal(size=(960, 2))).astype(np.float32)
    shaped = {"batch": x, "space": np.moveaxis(x.reshape(8, 120, 2), 1, 2), "lanes": x}[split]
    norm = nn.BatchNorm(2, eps=1e-12, decay=0, axis_name="lane" if split == "lanes" else None)
    y = tether.jit(tether.vmap(norm, axis_name="lane") if split == "lanes" else norm)(shaped)
    y = np.moveaxis(y, 1, -1).reshape(x.shape) if split == "space" else y
    z, mean, var = oracle(x, (0,), 1e-12)
    close(y, z, 2e-6)
    np.testing.assert_allclose(norm.mean, mean, rtol=1e-7)
    np.testing.assert_allclose(norm.var, var, rtol=1e-6)


def test_gradient_at_a_large_mean():
    x, c = (1e4 + 0.01 * RNG.normal(size=(64, 2))).astype(np.float32), normal(64, 2)
    ours = tether.grad(lambda x: jnp.sum(c * nn.BatchNorm(2, eps=1e-8)(x)))(jnp.asarray(x))
    z, _, var = oracle(x, (0,), 1e-8)
    right = (c - c.mean(0) - z * (c * z).mean(0)) / np.sqrt(var + 1e-8)
    np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-3)  # of numbers around 100


@pytest.mark.parametrize("lanes", [7, 999, 60001])
def test_constant_lanes_are_exactly_zero(lanes: int):
    norm = nn.BatchNorm(3, axis_name="lane", decay=0)
    x, mask = np.tile(np.float32([1e7, 0.1, -3e30]), (lanes, 1)), np.arange(lanes) % 3 > 0
    np.testing.assert_array_equal(tether.jit(tether.vmap(norm, axis_name="lane"))(x), np.zeros(x.shape))
    np.testing.assert_array_equal([norm.mean, norm.var], [x[0], np.zeros(3)])
    masked = tether.vmap(lambda x, mask: norm(x, mask=mask), axis_name="lane")
    np.testing.assert_array_equal(tether.jit(masked)(x, mask)[mask], np.zeros(x[mask].shape))
    np.testing.assert_array_equal([norm.mean, norm.var], [x[0], np.zeros(3)])


def test_outlier_in_one_lane():
    x = normal(1000, 3, loc=[0, 0, 1e6])
    x[3] = [1e7, -1e5, 0]
    norm = nn.BatchNorm(3, axis_name="lane", decay=0)
    z, mean, var = oracle(x, (0,))
    close(tether.vmap(norm, axis_name="lane")(x), z)
    np.testing.assert_allclose([norm.mean, norm.var], [mean, var], rtol=3e-6)


def test_lanes_without_a_value_make_no_nan_on_the_way():
    norm = nn.BatchNorm(2, axis_name="lane")
    masked = tether.vmap(lambda x, mask: norm(x, mask=mask), axis_name="lane")
    with jax.debug_nans(True):
        y = masked(normal(4, 2), np.zeros(4, bool))
        tether.grad(lambda x: masked(x, np.zeros(4, bool)).sum())(jnp.ones((4, 2)))
    assert np.isfinite(y).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_in_and_float32_within(dtype):
    """The output is the right one, rounded once; so is the gradient."""
    x, c = jnp.asarray(normal(300, 2, loc=100, scale=2), dtype), jnp.asarray(normal(300, 2), dtype)
    norm = nn.BatchNorm(2, decay=0)
    wide, wide_c = np.asarray(x, np.float64), np.asarray(c, np.float64)
    z, mean, var = oracle(wide, (0,))
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), z, rtol=unit, atol=1e-6)
    np.testing.assert_allclose([norm.mean, norm.var], [mean, var], rtol=1e-6)
    gradient = tether.grad(lambda x: (c * norm(x)).astype(jnp.float32).sum())(x)
    assert gradient.dtype == dtype
    right = (wide_c - wide_c.mean(0) - z * (wide_c * z).mean(0)) / np.sqrt(var + 1e-5)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), right, rtol=unit, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"mode": "ema"}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_second_derivatives_in_float64(options: dict, masked: bool):
    """Of the input and of the weight, and across them."""
    x, c = RNG.normal(1, 2, (5, 2, 3)), RNG.normal(size=(5, 2, 3))
    mask = (RNG.random((5, 1, 3)) < 0.7) if masked else np.ones((5, 1, 3), bool)
    valid = np.broadcast_to(mask, x.shape)

    def sharpness(f, grad):
        first = grad(lambda x, w: (jnp.where(valid, c * f(x, w), 0) ** 3).sum(), argnums=(0, 1))
        length = lambda x, w: sum((g**2).sum() for g in first(x, w))
        return grad(length, argnums=(0, 1))

    with jax.enable_x64(True):
        norm = nn.BatchNorm(2, dtype=jnp.float64, **options)
        bias = norm.bias

        def ours(x, w):
            norm.weight = w
            norm.mean, norm.var = jnp.zeros(2), jnp.ones(2)
            if norm.count is not None:
                norm.count = jnp.zeros(2, jnp.int32)
            return norm(x, mask=mask)

        hand = lambda x, w: step_by_hand(x, w, bias, valid, mode=norm.mode)[0]
        args = jnp.asarray(x), jnp.asarray(RNG.normal(size=2))
        actual, right = sharpness(ours, tether.grad)(*args), sharpness(hand, jax.grad)(*args)
        for a, b in zip(actual, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
            assert float(jnp.abs(b).max()) > 1e-3


@pytest.mark.parametrize("padding", [np.nan, np.inf, 3e38, -3e38, 1e20])
def test_padding_reaches_no_gradient(padding: float):
    x, c = normal(8, 2), normal(8, 2)
    mask = (np.arange(8) < 5)[:, None]
    norm = nn.BatchNorm(2)
    loss = lambda norm, x: jnp.where(mask, c * norm(x, mask=mask), 0).sum()
    d_norm, d_x = tether.grad(loss, argnums=(0, 1))(norm, jnp.where(mask, x, padding))
    z, _, var = oracle(x[:5], (0,))
    right = (c[:5] - c[:5].mean(0) - z * (c[:5] * z).mean(0)) / np.sqrt(var + 1e-5)
    close(d_x, np.concatenate([right, np.zeros((3, 2))]))
    close(d_norm.weight, (c[:5] * z).sum(0))
