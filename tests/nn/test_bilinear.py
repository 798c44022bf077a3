# SPDX-License-Identifier: Apache-2.0
"""Bilinear against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tether import nn
from tether.errors import ArgumentError, ShapeError

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_values(leading: tuple[int, ...], key: jax.Array):
    layer = nn.Bilinear(5, 4, 3, key=key)
    x1, x2 = RNG.normal(size=(*leading, 5)), RNG.normal(size=(*leading, 4))
    wanted = np.einsum("...i,oij,...j->...o", x1, np.asarray(layer.weight, np.float64), x2) + np.asarray(layer.bias)
    np.testing.assert_allclose(layer(x1, x2), wanted, rtol=1e-5, atol=1e-5)


def test_first_values(key: jax.Array):
    layer = nn.Bilinear(64, 9, 30, key=key)
    assert (layer.weight.shape, layer.bias.shape) == ((30, 64, 9), (30,))
    assert 0.12 < float(jnp.abs(layer.weight).max()) <= 0.125
    assert nn.Bilinear(2, 2, 1, use_bias=False, key=key).bias is None


@pytest.mark.parametrize("shapes", [((5,), (5,)), ((4,), (4,)), ((2, 5), (4,)), ((2, 5), (1, 4)), ((), (4,))])
def test_wrong_shapes(shapes: tuple[tuple[int, ...], ...]):
    with pytest.raises(ShapeError, match=r"(?s)Bilinear: x1 and x2 don't fit.*\[..., 5\] and \[..., 4\]"):
        nn.Bilinear(5, 4, 3)(*map(jnp.ones, shapes))


def test_sizes():
    with pytest.raises(ArgumentError, match="in2_features is not an integer of at least 1"):
        nn.Bilinear(5, 0, 3)
