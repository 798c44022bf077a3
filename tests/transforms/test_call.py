# SPDX-License-Identifier: Apache-2.0
"""The arguments of a compiled call: what is dynamic, what is static, what is a module."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether._transforms._call import is_dynamic, is_stateful, joined, likeness, reach_of, split

Pair = collections.namedtuple("Pair", ["a", "b"])


@jax.tree_util.register_pytree_node_class
class Foreign:
    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


def leaves_and_key(value):
    leaves = []
    key = split(value, likeness, leaves)
    hash(key)
    return leaves, key


@pytest.mark.parametrize(
    ("value", "count"),
    [
        *[(1, 1), (1.5, 1), (2j, 1), (True, 0), ("text", 0), (None, 0), (np.ones(2), 1), (np.float32(1), 1)],
        *[((1, [2, {"a": 3.0, "b": "s"}]), 3), (Pair(1, jnp.ones(2)), 2), (Foreign(1, True, np.ones(3)), 1)],
        *[([Foreign(1.0), 2.0], 1), (jax.random.key(0), 1), (np.bool_(True), 1), (len, 0), ([], 0)],
    ],
)
def test_dynamic_leaves(value, count):
    leaves, _ = leaves_and_key(value)
    assert len(leaves) == count


@pytest.mark.parametrize(
    ("one", "two"),
    [
        *[(1, 1.0), (1, True), ("a", "b"), ([1], (1,)), ({"a": 1}, {"b": 1}), (Pair(1, 2), (1, 2)), (None, 0)],
        *[(np.ones(2, np.float32), np.ones(2, np.int32)), (np.ones(2), np.ones(3)), (Foreign(1), Foreign(2))],
        *[(nn.Dropout(0.1), nn.Dropout(0.2)), (nn.Linear(2, 3), nn.Linear(3, 2)), (0.0, "0.0")],
    ],
)
def test_different_keys(one, two):
    assert leaves_and_key(one)[1] != leaves_and_key(two)[1]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        *[(1, 2), (1.0, 2.0), ([1, "a"], [5, "a"]), (np.ones(2), np.zeros(2)), (Pair(1, None), Pair(2, None))],
        *[(nn.Linear(2, 3), nn.Linear(2, 3)), (Foreign(1, 2.0), Foreign(1, 2.0))],
        *[(jax.random.key(0), jax.random.key(1)), (lambda x: x + 1, lambda x: x + 1)],
    ],
)
def test_equal_keys(one, two):
    if callable(one) and not isinstance(one, tether.Module):
        two = eval("[lambda x: x + 1 for _ in range(2)]")
        one, two = two
    assert leaves_and_key(one)[1] == leaves_and_key(two)[1]


def test_joined_puts_other_leaves_in_place():
    model = nn.Linear(2, 3)
    value = {"a": [1, "text", model], "b": Pair(2.0, Foreign(7, np.ones(2)))}
    leaves, _ = leaves_and_key(value)
    new = joined(value, iter([10 * leaf for leaf in leaves]))
    assert new["a"] == [10, "text", model] and new["a"][2] is model
    assert new["b"].a == 20.0 and new["b"].b.parts[0] == 7
    np.testing.assert_array_equal(new["b"].b.parts[1], [10.0, 10.0])


def test_is_dynamic_and_is_stateful():
    assert is_dynamic(1.0, plain=True) and not is_dynamic(1.0, plain=False)
    assert not is_dynamic(True, plain=True) and is_dynamic(np.ones(1), plain=False)
    assert is_stateful(nn.Linear(1, 1)) and is_stateful(tether.State(0)) and not is_stateful(jnp.ones(1))


def test_reach_names_arguments_closures_and_streams():
    inner, outer = nn.Linear(2, 3), nn.Linear(3, 2)
    names = set(reach_of(lambda net, x: outer(net(x)), (inner, 1), {}).variables().values())
    assert names == {"net.weight", "net.bias", "outer.weight", "outer.bias", "tether.random.default"}
