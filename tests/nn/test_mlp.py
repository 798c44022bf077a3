# SPDX-License-Identifier: Apache-2.0
"""MLP against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, ShapeError


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)])
def test_values(depth: int, shape: tuple[int, ...], key: jax.Array):
    mlp = nn.MLP(3, 2, 5, depth, jnp.tanh, jnp.exp, key=key)
    x = np.random.default_rng(0).normal(size=shape)
    h = x
    for layer in mlp.layers:
        h = h @ np.asarray(layer.weight, np.float64).T + np.asarray(layer.bias, np.float64)
        h = np.tanh(h) if layer is not mlp.layers[-1] else np.exp(h)
    assert len(mlp.layers) == depth + 1
    np.testing.assert_allclose(mlp(x), h, rtol=1e-5, atol=1e-6)


def test_defaults_are_relu_and_nothing(key: jax.Array):
    mlp = nn.MLP(2, 1, width_size=4, depth=1, key=key)
    x = np.asarray([1.0, -2.0])
    first, last = mlp.layers
    h = np.maximum(np.asarray(first.weight, np.float64) @ x + np.asarray(first.bias), 0)
    np.testing.assert_allclose(mlp(x), np.asarray(last.weight, np.float64) @ h + np.asarray(last.bias), rtol=1e-5)


def test_paths_shapes_and_biases(key: jax.Array):
    mlp = nn.MLP(3, 2, 5, 2, use_bias=False, key=key)
    shapes = {path: variable.value.shape for path, variable in tether.variables(mlp).items()}
    assert shapes == {
        "layers[0].weight": (5, 3),
        "layers[1].weight": (5, 5),
        "layers[2].weight": (2, 5),
        "layers[2].bias": (2,),
    }
    without = nn.MLP(3, 2, 5, 1, use_final_bias=False, key=key)
    assert list(tether.variables(without)) == ["layers[0].weight", "layers[0].bias", "layers[1].weight"]


def test_layers_draw_apart_and_repeat_with_the_key(key: jax.Array):
    mlp = nn.MLP(4, 4, 4, 1, key=key)
    assert not np.array_equal(mlp.layers[0].weight, mlp.layers[1].weight)
    np.testing.assert_array_equal(nn.MLP(4, 4, 4, 1, key=key).layers[1].weight, mlp.layers[1].weight)
    tether.seed(0)
    first = nn.MLP(4, 4, 4, 1)
    tether.seed(0)
    np.testing.assert_array_equal(nn.MLP(4, 4, 4, 1).layers[1].weight, first.layers[1].weight)
    assert nn.MLP(2, 2, 2, 1, dtype=jnp.bfloat16, key=key).layers[1].bias.dtype == jnp.bfloat16


def test_an_activation_may_be_a_module(key: jax.Array):
    mlp = nn.MLP(2, 2, 3, 1, nn.Lambda(jnp.sin), nn.LayerNorm(2), key=key)
    assert "final_activation.weight" in tether.variables(mlp)
    assert mlp(jnp.ones((4, 2))).shape == (4, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1, 1), "in_size is not an integer of at least 1"),
        ((1, 1.5, 1, 1), "out_size is not an integer of at least 1"),
        ((1, 1, -1, 1), "width_size is not an integer of at least 1"),
        ((1, 1, 1, -1), "depth is not an integer of at least 0"),
    ],
    ids=str,
)
def test_wrong_sizes(sizes: tuple, message: str):
    with pytest.raises(ArgumentError, match=f"MLP: {message}"):
        nn.MLP(*sizes)


@pytest.mark.parametrize("argument", ["activation", "final_activation"])
@pytest.mark.parametrize("function", [None, "relu", nn.Identity], ids=str)
def test_wrong_activation(argument: str, function):
    with pytest.raises(ArgumentError, match=f"MLP: {argument} can't be called with an array"):
        nn.MLP(1, 1, 1, 1, **{argument: function})


def test_wrong_input_names_the_first_layer(key: jax.Array):
    with pytest.raises(ShapeError) as caught:
        nn.MLP(3, 2, 5, 1, key=key)(jnp.ones(4))
    assert caught.value.at == "layers[0]  (Linear)"
