# SPDX-License-Identifier: Apache-2.0
"""Shapes without values."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tether.compat.equinox as eqx


def test_arrays_become_shapes_and_the_rest_stays():
    ran = []

    def f(x, y, n):
        ran.append(x)
        return x @ y, n + 1, jax.ShapeDtypeStruct((7,), jnp.int32)

    out = eqx.filter_eval_shape(f, jnp.ones((2, 3)), jax.ShapeDtypeStruct((3, 4), jnp.float32), 5)
    assert out == (jax.ShapeDtypeStruct((2, 4), jnp.float32), 6, jax.ShapeDtypeStruct((7,), jnp.int32))
    assert isinstance(ran[0], jax.core.Tracer)


def test_a_model_without_its_arrays(key):
    model = eqx.filter_eval_shape(eqx.nn.Linear, 2, 3, key=key)
    assert model.weight == jax.ShapeDtypeStruct((3, 2), jnp.float32) and model.in_features == 2
