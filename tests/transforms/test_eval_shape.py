# SPDX-License-Identifier: Apache-2.0
"""eval_shape: shapes without values; nothing is computed, written or drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError


def test_results_and_trees():
    out = tether.eval_shape(lambda x, k: {"y": x @ x.T, "k": k}, jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), 3)
    assert (out["y"].shape, out["y"].dtype) == ((2, 2), jnp.bfloat16)


def test_nothing_is_written_or_drawn():
    model = nn.Sequential([nn.Linear(3, 4), nn.BatchNorm(4), nn.Dropout(0.5)])
    before = jax.tree.leaves(model)
    stream = jax.random.key_data(tether.pure(tether.random.draw).values()["tether.random.default"])
    out = tether.eval_shape(model, jax.ShapeDtypeStruct((5, 3), jnp.float32))
    assert out.shape == (5, 4)
    assert all(a is b for a, b in zip(jax.tree.leaves(model), before, strict=True))
    after = tether.pure(tether.random.draw).values()["tether.random.default"]
    np.testing.assert_array_equal(jax.random.key_data(after), stream)


def test_nothing_is_computed():
    ran = []

    def f(x):
        jax.debug.callback(lambda: ran.append(1))
        return x

    tether.eval_shape(f, np.ones(3))
    assert ran == []
    assert tether.eval_shape(lambda: nn.Linear(1_000_000, 2_000_000)).weight.shape == (2_000_000, 1_000_000)


def test_module_of_specs():
    specs = tether.eval_shape(lambda: nn.Linear(3, 4))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(specs))
    out = tether.eval_shape(lambda model, x: model(x), specs, jax.ShapeDtypeStruct((5, 3), jnp.float32))
    assert (out.shape, out.dtype) == ((5, 4), jnp.float32)


def test_wrong_shapes_are_the_layers_errors():
    with pytest.raises(tether.errors.ShapeError, match="Linear"):
        tether.eval_shape(nn.Linear(3, 4), jax.ShapeDtypeStruct((5, 2), jnp.float32))
    with pytest.raises(ArgumentError, match="eval_shape"):
        tether.eval_shape(3)


def test_inside_other_transformations():
    linear = nn.Linear(3, 4)
    step = tether.jit(lambda x: x.sum() * len(tether.eval_shape(linear, x).shape))
    assert float(step(jnp.ones((2, 3)))) == 12.0
    gradient = tether.grad(lambda m, x: (m(x) * tether.eval_shape(m, x).shape[0]).sum())(linear, jnp.ones((2, 3)))
    np.testing.assert_allclose(gradient.bias, np.full(4, 4.0))


def test_a_failure_leaves_the_model_as_it_was():
    norm = nn.BatchNorm(3)

    def f(x):
        norm(x)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        tether.eval_shape(f, np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(norm.mean, np.zeros(3))
    norm(np.ones((2, 3), np.float32))
