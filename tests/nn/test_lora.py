# SPDX-License-Identifier: Apache-2.0
"""LoRA: the formula in NumPy, what is trained, what is shared, and the merged layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, ShapeError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 5)).astype(np.float32)


@pytest.fixture
def linear(key: jax.Array) -> nn.Linear:
    return nn.Linear(5, 3, key=key)


def moved(linear: nn.Linear, key: jax.Array, **arguments) -> nn.LoRA:
    return nn.LoRA(linear, 2, key=key, b_init=nn.init.normal(1.0), **arguments)


def test_begins_as_the_layer(linear: nn.Linear, key: jax.Array):
    np.testing.assert_array_equal(nn.LoRA(linear, 2, key=key)(X), linear(X))


@pytest.mark.parametrize("alpha", [None, 16])
def test_values_and_merged(linear: nn.Linear, key: jax.Array, alpha: float | None):
    lora = moved(linear, key, alpha=alpha)
    w, b, down, up = (np.asarray(v, np.float64) for v in (linear.weight, linear.bias, lora.a, lora.b))
    wanted = X @ w.T + b + (1 if alpha is None else 8) * X @ down.T @ up.T
    np.testing.assert_allclose(lora(X), wanted, rtol=1e-5, atol=1e-4)
    merged = lora.merged()
    assert type(merged) is nn.Linear
    np.testing.assert_allclose(merged(X), wanted, rtol=1e-5, atol=1e-4)
    merged.weight = jnp.zeros((3, 5))
    np.testing.assert_array_equal(linear.weight, np.asarray(w, np.float32))


def test_trains_the_small_matrices_alone(linear: nn.Linear, key: jax.Array):
    lora = nn.LoRA(linear, 2, key=key)
    before = np.asarray(linear.weight)
    optimizer = tether.Optimizer(lora, optax.sgd(0.1))
    grads = tether.grad(lambda model: (model(X) ** 2).sum())(lora)
    assert {path for path, v in tether.variables(grads).items() if v.value is not None} == {"a", "b"}
    optimizer.update(grads)
    np.testing.assert_array_equal(linear.weight, before)
    assert float(jnp.abs(lora.b).max()) > 0
    assert list(tether.variables(linear, tether.Param)) == ["weight", "bias"]  # by itself it can be trained still


def test_in_a_model(key: jax.Array):
    model = nn.MLP(5, 2, 4, 1, key=key)
    adapted = tether.map_modules(lambda layer: nn.LoRA(layer, 1), model, nn.Linear)
    np.testing.assert_allclose(tether.jit(adapted)(X), model(X), rtol=1e-6)
    assert len(tether.variables(adapted, tether.Param)) == 4


def test_bad_input(linear: nn.Linear):
    with pytest.raises(ArgumentError, match=r"(?s)LoRA: this is no Linear layer.*map_modules"):
        nn.LoRA(nn.Identity(), 2)
    with pytest.raises(ArgumentError, match="rank is not an integer of at least 1"):
        nn.LoRA(linear, 0)
    with pytest.raises(ArgumentError, match="alpha is not a number"):
        nn.LoRA(linear, 1, alpha="16")
    with pytest.raises(ShapeError, match="in_features"):
        nn.LoRA(linear, 1)(jnp.ones((2, 4)))
