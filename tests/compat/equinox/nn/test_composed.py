# SPDX-License-Identifier: Apache-2.0
"""MLP, Sequential and Lambda: order, keys and draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx

RNG = np.random.default_rng(4)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_mlp(key, depth):
    mlp = eqx.nn.MLP(2, 3, 5, depth, jnp.tanh, jnp.exp, key=key)
    assert isinstance(mlp.layers, list)
    assert [layer.weight.shape for layer in mlp.layers] == {
        0: [(3, 2)],
        1: [(5, 2), (3, 5)],
        3: [(5, 2), (5, 5), (5, 5), (3, 5)],
    }[depth]
    x = RNG.normal(size=2)
    y = x
    for number, layer in enumerate(mlp.layers):
        y = np.asarray(layer.weight, np.float64) @ y + np.asarray(layer.bias, np.float64)
        y = np.exp(y) if number == depth else np.tanh(y)
    np.testing.assert_allclose(mlp(jnp.float32(x)), y, rtol=1e-5)


def test_draws_of_an_mlp(key):
    mlp = eqx.nn.MLP(2, 3, 5, 2, key=key)
    for layer, k, size in zip(mlp.layers, jax.random.split(key, 3), (2, 5, 5), strict=True):
        k = jax.random.split(k)[0]
        expected = jax.random.uniform(k, layer.weight.shape, minval=-(size**-0.5), maxval=size**-0.5)
        np.testing.assert_array_equal(layer.weight, expected)


def test_defaults_of_an_mlp(key):
    mlp = eqx.nn.MLP(1, 2, 2, 1, key=key)
    first, last = jnp.array([[1.0], [-1.0]]), jnp.array([[-2.0, 0.0], [0.0, 3.0]])
    where = lambda mlp: [part for layer in mlp.layers for part in (layer.weight, layer.bias)]
    mlp = eqx.tree_at(where, mlp, [first, jnp.zeros(2), last, jnp.zeros(2)])
    assert mlp(jnp.array([2.0])).tolist() == [-4.0, 0.0]
    assert mlp(jnp.array([-2.0])).tolist() == [0.0, 6.0]
    assert mlp.activation is jax.nn.relu and mlp.final_activation in jax.tree.leaves(mlp)


class Draw(eqx.Module):
    def __call__(self, x, *, key):
        return [*x, key]


def test_sequential_splits_its_key(key):
    net = eqx.nn.Sequential([Draw(), Draw(), Draw()])
    got = net([], key=key)
    for one, k in zip(got, jax.random.split(key, 3), strict=True):
        assert (one == k).all()
    assert net([]) == [None, None, None]
    assert eqx.nn.Sequential([])("x", key=key) == "x"


def test_parts_of_a_sequential(key):
    layers = [eqx.nn.Linear(2, 4, key=key), eqx.nn.Lambda(jnp.tanh), eqx.nn.Identity()]
    net = eqx.nn.Sequential(layers)
    assert net.layers == tuple(layers) and list(net) == layers and len(net) == 3
    assert net[0] is layers[0] and net[-1] is layers[2]
    assert isinstance(net[1:], eqx.nn.Sequential) and net[1:].layers == tuple(layers[1:])
    x = jnp.array([1.0, -1.0])
    np.testing.assert_array_equal(net(x), jnp.tanh(layers[0](x)))


def test_an_index_that_is_none():
    with pytest.raises(TypeError) as error:
        eqx.nn.Sequential([Draw()])[[0, 0]]
    assert str(error.value) == (
        "Sequential: an index is neither a number nor a slice.\n"
        "  got:      list of 2\n"
        "  expected: net[0], or net[1:]\n"
        "  fix:      Sequential([net[i] for i in indices])"
    )
    with pytest.raises(TypeError) as error:
        eqx.nn.Sequential([Draw()])["first"]
    assert error.value.got == "'first'" and error.value.fixes == []


def test_lambda_has_its_function_as_a_leaf():
    assert jax.tree.leaves(eqx.nn.Lambda(jnp.tanh)) == [jnp.tanh]
    assert eqx.nn.Lambda(lambda x: x + 1)(1, key=None) == 2
