# SPDX-License-Identifier: Apache-2.0
"""The predicates of a leaf, on every kind of thing that can be one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether


class Converts:
    """What JAX takes as an array without being one."""

    def __init__(self, dtype):
        self.dtype_inside = dtype

    def __jax_array__(self):
        return jnp.ones(2, self.dtype_inside)


# leaf, is_array, is_array_like, is_inexact_array, is_inexact_array_like
ROWS = [
    (jnp.zeros(3), True, True, True, True),
    (jnp.zeros(3, jnp.bfloat16), True, True, True, True),
    (jnp.zeros(3, jnp.complex64), True, True, True, True),
    (jnp.zeros(3, jnp.int32), True, True, False, False),
    (jnp.zeros(3, bool), True, True, False, False),
    (jax.random.key(0), True, True, False, False),
    (jax.random.PRNGKey(0), True, True, False, False),
    (np.zeros(3), True, True, True, True),
    (np.zeros(3, jnp.bfloat16), True, True, True, True),
    (np.zeros(3, "M8[s]"), True, True, False, False),
    (np.array(["a"]), True, True, False, False),
    (np.array([object()]), True, True, False, False),
    (np.float32(1), True, True, True, True),
    (np.float64(1), True, True, True, True),
    (np.int32(1), True, True, False, False),
    (np.bool_(True), True, True, False, False),
    (1.0, False, True, False, True),
    (1j, False, True, False, True),
    (1, False, True, False, False),
    (True, False, True, False, False),
    (Converts(jnp.float32), False, True, False, True),
    (Converts(jnp.int32), False, True, False, False),
    (Converts, False, False, False, False),
    (jax.ShapeDtypeStruct((2,), jnp.float32), False, False, False, False),
    ("a", False, False, False, False),
    (None, False, False, False, False),
    (jax.nn.relu, False, False, False, False),
]
PREDICATES = (tether.is_array, tether.is_array_like, tether.is_inexact_array, tether.is_inexact_array_like)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: repr(row[0])[:30].partition(" object at")[0])
def test_predicates(row):
    leaf, *expected = row
    assert [predicate(leaf) for predicate in PREDICATES] == expected


def test_tracers_are_arrays():
    seen = []
    jax.make_jaxpr(lambda x, n: seen.extend(predicate(leaf) for predicate in PREDICATES for leaf in (x, n)))(1.0, 1)
    assert seen == [True, True, True, True, True, False, True, False]


def test_array_of_a_literal_is_an_array():
    constants = jax.make_jaxpr(lambda x: x + np.arange(3, dtype=np.float32))(jnp.ones(3)).consts
    assert constants and all(map(tether.is_inexact_array, constants))


@pytest.mark.parametrize("predicate", PREDICATES)
@pytest.mark.parametrize("leaf", [jnp.zeros(3), np.float32(1), 1.0])
def test_answers_are_bools(predicate, leaf):
    assert type(predicate(leaf)) is bool
