# SPDX-License-Identifier: Apache-2.0
"""Jaxprs of functions of anything."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

import tether.compat.equinox as eqx


def test_the_jaxpr_computes_the_arrays():
    factor = jnp.array(3.0)
    make = eqx.filter_make_jaxpr(lambda x, n, *, y: (factor * x + y, n, "text"))
    jaxpr, struct, rest = make(jax.ShapeDtypeStruct((2,), jnp.float32), 5, y=jnp.ones(2))
    assert struct == (jax.ShapeDtypeStruct((2,), jnp.float32), None, None) and rest == (None, 5, "text")
    assert jaxpr_as_fun(jaxpr)(jnp.array([1.0, 2.0]), jnp.ones(2))[0].tolist() == [4, 7]
    assert any(const is factor for const in jaxpr.consts)
