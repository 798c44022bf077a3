# SPDX-License-Identifier: Apache-2.0
"""Activations against float64 NumPy."""

import inspect
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax

X = np.array([-4.0, -1.0, -0.25, 0.0, 0.5, 3.0])
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # Klambauer et al. 2017

EXPECTED = {
    "celu": np.where(X > 0, X, np.expm1(X)),
    "elu": np.where(X > 0, X, np.expm1(X)),
    "leaky_relu": np.where(X > 0, X, 0.01 * X),
    "log_sigmoid": -np.log1p(np.exp(-X)),
    "log_softmax": X - np.log(np.exp(X).sum()),
    "logsumexp": np.log(np.exp(X).sum()),
    "relu": np.maximum(X, 0),
    "selu": SELU_SCALE * np.where(X > 0, X, SELU_ALPHA * np.expm1(X)),
    "sigmoid": 1 / (1 + np.exp(-X)),
    "softmax": np.exp(X) / np.exp(X).sum(),
    "softplus": np.log1p(np.exp(X)),
    "swish": X / (1 + np.exp(-X)),
    "tanh": np.tanh(X),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("kind", [lambda x: x, objax.TrainVar, objax.StateVar])
def test_formula(name, kind):
    got = getattr(objax.functional, name)(kind(jnp.asarray(X, jnp.float32)))
    np.testing.assert_allclose(got, EXPECTED[name], rtol=2e-6, atol=1e-7)


def test_all_are_there():
    assert set(EXPECTED) == set(objax.functional.core.activation.__all__)
    packages = {"core", "divergence", "loss", "parallel"}
    assert len(set(objax.functional.__all__) - packages) == 30


def test_tanh_has_one_argument_and_relu_can_be_pickled():
    assert list(inspect.signature(objax.functional.tanh).parameters) == ["x"]
    assert objax.util.repr_function(objax.functional.tanh) == "tanh"
    assert pickle.loads(pickle.dumps(objax.functional.relu)) is objax.functional.relu
