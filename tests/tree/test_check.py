# SPDX-License-Identifier: Apache-2.0
"""Nodes as objects: one level of a tree, nodes in themselves and in two places."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import tether
from tether import nn
from tether.errors import StructureError


class Pair(NamedTuple):
    a: Any
    b: Any


class Made:
    """A node that makes its children anew each time that it is flattened."""


jax.tree_util.register_pytree_node(Made, lambda _: ([[1], [2], [3]], None), lambda _, __: Made())

SHARED: list[Any] = [1]
ONE_NONE: list[Any] = [None]
LAYER = nn.Linear(2, 3)


class TestOneLevel:
    @pytest.mark.parametrize(
        ("tree", "children"),
        [
            ({"b": (1, 2), "a": 3}, [3, (1, 2)]),
            ([(), None, [[]], {}], [(), None, [[]], {}]),
            (Pair([1], None), [[1], None]),
            ([4, 4], [4, 4]),
            (4, [4]),
            (None, []),
            ((), []),
            ([SHARED, SHARED], [SHARED, SHARED]),
        ],
    )
    def test_children(self, tree: Any, children: list[Any]):
        found, treedef = tether.tree_flatten_one_level(tree)
        assert found == children
        assert jax.tree.unflatten(treedef, found) == tree

    def test_the_children_are_the_very_objects(self):
        assert tether.tree_flatten_one_level({"a": SHARED})[0][0] is SHARED

    def test_a_module_has_the_values_of_its_variables(self):
        children, treedef = tether.tree_flatten_one_level(LAYER)
        assert [child is value for child, value in zip(children, (LAYER.weight, LAYER.bias), strict=True)] == [True] * 2
        assert treedef == jax.tree.structure(LAYER)

    def test_a_child_of_itself(self):
        tree: list[Any] = [1]
        tree.append(tree)
        with pytest.raises(StructureError) as caught:
            tether.tree_flatten_one_level(tree)
        assert str(caught.value) == (
            "tree_flatten_one_level: a node lies in itself.\n"
            "  at:       tree and tree[1]\n"
            "  got:      the same list of 2\n"
            "  expected: a tree: nothing would ever get to the end of this"
        )


class TestCheck:
    @pytest.mark.parametrize(
        "tree",
        [
            1,
            [1, 1, "a", "a"],
            [[1], [1]],
            [(), (), [], {}, None, None],
            [*[empty := []] * 2, Pair((), empty)],
            [Made(), Made(), Made()],
            [LAYER, LAYER, {"a": LAYER}],
            [jnp.ones(2)] * 2,
        ],
    )
    def test_fine(self, tree: Any):
        assert tether.tree_check(tree) is None

    def test_a_tied_weight_and_a_shared_part_are_legal(self):
        class Model(tether.Module):
            def __init__(self):
                self.one = nn.Linear(2, 2)
                self.two = self.one
                self.three = nn.Linear(2, 2)
                self.three.weight = tether.cell(self.one, "weight")

        tether.tree_check((Model(), 1))

    @pytest.mark.parametrize(
        ("tree", "places"),
        [
            ([SHARED, SHARED], "tree[0] and tree[1]"),
            ({"a": SHARED, "b": (1, {"c": SHARED})}, "tree['a'] and tree['b'][1]['c']"),
            (Pair([SHARED], SHARED), "tree.a[0] and tree.b"),
            ([ONE_NONE, ONE_NONE], "tree[0] and tree[1]"),
        ],
    )
    def test_in_two_places(self, tree: Any, places: str):
        with pytest.raises(StructureError) as caught:
            tether.tree_check(tree)
        assert str(caught.value) == (
            "tree_check: one node lies in two places.\n"
            f"  at:       {places}\n"
            "  got:      the same list of 1\n"
            "  expected: each node in one place, as after any tree function or transformation: each place has its own "
            "copy\n"
            "  fix:      one of\n"
            "    1. copy it: jax.tree.map(lambda leaf: leaf, node)\n"
            "    2. make it a tether.Module, which may be shared"
        )

    def test_the_fix_works(self):
        tether.tree_check([SHARED, jax.tree.map(lambda leaf: leaf, SHARED)])

    def test_in_itself(self):
        inner: dict[str, Any] = {}
        tree = [1, {"a": [inner]}]
        inner["up"] = tree[1]
        with pytest.raises(StructureError) as caught:
            tether.tree_check(tree)
        assert str(caught.value) == (
            "tree_check: a node lies in itself.\n"
            "  at:       tree[1] and tree[1]['a'][0]['up']\n"
            "  got:      the same dict of 1\n"
            "  expected: a tree: nothing would ever get to the end of this"
        )
