# SPDX-License-Identifier: Apache-2.0
"""Python functions of anything, called where a compiled one runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx

STRUCT = (jax.ShapeDtypeStruct((), jnp.float32), "text")


def test_it_gets_concrete_arrays_and_the_rest_as_it_is():
    def f(x, *, name):
        assert isinstance(x, jax.Array | np.ndarray) and name == "a"
        return np.float32(x) ** 2, "text"

    call = lambda x: eqx.filter_pure_callback(f, x, result_shape_dtypes=STRUCT, name="a")
    assert float(call(jnp.array(3.0))[0]) == 9.0
    out, text = eqx.filter_jit(call)(jnp.array(3.0))
    assert (float(out), text) == (9.0, "text")
    assert jax.vmap(lambda x: call(x)[0])(jnp.array([1.0, 2.0])).tolist() == [1, 4]


def test_all_lanes_at_once():
    shapes = []

    def f(x):
        shapes.append(x.shape)
        return x + 1

    call = lambda x: eqx.filter_pure_callback(f, x, result_shape_dtypes=STRUCT[0], vectorized=True)
    assert jax.vmap(call)(jnp.array([1.0, 2.0])).tolist() == [2, 3] and shapes == [(2,)]


def test_another_static_result():
    with pytest.raises(RuntimeError, match="something else than result_shape_dtypes says"):
        eqx.filter_pure_callback(lambda x: (x, "other"), jnp.array(1.0), result_shape_dtypes=STRUCT)
