# SPDX-License-Identifier: Apache-2.0
"""One small program through every layer of the library. Runs first; what it finds, the other tests only repeat."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tether import nn

X = np.random.default_rng(0).normal(size=(16, 1, 4, 4)).astype(np.float32)
Y = (X.mean((1, 2, 3)) > 0).astype(np.int32)


class Net(tether.Module):
    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.body = nn.Sequential([nn.Conv2d(1, 4, 3, key=k1), nn.BatchNorm(4), nn.Lambda(jax.nn.relu)])
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(4, 2, key=k2)
        self.calls = tether.State(0)

    def __call__(self, x):
        self.calls = self.calls + 1
        return self.head(self.dropout(self.body(x).mean((-2, -1))))


def loss(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@tether.jit
def step(model, optimizer, x, y):
    value, grads = tether.value_and_grad(loss)(model, x, y)
    optimizer.update(grads)
    return value


@pytest.fixture(scope="module")
def trained():
    tether.seed(0)
    with jax.numpy_dtype_promotion("standard"):
        model = Net(jax.random.key(0))
        optimizer = tether.Optimizer(model, optax.adam(3e-2))
        return model, [float(step(model, optimizer, X, Y)) for _ in range(30)]


def test_training_learns_and_compiles_once(trained):
    model, losses = trained
    assert losses[-1] < 0.7 * losses[0]
    assert step.traces == 1 and int(model.calls) == 30


def test_state_moved_and_is_plain(trained):
    model, _ = trained
    assert float(jnp.abs(model.body[1].mean).sum()) > 0
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model))


def test_evaluation_is_pure(trained):
    model, _ = trained
    before = int(model.body[1].mean.sum() * 1000)
    evaluate = tether.jit(lambda model, x: model(x))
    one, two = evaluate(model.eval(), X), evaluate(model.eval(), X[:3])
    np.testing.assert_allclose(two, one[:3], rtol=1e-4, atol=1e-5)
    assert int(model.body[1].mean.sum() * 1000) == before


def test_trees(trained):
    model, _ = trained
    params, rest = tether.partition(model, tether.Param)
    assert tether.tree_equal(tether.combine(params, rest), model)
    assert len(jax.tree.leaves(params)) == 6 and len(jax.tree.leaves(model)) == 9
    doubled = jax.tree.map(lambda v: v * 2, model)
    np.testing.assert_array_equal(doubled.head.bias, 2 * model.head.bias)
    assert list(tether.variables(model, "head.*")) == ["head.weight", "head.bias"]
    for copied in (tether.clone(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model.head))):
        assert jax.tree.leaves(copied)[-1] is not jax.tree.leaves(model)[-1]
    assert all(text in str(tether.summary(model)) for text in ("head", "float32[2, 4]"))


def test_transformations(trained):
    model, _ = trained
    evaluated = model.eval()

    @tether.jit
    def together(x):
        lanes = tether.vmap(lambda x: evaluated(x[None])[0])(x)
        value, gradient = tether.value_and_grad(lambda x: tether.checkpoint(evaluated)(x).sum())(x)
        return evaluated(x), lanes, value, gradient

    right, lanes, value, gradient = together(X)
    np.testing.assert_allclose(lanes, right, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(value, right.sum(), rtol=1e-4, atol=1e-4)
    assert gradient.shape == X.shape and float(jnp.abs(gradient).sum()) > 0
    assert tether.eval_shape(evaluated, X).shape == (16, 2)
    out, _ = jax.jit(tether.pure(evaluated))(tether.pure(evaluated).values(), X)
    np.testing.assert_allclose(out, right, rtol=1e-4, atol=1e-5)
    ensemble = tether.stack([nn.Linear(3, 2), nn.Linear(3, 2)])
    assert tether.vmap(lambda member, x: member(x), in_axes=(0, None))(ensemble, np.ones(3, np.float32)).shape == (2, 2)


def test_an_error_has_path_got_and_fix(trained):
    model, _ = trained
    with pytest.raises(tether.errors.ShapeError, match=r"(?s)at:.*got:.*expected:"):
        model.head.bias = jnp.zeros(3)
