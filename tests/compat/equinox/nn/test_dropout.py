# SPDX-License-Identifier: Apache-2.0
"""Dropout: which elements, by the draw written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx

X = jnp.arange(1.0, 13.0).reshape(3, 4)


@pytest.mark.parametrize("p", [0.25, 0.5, jnp.float32(0.25), 1])
def test_draw(key, p):
    kept = np.asarray(jax.random.bernoulli(key, 1.0 - p, X.shape))
    share = np.float32(1) - np.float32(p)
    expected = np.where(kept, np.asarray(X) / (share or 1), 0)
    np.testing.assert_allclose(eqx.nn.Dropout(p)(X, key=key), expected, rtol=1e-6)
    assert not kept.all()


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (eqx.nn.Dropout(0.5, inference=True), {}),
        (eqx.nn.Dropout(0.5), {"inference": True}),
        (eqx.nn.Dropout(0), {"inference": False}),
        (eqx.nn.Dropout(0.0), {}),
        (eqx.tree_inference(eqx.nn.Dropout(0.5), True), {}),
    ],
)
def test_nothing_is_dropped(key, layer, options):
    assert layer(X, **options) is X
    assert layer(X, key=key, **options) is X


def test_the_call_decides_before_the_layer(key):
    layer = eqx.nn.Dropout(0.5, inference=True)
    assert (layer(X, key=key, inference=False) == 0).any()


def test_both_fields_are_leaves(key):
    layer = eqx.nn.Dropout(0.25)
    assert jax.tree.leaves(layer) == [0.25, False]
    changed = eqx.tree_at(lambda layer: (layer.p, layer.deterministic), layer, (0.75, True))
    assert (changed.p, changed.inference) == (0.75, True)


def test_a_call_that_drops_needs_a_key():
    with pytest.raises(RuntimeError) as error:
        eqx.nn.Dropout()(X)
    assert str(error.value) == (
        "Dropout: a call that drops needs a key.\n"
        "  got:      key=None, inference=False\n"
        "  fix:      one of\n"
        "    1. dropout(x, key=key)\n"
        "    2. inference=True, of the call, or by eqx.tree_inference(model, True)"
    )
