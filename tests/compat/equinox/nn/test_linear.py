# SPDX-License-Identifier: Apache-2.0
"""Linear against a float64 sum, and its draws written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx

RNG = np.random.default_rng(1)


@pytest.mark.parametrize("shape", [(3,), (3, 5)])
@pytest.mark.parametrize("use_bias", [True, False])
def test_sum(key, shape, use_bias):
    layer = eqx.nn.Linear(3, 4, use_bias, key=key)
    x = RNG.normal(size=shape)
    if use_bias and len(shape) == 2:
        layer = eqx.tree_at(lambda layer: layer.bias, layer, layer.bias[:, None])
    expected = np.asarray(layer.weight, np.float64) @ x
    if use_bias:
        expected += np.asarray(layer.bias, np.float64)
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


def test_draws(key):
    layer = eqx.nn.Linear(5, 3, key=key)
    weight_key, bias_key = jax.random.split(key)
    limit = 5**-0.5
    np.testing.assert_array_equal(layer.weight, jax.random.uniform(weight_key, (3, 5), minval=-limit, maxval=limit))
    np.testing.assert_array_equal(layer.bias, jax.random.uniform(bias_key, (3,), minval=-limit, maxval=limit))
    bare = eqx.nn.Linear(5, 3, use_bias=False, key=key)
    np.testing.assert_array_equal(bare.weight, layer.weight)
    assert bare.bias is None


def test_sizes_are_numbers_and_a_key_is_asked_for(key):
    for arguments in ({}, {"use_bias": False}):
        with pytest.raises(TypeError, match="key"):
            eqx.nn.Linear(3, 4, **arguments)
    with pytest.raises(TypeError):
        eqx.nn.Linear("scalar", 4, key=key)


def test_identity_is_one_whatever_it_was_made_of():
    assert eqx.nn.Identity() == eqx.nn.Identity(2, hi=True)
    thing = object()
    assert eqx.nn.Identity(3)(thing) is thing
    assert jax.tree.leaves(eqx.nn.Identity(3)) == []
