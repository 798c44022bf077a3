# SPDX-License-Identifier: Apache-2.0
"""Trees in two parts, one that is traced and one that can be hashed."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import tether.compat.equinox as eqx
from tether.compat.equinox._static import by_tree, joined, names_of, split


def test_split_by_kind_and_by_specification():
    tree = {"a": jnp.ones(2), "b": [3, "text", None], "c": np.zeros(1)}
    for spec in (eqx.is_array, {"a": True, "b": False, "c": eqx.is_array}):
        dynamic, static = split(tree, spec)
        assert [leaf is None for leaf in dynamic] == [False, True, True, False]
        assert hash(static) == hash(split(tree, spec)[1]) and static == split(tree, spec)[1]
        assert joined(dynamic, static)["b"] == [3, "text", None] and joined(dynamic, static)["a"] is tree["a"]


def test_a_cache_by_trees():
    made = []
    make = by_tree(lambda *args, **kwargs: made.append((args, kwargs)) or len(made))
    assert [make([1, {"a": 2}], b=None), make([1, {"a": 2}], b=None), make([1, {"a": 3}], b=None)] == [1, 1, 2]


def test_names():
    def f(): ...

    @functools.wraps(f)
    def g(): ...

    assert names_of(functools.partial(g)) == ("f", f.__qualname__)
    assert names_of(eqx.nn.Identity()) == ("Identity", "Identity")
