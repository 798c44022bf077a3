# SPDX-License-Identifier: Apache-2.0
"""Embedding: rows, draws and its one error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx


def test_rows_and_draws(key):
    layer = eqx.nn.Embedding(5, 3, key=key)
    table = np.asarray(jax.random.normal(key, (5, 3)))
    np.testing.assert_array_equal(layer.weight, table)
    for ids in (2, [[0, 4], [-1, 1]]):
        np.testing.assert_array_equal(layer(jnp.asarray(ids)), table[np.asarray(ids)])


@pytest.mark.parametrize("kind", [np, jnp])
def test_a_table_of_ones_own(key, kind):
    table = kind.arange(6.0).reshape(3, 2)
    layer = eqx.nn.Embedding(3, 2, table, key=key)
    assert layer.weight is table
    np.testing.assert_array_equal(jax.jit(lambda x: layer(x))(jnp.array(1)), [2.0, 3.0])


def test_a_table_of_another_shape(key):
    with pytest.raises(ValueError) as error:
        eqx.nn.Embedding(3, 2, jnp.ones((2, 3)), key=key)
    assert str(error.value) == (
        "Embedding: weight isn't of shape (num_embeddings, embedding_size).\n"
        "  got:      float32[2, 3]\n"
        "  expected: [3, 2]\n"
        "  fix:      Embedding(*weight.shape, weight, key=key)"
    )
    with pytest.raises(ValueError) as error:
        eqx.nn.Embedding(3, 2, jnp.ones(6), key=key)
    assert error.value.fixes == []
