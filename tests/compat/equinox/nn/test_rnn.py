# SPDX-License-Identifier: Apache-2.0
"""Cells against PyTorch's formulas in float64, and their draws written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx

RNG = np.random.default_rng(3)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def wide(array, size):
    return np.zeros(size) if array is None else np.asarray(array, np.float64)


@pytest.mark.parametrize("use_bias", [True, False])
def test_gru(key, use_bias):
    cell = eqx.nn.GRUCell(2, 3, use_bias, key=key)
    x, h = RNG.normal(size=2), RNG.normal(size=3)
    # PyTorch has two biases for each gate; of r and z their sum counts alone.
    ir, iz, i_n = np.split(wide(cell.weight_ih, 0) @ x + wide(cell.bias, 9), 3)
    hr, hz, hn = np.split(wide(cell.weight_hh, 0) @ h, 3)
    r, z = sigmoid(ir + hr), sigmoid(iz + hz)
    n = np.tanh(i_n + r * (hn + wide(cell.bias_n, 3)))
    got = cell(jnp.float32(x), jnp.float32(h))
    np.testing.assert_allclose(got, (1 - z) * n + z * h, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_bias", [True, False])
def test_lstm(key, use_bias):
    cell = eqx.nn.LSTMCell(2, 3, use_bias, key=key)
    x, h, c = RNG.normal(size=2), *RNG.normal(size=(2, 3))
    gates = wide(cell.weight_ih, 0) @ x + wide(cell.weight_hh, 0) @ h + wide(cell.bias, 12)
    i, f, g, o = np.split(gates, 4)
    new = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    got = cell(jnp.float32(x), (jnp.float32(h), jnp.float32(c)))
    assert type(got) is tuple
    np.testing.assert_allclose(got[0], sigmoid(o) * np.tanh(new), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], new, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (eqx.nn.GRUCell, {"weight_ih": (9, 2), "weight_hh": (9, 3), "bias": (9,), "bias_n": (3,)}),
        (eqx.nn.LSTMCell, {"weight_ih": (12, 2), "weight_hh": (12, 3), "bias": (12,)}),
    ],
)
def test_draws(key, make, shapes, use_bias):
    cell = make(2, 3, use_bias, key=key)
    for (name, shape), k in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
        if name.startswith("bias") and not use_bias:
            assert getattr(cell, name) is None
            continue
        expected = jax.random.uniform(k, shape, minval=-(3**-0.5), maxval=3**-0.5)
        np.testing.assert_array_equal(getattr(cell, name), expected)


def test_a_cell_in_a_scan(key):
    cell = eqx.nn.GRUCell(2, 3, key=key)
    xs = jnp.asarray(RNG.normal(size=(4, 2)), jnp.float32)
    last, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(3), xs)
    h = jnp.zeros(3)
    for x in xs:
        h = cell(x, h)
    np.testing.assert_allclose(last, h, rtol=1e-5)
