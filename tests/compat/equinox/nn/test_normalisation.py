# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and GroupNorm against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx

RNG = np.random.default_rng(2)


def normalized(x, eps):
    return (x - x.mean()) / np.sqrt(x.var() + eps)


@pytest.mark.parametrize(("shape", "eps"), [(4, 1e-5), ((4,), 1e-2), ([2, 3], 1e-5), ((2, 3, 4), 1.0)])
def test_layer_norm(shape, eps):
    layer = eqx.nn.LayerNorm(shape, eps)
    x = RNG.normal(3, 2, size=shape)
    assert (np.asarray(layer.weight) == 1).all() and (np.asarray(layer.bias) == 0).all()
    weight, bias = RNG.normal(size=(2, *x.shape))
    layer = eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (jnp.float32(weight), jnp.float32(bias)))
    expected = weight * normalized(x, eps) + bias
    np.testing.assert_allclose(layer(jnp.float32(x)), expected, rtol=1e-4, atol=1e-5)
    hash(jax.tree.structure(layer))


def test_layer_norm_without_weight_takes_any_shape():
    layer = eqx.nn.LayerNorm(None, elementwise_affine=False)
    assert layer.weight is None and layer.bias is None
    for shape in ((3,), (2, 5)):
        x = RNG.normal(size=shape)
        np.testing.assert_allclose(layer(jnp.float32(x)), normalized(x, 1e-5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("space", [(), (5,), (2, 3)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(space, groups, affine):
    layer = eqx.nn.GroupNorm(groups, 8, 1e-3, affine)
    x = RNG.normal(3, 2, size=(8, *space))
    size = 8 // groups
    expected = np.concatenate([normalized(x[i : i + size], 1e-3) for i in range(0, 8, size)])
    if affine:
        assert (np.asarray(layer.weight) == 1).all() and (np.asarray(layer.bias) == 0).all()
        weight, bias = RNG.normal(size=(2, 8))
        layer = eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (jnp.float32(weight), jnp.float32(bias)))
        expected = (weight * expected.T + bias).T
    np.testing.assert_allclose(layer(jnp.float32(x)), expected, rtol=1e-4, atol=1e-5)


def test_group_norm_of_any_number_of_channels():
    layer = eqx.nn.GroupNorm(2, channelwise_affine=False)
    assert layer.channels is None and jax.tree.leaves(layer) == []
    for channels in (4, 6):
        x = RNG.normal(size=channels)
        expected = np.concatenate([normalized(x[: channels // 2], 1e-5), normalized(x[channels // 2 :], 1e-5)])
        np.testing.assert_allclose(layer(jnp.float32(x)), expected, rtol=1e-4, atol=1e-5)


def test_group_norm_of_other_channels_than_it_has():
    with pytest.raises(ValueError, match="broadcast"):
        eqx.nn.GroupNorm(1, 4)(jnp.ones((1, 5)))  # (4, 1) with (1, 5) would be (4, 5)


def test_group_norm_errors():
    with pytest.raises(ValueError) as error:
        eqx.nn.GroupNorm(4, 6)
    assert str(error.value) == (
        "GroupNorm: groups doesn't divide channels.\n"
        "  got:      groups=4, channels=6\n"
        "  expected: channels a multiple of groups\n"
        "  fix:      groups=2"
    )
    with pytest.raises(ValueError) as error:
        eqx.nn.GroupNorm(4)
    assert str(error.value) == (
        "GroupNorm: weight and bias need the number of channels.\n"
        "  got:      channels=None, channelwise_affine=True\n"
        "  fix:      one of\n"
        "    1. GroupNorm(groups, channels)\n"
        "    2. channelwise_affine=False, for neither weight nor bias"
    )
