# SPDX-License-Identifier: Apache-2.0
"""SpectralNorm against NumPy's singular values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx
from tether.compat.equinox.experimental import SpectralNorm
from tether.compat.equinox.experimental.stateful import stored


def test_the_largest_singular_value_becomes_one(key):
    weight = jax.random.normal(key, (4, 3, 2))
    norm = SpectralNorm(weight, num_power_iterations=20, key=key)
    for _ in range(3):
        out = jnp.asarray(norm)
    largest = np.linalg.svd(np.asarray(weight, np.float64).reshape(4, 6))[1][0]
    np.testing.assert_allclose(out, weight / largest, rtol=1e-5)


def test_one_step_of_the_power_iteration(key):
    weight = jax.random.normal(key, (3, 2))
    norm = SpectralNorm(weight, key=key)
    u, v = (np.asarray(x, np.float64) for x in stored(norm.uv_index))
    out = jnp.asarray(norm)
    w = np.asarray(weight, np.float64)
    u = w @ v / np.linalg.norm(w @ v)
    v = w.T @ u / np.linalg.norm(w.T @ u)
    np.testing.assert_allclose(stored(norm.uv_index)[0], u, rtol=1e-5)
    np.testing.assert_allclose(stored(norm.uv_index)[1], v, rtol=1e-5)
    np.testing.assert_allclose(out, w / (u @ w @ v), rtol=1e-5)


def test_inference_leaves_the_estimate_as_it_is(key):
    norm = eqx.tree_inference(SpectralNorm(jax.random.normal(key, (3, 2)), key=key), True)
    before = stored(norm.uv_index)
    jnp.asarray(norm)
    assert all(a is b or (a == b).all() for a, b in zip(before, stored(norm.uv_index), strict=True))


def test_in_the_layers_of_a_model_that_is_trained(key):
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)
    replace = functools.partial(eqx.tree_at, lambda layer: layer.weight, replace_fn=SpectralNorm.withkey(key))
    mlp = eqx.nn.MLP(2, 1, 8, 1, key=key)
    model = jax.tree.map(lambda node: replace(node) if is_linear(node) else node, mlp, is_leaf=is_linear)
    x = jax.random.normal(key, (5, 2))
    step = eqx.filter_jit(eqx.filter_grad(lambda model, x: (jax.vmap(model)(x) ** 2).sum()))
    before = stored(model.layers[0].weight.uv_index)[0]
    gradient = step(model, x)
    assert (stored(model.layers[0].weight.uv_index)[0] != before).any()
    assert jnp.abs(gradient.layers[0].weight.weight).sum() > 0 and gradient.layers[0].weight.inference is None
    # The plain model with the weights divided by their largest singular value.
    for _ in range(50):
        step(model, x)
    divided = [layer.weight / np.linalg.svd(layer.weight)[1][0] for layer in mlp.layers]
    plain = eqx.tree_at(lambda m: [layer.weight for layer in m.layers], mlp, divided)
    np.testing.assert_allclose(jax.vmap(model)(x), jax.vmap(plain)(x), atol=1e-5)


def test_a_vector(key):
    with pytest.raises(ValueError, match="less than two dimensions"):
        SpectralNorm(jnp.ones(3), key=key)
