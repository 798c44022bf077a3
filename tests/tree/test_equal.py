# SPDX-License-Identifier: Apache-2.0
"""``tree_equal``, answers and types of answers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import tree_equal
from tether.errors import ArgumentError

F32, NAN = np.float32, float("nan")
KEY = jax.random.key(0)

# one, other, keywords, answer
ROWS = [
    (1, 1.0, {}, True),
    (1, 1.0, {"typematch": True}, False),
    (1, True, {}, True),
    (1, True, {"typematch": True}, False),
    (1, np.array(1), {}, False),
    (jnp.array(1), 1, {}, False),
    (np.ones(2, F32), jnp.ones(2), {}, True),
    (np.ones(2, F32), jnp.ones(2), {"typematch": True}, False),
    (np.ones(2), jnp.ones(2), {}, False),  # float64 and float32
    (F32(1), np.array(1, F32), {}, True),
    (F32(1), np.array(1, F32), {"typematch": True}, False),
    (jnp.ones(2), jnp.zeros(2), {}, False),
    (jnp.ones(2), jnp.ones(3), {}, False),
    (jnp.ones(1), jnp.ones(()), {}, False),
    (jnp.zeros((0,)), jnp.zeros((0,)), {}, True),
    ([1], (1,), {}, False),
    ({"a": 1}, {"b": 1}, {}, False),
    ([None], [None], {}, True),
    ([None], [1], {}, False),
    (jnp.ones(2), jnp.ones(2) + 1e-4, {}, False),
    (jnp.ones(2), jnp.ones(2) + 1e-4, {"rtol": 1e-3}, True),
    (jnp.zeros(2), jnp.zeros(2) + 1e-4, {"rtol": 1e-3}, False),
    (jnp.zeros(2), jnp.zeros(2) + 1e-4, {"atol": 1e-3}, True),
    (np.ones(2, jnp.bfloat16), np.ones(2, jnp.bfloat16), {"rtol": 0.1}, True),
    (jnp.array(1 + 1j), jnp.array(1 + 1.00001j), {"rtol": 1e-3}, True),
    (jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32), {"atol": 5.0}, False),  # tolerance is for floats
    (1.0, 1.00001, {"rtol": 1e-3}, False),  # ... that are arrays
    (jnp.array(NAN), jnp.array(NAN), {}, False),
    (jnp.array(NAN), jnp.array(NAN), {"rtol": 1e-3}, False),
    (KEY, jax.random.key(0), {}, True),
    (KEY, jax.random.key(1), {}, False),
    (KEY, jax.random.key(0), {"rtol": 1e-3}, True),
    (KEY, jax.random.key(0, impl="rbg"), {}, False),
    ("a", "a", {}, True),
    (np.array(["a"]), np.array(["b"]), {}, False),
    (jax.ShapeDtypeStruct((), F32), jax.ShapeDtypeStruct((), F32), {}, True),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: repr(row)[:60])
def test_pairs(row):
    one, other, keywords, answer = row
    assert bool(tree_equal(one, other, **keywords)) is answer
    assert bool(tree_equal(other, one, **keywords)) is answer
    assert bool(tree_equal({"a": one, "b": 1}, {"a": other, "b": 1}, **keywords)) is answer


def test_one_tree_is_equal():
    assert tree_equal(jnp.ones(3)) is True


def test_no_tree_raises():
    with pytest.raises(ArgumentError, match="tree_equal: no tree was given"):
        tree_equal()


def test_third_tree_counts():
    assert tree_equal([1, 2], [1, 2], [1, 3]) is False
    assert not tree_equal(jnp.ones(2), jnp.ones(2), jnp.zeros(2))


def test_known_while_tracing_is_a_python_bool():
    seen = []

    def f(x):
        seen.append(tree_equal([x, "a"], [x, "b"]))
        seen.append(tree_equal([x], [x, x]))
        seen.append(tree_equal(x, x.astype(jnp.int32)))
        return tree_equal([x, "a"], [x, "a"])

    assert bool(jax.jit(f)(jnp.ones(2)))
    assert seen == [False, False, False] and all(type(answer) is bool for answer in seen)


def test_tracer_is_of_the_type_of_arrays():
    other = jnp.ones(2)
    assert bool(jax.jit(lambda x: tree_equal(x, other, typematch=True))(jnp.ones(2)))


def test_two_devices():
    one, two = (jax.device_put({"a": jnp.ones(2), "b": jnp.ones(3)}, device) for device in jax.devices()[:2])
    mixed = {"a": one["a"], "b": two["b"]}
    assert tree_equal(one, two) and tree_equal(mixed, two, one) and tree_equal(mixed, mixed)
    assert not tree_equal(one, {"a": two["a"] + 1, "b": two["b"]})


class Scale(tether.Module):
    def __init__(self, size, factor=1.0):
        self.weight = tether.Param(jnp.ones(size))
        self.factor = factor


def test_modules():
    assert tree_equal(Scale(2), Scale(2))
    assert tree_equal(Scale(2), Scale(3)) is False
    assert tree_equal(Scale(2), Scale(2, factor=2.0)) is False  # another setting is another structure
    assert not tree_equal(Scale(2), jax.tree.map(lambda x: x + 1, Scale(2)))
