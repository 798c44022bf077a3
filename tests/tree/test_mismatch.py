# SPDX-License-Identifier: Apache-2.0
"""Where two trees part, and how it is said."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import pytest

import tether
from tether.tree._mismatch import Mismatch, mismatch, structure_error

Point = collections.namedtuple("Point", ["x", "y"])


class Scale(tether.Module):
    def __init__(self, factor=1.0, **sizes):
        self.sizes = {name: tether.Param(jnp.ones(size)) for name, size in sizes.items()}
        self.factor = factor


@pytest.mark.parametrize(
    ("prefix", "full"),
    [
        (1, [1, 2]),
        ([1, (2, 3)], [1, ({"a": 2}, 3)]),
        ({"a": None}, {"a": None}),
        (Point(1, 2), Point([1], 2)),
        ((), ()),
        (Scale(a=2), Scale(a=2)),
    ],
)
def test_prefix(prefix, full):
    assert mismatch(prefix, full) is None


@pytest.mark.parametrize(
    ("prefix", "full", "path", "said_of_prefix", "said_of_full"),
    [
        ([1, 2], [1, 2, 3], "", "list of 2", "list of 3"),
        ([1, 2], (1, 2), "", "list of 2", "tuple of 2"),
        ([1, [2]], [1, 2], "[1]", "list of 1", "2"),
        ({"a": [1, None]}, {"a": [1, jnp.ones(2)]}, "['a'][1]", "None", "float32[2]"),
        ({"a": 1, "b": 2}, {"a": 1}, "", "dict of 2 with ['b']", "dict of 1 without ['b']"),
        ({"a": 1}, {"b": 1}, "", "dict of 1 with ['a']", "dict of 1 with ['b']"),
        (Point(1, ()), Point(1, 2), ".y", "tuple of 0", "2"),
        ((), (1,), "", "tuple of 0", "tuple of 1"),
        (Scale(a=2), Scale(b=2), "", "Scale with 1 cells with .sizes['a']", "Scale with 1 cells with .sizes['b']"),
        ([Scale(a=2)], [Scale(2.0, a=2)], "[0]", "Scale with 1 cells", "Scale with 1 cells and other settings"),
    ],
)
def test_first_difference(prefix, full, path, said_of_prefix, said_of_full):
    found = mismatch(prefix, full)
    assert jax.tree_util.keystr(found.path) == path
    assert found.prefix == said_of_prefix
    assert found.full == said_of_full or (found.full.startswith(said_of_full) and isinstance(prefix, list))


def test_is_leaf_ends_the_prefix():
    assert mismatch([(1, 2)], [3], is_leaf=lambda x: isinstance(x, tuple)) is None


def test_error():
    error = structure_error("f: no.", "tree", {"a": [1]}, {"a": 5}, fix="mend it")
    assert str(error) == "f: no.\n  at:       tree['a']\n  got:      5\n  expected: list of 1\n  fix:      mend it"


def test_mismatch_is_a_tuple():
    assert mismatch([1], 2) == Mismatch((), "list of 1", "2")
