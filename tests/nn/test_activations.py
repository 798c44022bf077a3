# SPDX-License-Identifier: Apache-2.0
"""PReLU against its formula; the functions are JAX's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn import _activations


def test_functions_are_those_of_jax():
    for function in _activations.FUNCTIONS:
        assert getattr(nn, function.__name__) is function
    assert nn.swish is jax.nn.swish


@pytest.mark.parametrize(
    ("count", "axis", "shape"), [(1, 1, (2, 3)), (3, 1, (2, 3, 4)), (3, -1, (3,)), (3, -2, (5, 3, 2))]
)
def test_values_and_gradients(count: int, axis: int, shape: tuple[int, ...]):
    layer = nn.PReLU(count, channel_axis=axis)
    layer.weight = slope = jnp.asarray([0.5, -1.0, 2.0][:count])
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    spread = np.asarray(slope).reshape(-1, *[1] * (-axis - 1 if axis < 0 else len(shape) - axis - 1))
    spread = np.broadcast_to(spread if count > 1 else np.asarray(slope), shape)
    np.testing.assert_allclose(layer(x), np.maximum(x, 0) + spread * np.minimum(x, 0), rtol=1e-6)
    of_layer, of_x = tether.grad(lambda layer, x: layer(x).sum(), argnums=(0, 1))(layer, x)
    np.testing.assert_allclose(of_x, np.where(x >= 0, 1, spread), rtol=1e-6)
    axes = tuple(i for i in range(len(shape)) if i != axis % len(shape)) if count > 1 else None
    np.testing.assert_allclose(of_layer.weight, np.minimum(x, 0).sum(axes).reshape(count), rtol=1e-5)


def test_bad_input():
    with pytest.raises(ShapeError, match=r"(?s)PReLU: axis 1 of x is not num_parameters, 3.*float32\[2, 4\]"):
        nn.PReLU(3)(jnp.ones((2, 4)))
    with pytest.raises(ShapeError, match="axis 1 of x"):
        nn.PReLU(3)(jnp.ones(3))
    with pytest.raises(DtypeError, match="complex"):
        nn.PReLU()(jnp.ones(3, jnp.complex64))
    with pytest.raises(ArgumentError, match="num_parameters is not an integer of at least 1"):
        nn.PReLU(0)
    with pytest.raises(ArgumentError, match="init is not a number"):
        nn.PReLU(1, jnp.ones(2))
