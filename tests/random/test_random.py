# SPDX-License-Identifier: Apache-2.0
"""``keys``: what layers draw from; the oracle is jax.random.split by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether.errors import ArgumentError, DtypeError
from tether.random import draw, keys


def data(key: Any) -> list[Any]:
    return np.asarray(jax.random.key_data(key)).tolist()


def test_keys_of_a_key_are_its_split():
    expected = [data(key) for key in jax.random.split(jax.random.key(3), 4)]
    for given in (jax.random.key(3), jax.random.PRNGKey(3), 3):
        assert [data(key) for key in keys(given, 4)] == expected


def test_one_key_is_the_key_itself():
    assert data(keys(jax.random.key(3), 1)[0]) == data(jax.random.key(3))


def test_without_a_key_they_are_draws():
    tether.seed(5)
    expected = [data(draw()) for _ in range(3)]
    tether.seed(5)
    assert [data(key) for key in keys(None, 3)] == expected
    with tether.random.scope(5):
        assert [data(key) for key in keys(None, 3)] == expected


def test_seed_inside_a_compiled_function():
    @tether.jit
    def f() -> Any:
        tether.seed(8)
        return draw()

    assert data(f()) == data(jax.random.split(jax.random.key(8))[1])
    assert data(draw()) == data(jax.random.split(jax.random.split(jax.random.key(8))[0])[1])


def test_several_keys_are_refused():
    with pytest.raises(ArgumentError, match="one key") as caught:
        keys(jax.random.split(jax.random.key(0), 2), 1)
    assert caught.value.got == "key<fry>[2]"


@pytest.mark.parametrize("given", ["a", 1.5, jnp.ones(2)])
def test_no_key_is_refused(given: Any):
    with pytest.raises(DtypeError, match="PRNG key"):
        keys(given, 1)
