# SPDX-License-Identifier: Apache-2.0
"""``tree_at``: on plain trees as Equinox has it, on the cells and submodules of modules."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tether
from tether import Param, State, nn, tree_at
from tether.errors import StructureError

Point = collections.namedtuple("Point", ["x", "y"])
Nothing = collections.namedtuple("Nothing", [])


def is_none(leaf):
    return leaf is None


class TestPlainTrees:
    @pytest.mark.parametrize(
        ("where", "tree", "new", "expected"),
        [
            (lambda t: t[0], [1, 2], 3, [3, 2]),
            (lambda t: t[0], [[1, 2], 3], "x", ["x", 3]),
            (lambda t: (t[0], t[1]), [1, 2], (3, 4), [3, 4]),
            (lambda t: [t[1], t[0]], [1, 2], (3, 4), [4, 3]),
            (lambda t: t[0:2], [1, 2, 3], (3, 4), [3, 4, 3]),
            (lambda t: (t[1],), [1, 2], [(5, 6)], [1, (5, 6)]),
            (lambda t: t, [1, 2], 3, 3),
            (lambda t: t, 1, 3, 3),
            (lambda t: [], [1, 2], [], [1, 2]),
            (lambda t: t[0], [(), ()], 3, [3, ()]),
            (lambda t: t[1], [(), ((), 1)], (), [(), ()]),
            (lambda t: t[1], [[], []], 3, [[], 3]),
            (lambda t: t[1], [Nothing(), Nothing()], 3, [Nothing(), 3]),
            (lambda t: t["a"].x, {"a": Point(1, 2), "b": 3}, 9, {"a": Point(9, 2), "b": 3}),
            (lambda t: t["a"], {"a": Point(1, 2), "b": ()}, None, {"a": None, "b": ()}),
        ],
    )
    def test_replace(self, where, tree, new, expected):
        before = repr(tree)
        assert tree_at(where, tree, new) == expected
        assert repr(tree) == before

    def test_replace_fn(self):
        assert tree_at(lambda t: t[0], [1, 2], replace_fn=lambda x: x + 5) == [6, 2]
        assert tree_at(lambda t: t[1], (1, (2, 3)), replace_fn=lambda x: (x, x)) == (1, ((2, 3), (2, 3)))
        assert tree_at(lambda t: (t[0], t[1]), [1, ()], replace_fn=lambda x: [x]) == [[1], [()]]
        assert tree_at(lambda t: (t[0], t[0]), [1, 2], replace_fn=lambda x: x + 5) == [6, 2]

    def test_none_is_a_value(self):
        assert tree_at(lambda t: t[0], [1, 2], None) == [None, 2]
        assert tree_at(lambda t: t[0], [None, 2], 3) == tree_at(lambda t: t[0], [None, 2], 3, is_leaf=is_none) == [3, 2]
        assert tree_at(lambda t: (t[0], t[1]), [None, None], (1, 2), is_leaf=is_none) == [1, 2]
        assert tree_at(lambda t: t[0], [None, 2], replace_fn=lambda x: [x], is_leaf=is_none) == [[None], 2]

    def test_is_leaf(self):
        tree = [(1, 2), (3,)]
        assert tree_at(lambda t: t[0], tree, 9, is_leaf=lambda x: isinstance(x, tuple)) == [9, (3,)]
        with pytest.raises(StructureError, match="where looks at the value of a leaf"):
            tree_at(lambda t: t[0][0], tree, 9, is_leaf=lambda x: isinstance(x, tuple))
        with pytest.raises(StructureError, match="where looks at the value of a leaf"):
            tree_at(lambda t: t[0] if isinstance(t, tuple) else t, (1, 2), 9, is_leaf=lambda x: isinstance(x, tuple))

    def test_rest_is_the_same(self):
        array = jnp.ones(2)
        assert tree_at(lambda t: t[0], [1, array], 2)[1] is array

    def test_inside_jit(self):
        out = jax.jit(lambda t: tree_at(lambda t: t["a"], t, replace_fn=lambda x: x + 1))({"a": 1.0, "b": 2.0})
        assert out == {"a": 2.0, "b": 2.0}

    def test_registered_class(self):
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Pair:
            left: object
            right: object

        out = tree_at(lambda p: p.left.right, Pair(Pair(1, 2), 3), replace_fn=lambda x: -x)
        assert (out.left.left, out.left.right, out.right) == (1, -2, 3)


class TestErrors:
    @pytest.mark.parametrize("keywords", [{}, {"replace": 1, "replace_fn": lambda x: x}])
    def test_one_of_two_ways(self, keywords):
        with pytest.raises(StructureError, match="exactly one of replace and replace_fn") as error:
            tree_at(lambda t: t[0], [1], **keywords)
        assert isinstance(error.value, ValueError)
        assert error.value.got == ("both" if keywords else "neither")

    @pytest.mark.parametrize(
        "where",
        [
            lambda t: t[0] + 1,
            lambda t: t[0] if t[0] > 0 else t[1],
            lambda t: t[0] if t[0] else t[1],
            lambda t: t[0].shape,
            lambda t: t[0][0],
            lambda t: list(t[0]),
            lambda t: t[0] if isinstance(t[0], int) else t[1],
            lambda t: t[0] if hasattr(t[0], "real") else t[1],
            lambda t: [x for x in t if isinstance(x, int)],
        ],
    )
    def test_looking_at_leaves(self, where):
        with pytest.raises(StructureError, match="tree_at: where looks at the value of a leaf") as error:
            tree_at(where, [1, [2]], replace_fn=lambda x: x)
        assert error.value.expected and error.value.fixes

    @pytest.mark.parametrize(
        ("where", "got"),
        [
            (lambda t: 5, "5"),
            (lambda t: "a", "'a'"),
            (lambda t: {"a": t[0]}, "dict of 1"),
            (lambda t: (x for x in t), "generator object"),
            (lambda t: (t[0], 7), "7"),
        ],
    )
    def test_no_node(self, where, got):
        with pytest.raises(StructureError, match="where returned what is no node of the tree") as error:
            tree_at(where, [1, 2], replace_fn=lambda x: x)
        assert error.value.got == got

    def test_none_names_is_leaf(self):
        with pytest.raises(StructureError, match="is_leaf=lambda x: x is None"):
            tree_at(lambda t: t[0], [None, None], 3)
        with pytest.raises(StructureError, match="is_leaf=lambda x: x is None"):
            tree_at(lambda t: t[0].missing, [Net(), None], 3)  # a setting that is None is not the None of the tree

    @pytest.mark.parametrize("new", [3, (3,), (3, 4, 5), "a", None])
    def test_length(self, new):
        with pytest.raises(StructureError, match="replace is none of the same length") as error:
            tree_at(lambda t: (t[0], t[1]), [1, 2], new)
        assert error.value.expected == "a sequence of 2"

    def test_node_in_a_node(self):
        with pytest.raises(StructureError, match="a node and another one inside of it"):
            tree_at(lambda t: (t[0], t[0][0]), [[1], 2], (3, 4))

    def test_node_twice(self):
        with pytest.raises(StructureError, match="returned one node twice"):
            tree_at(lambda t: (t[0], t[0]), [1, 2], (3, 4))
        assert tree_at(lambda t: (t[0], t[0]), [1, 2], (3, 3)) == [3, 2]

    def test_node_that_is_one_object_in_several_places(self):
        @jax.tree_util.register_static
        class Flag:
            pass

        flag = Flag()
        with pytest.raises(StructureError, match="in several places"):
            tree_at(lambda t: t[0], [flag, flag, 1], 3)

    def test_errors_of_where_pass(self):
        with pytest.raises(IndexError):
            tree_at(lambda t: t[5], [1, 2], 3)
        with pytest.raises(AttributeError, match="hed"):
            tree_at(lambda m: m.hed, Net(), 3)


paths = st.lists(st.integers(0, 3), min_size=1, max_size=3)
trees = st.recursive(
    st.integers(), lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple), max_leaves=12
)


@given(trees, paths)
def test_any_node_of_any_tree(tree, path):
    def where(node):
        for index in path:
            if isinstance(node, list | tuple) and index < len(node):
                node = node[index]
        return node

    def expected(node, path):
        if not path or not isinstance(node, list | tuple):
            return "new"
        index, *rest = path
        if index >= len(node):
            return expected(node, rest)
        return type(node)(expected(x, rest) if i == index else x for i, x in enumerate(node))

    assert tree_at(where, tree, "new") == expected(tree, path)


class Linear(tether.Module):
    def __init__(self, n_in, n_out):
        self.weight = Param(jnp.ones((n_out, n_in)))
        self.bias = Param(jnp.zeros(n_out))

    def __call__(self, x):
        return self.weight @ x + self.bias


class Net(tether.Module):
    def __init__(self):
        self.layers = (Linear(2, 3), Linear(3, 2))
        self.head = Linear(2, 2)
        self.tied = Linear(2, 2)
        self.tied.weight = tether.cell(self.head, "weight")
        self.cache = State({"k": jnp.zeros(2), "v": jnp.ones(3)})
        self.scales = [Param(jnp.ones(2)), Param(jnp.ones(4))]
        self.activation, self.missing = jax.nn.relu, None


def changed(before, after):
    """Paths of the cells whose values differ."""
    old, new = tether.variables(before), tether.variables(after)
    return [path for path in new if old[path].value is not new[path].value]


class TestCells:
    @pytest.mark.parametrize(
        ("where", "paths"),
        [
            (lambda m: m.head.bias, ["head.bias"]),
            (lambda m: m.layers[1].weight, ["layers[1].weight"]),
            (lambda m: [layer.bias for layer in m.layers], ["layers[0].bias", "layers[1].bias"]),
            (lambda m: m.tied.weight, ["head.weight"]),
            (lambda m: (m.tied.weight, m.head.weight), ["head.weight"]),
            (lambda m: m.cache["v"], ["cache['v']"]),
            (lambda m: m.cache, ["cache['k']", "cache['v']"]),
            (lambda m: m.scales[1], ["scales[1]"]),
            (lambda m: m.scales, ["scales[0]", "scales[1]"]),
            (lambda m: (m.cache, m.head.bias), ["head.bias", "cache['k']", "cache['v']"]),
        ],
    )
    def test_replace_fn(self, where, paths):
        model = Net()
        new = tree_at(where, model, replace_fn=lambda old: jax.tree.map(lambda x: x + 1, old))
        assert changed(model, new) == paths
        assert type(new) is Net and jax.tree.structure(new) == jax.tree.structure(model)

    def test_replace(self):
        model, value = Net(), jnp.full((2, 2), 7.0)
        new = tree_at(lambda m: m.tied.weight, model, value)
        assert new.head.weight is new.tied.weight is value
        assert float(model.head.weight[0, 0]) == 1.0
        assert tether.cell(new, "tied.weight") is tether.cell(new, "head.weight")

    def test_pytree_of_cells(self):
        new = tree_at(lambda m: m.cache, Net(), {"k": 1, "v": 2})
        assert new.cache == {"k": 1, "v": 2}
        with pytest.raises(StructureError, match="another structure") as error:
            tree_at(lambda m: m.cache, Net(), {"k": 1})
        assert error.value.at == "replace" and "['v']" in error.value.expected

    def test_it_is_a_copy(self):
        model = Net()
        new = tree_at(lambda m: m.head.bias, model, jnp.ones(2))
        new.layers[0].bias = jnp.ones(3)
        assert not model.layers[0].bias.any() and not model.head.bias.any()

    def test_any_shape_and_any_thing(self):
        assert tree_at(lambda m: m.head.bias, Net(), jnp.ones(9)).head.bias.shape == (9,)
        assert tree_at(lambda m: m.head.bias, Net(), "spec").head.bias == "spec"
        assert len(jax.tree.leaves(tree_at(lambda m: m.head.bias, Net(), None))) == len(jax.tree.leaves(Net())) - 1

    def test_none_in_a_cell(self):
        empty = tether.filter(Net(), State)
        with pytest.raises(StructureError, match="is_leaf"):
            tree_at(lambda m: m.head.bias, empty, 1)
        full = tree_at(lambda m: m.head.bias, empty, 1, is_leaf=is_none)
        assert full.head.bias == 1 and full.head.weight is None

    def test_tied_cells_cannot_differ(self):
        with pytest.raises(StructureError, match="one node twice") as error:
            tree_at(lambda m: (m.tied.weight, m.head.weight), Net(), (1, 2))
        assert "tied cells are one" in error.value.expected

    def test_setting_is_no_node(self):
        with pytest.raises(StructureError, match=r"tether.view\(model"):
            tree_at(lambda m: m.activation, Net(), jnp.tanh)

    def test_variable_is_no_value(self):
        with pytest.raises(StructureError, match="a cell can't hold a Variable"):
            tree_at(lambda m: m.head.bias, Net(), Param(jnp.ones(2)))

    def test_mask(self):
        model = Net()
        mask = tree_at(lambda m: (m.head.weight, m.cache["k"]), jax.tree.map(lambda _: False, model), (True, True))
        assert jax.tree.leaves(mask).count(True) == 2
        assert len(jax.tree.leaves(tether.filter(model, mask))) == 2

    def test_module_in_a_tree(self):
        model, other = Net(), Linear(1, 1)
        tree = {"model": model, "rest": [1]}
        assert changed(model, tree_at(lambda t: t["model"].head.bias, tree, 0)["model"]) == ["head.bias"]
        new = tree_at(lambda t: t["model"], tree, other)
        assert type(new["model"]) is Linear and new["model"] is not other
        new["model"].bias = jnp.ones(1)
        assert not other.bias.any()

    def test_gradient_through_a_replaced_cell(self):
        model = Linear(2, 1)
        x = jnp.array([2.0, 3.0])
        gradient = jax.grad(lambda w: tree_at(lambda m: m.weight, model, w)(x).sum())(model.weight)
        np.testing.assert_allclose(gradient, [[2.0, 3.0]])

    def test_looking_at_cells(self):
        with pytest.raises(StructureError, match="looks at the value"):
            tree_at(lambda m: m.head.bias if m.head.bias.ndim == 1 else m.head.weight, Net(), 1)


class TestSubmodules:
    def test_replace(self):
        model, other = Net(), Linear(4, 5)
        new = tree_at(lambda m: m.layers[0], model, other)
        assert new.layers[0].weight.shape == (5, 4)
        assert model.layers[0].weight.shape == (3, 2)
        new.layers[0].bias = jnp.ones(5)
        new.head.bias = jnp.ones(2)
        assert not other.bias.any() and not model.head.bias.any()

    def test_replace_fn(self):
        new = tree_at(lambda m: m.head, Net(), replace_fn=lambda old: Linear(*old.weight.shape))
        assert tether.cell(new, "head.weight") is not tether.cell(new, "tied.weight")

    def test_with_a_cell(self):
        new = tree_at(lambda m: (m.layers[0], m.head.bias), Net(), (Linear(4, 5), jnp.ones(2)))
        assert new.layers[0].weight.shape == (5, 4) and new.head.bias.all()

    def test_in_a_tree(self):
        new = tree_at(lambda t: t[1].layers, [1, Net()], (Linear(1, 1), Linear(2, 2)))
        assert [layer.bias.shape for layer in new[1].layers] == [(1,), (2,)]

    @pytest.mark.parametrize("new", [1, None, jnp.ones(2), Param(1.0)])
    def test_only_by_a_module(self, new):
        with pytest.raises(StructureError, match="a submodule can only be replaced by a module") as error:
            tree_at(lambda m: m.head, Net(), new)
        assert error.value.at == "head  (Linear)"

    def test_cell_in_a_replaced_submodule(self):
        with pytest.raises(StructureError, match="inside of it"):
            tree_at(lambda m: (m.layers[0], m.layers[0].bias), Net(), (Linear(1, 1), 1))
        with pytest.raises(StructureError, match="inside of it"):
            tree_at(lambda m: (m, m.layers[0]), Net(), (Linear(1, 1), Linear(1, 1)))

    def test_shared_submodule_is_one(self):
        class Siamese(tether.Module):
            def __init__(self):
                self.left = Linear(2, 2)
                self.right = self.left
                self.both = [self.left, Linear(2, 2)]

        model = Siamese()
        new = tree_at(lambda m: m.right, model, Linear(4, 5))
        assert new.left is new.right is new.both[0] and new.left.weight.shape == (5, 4)
        new = tree_at(lambda m: m.both[0], model, replace_fn=lambda old: Linear(old.bias.size, 7))
        assert new.left is new.right is new.both[0] and new.left.weight.shape == (7, 2)
        new = tree_at(lambda m: m.both[0].weight, model, 0)
        assert new.left.weight == new.right.weight == 0
        with pytest.raises(StructureError, match="one node twice"):
            tree_at(lambda m: (m.left, m.right), model, (Linear(1, 1), Linear(1, 1)))

    def test_part_of_a_shared_submodule(self):
        class Pair(tether.Module):
            def __init__(self):
                self.inner = Linear(2, 2)

        class Siamese(tether.Module):
            def __init__(self):
                self.left = Pair()
                self.right = self.left

        new = tree_at(lambda m: m.right.inner, Siamese(), Linear(4, 5))
        assert new.left is new.right and new.left.inner.weight.shape == (5, 4)

    def test_given_module_stays_as_it_is(self):
        other = Linear(4, 5)
        tree_at(lambda m: m.layers[1], Net(), other)
        assert tether.cell(other, "bias").label == "bias"

    def test_transparent_attribute(self):
        new = tree_at(lambda m: m.layers[1], nn.Sequential([nn.Identity(), nn.Linear(2, 3)]), nn.Linear(2, 5))
        assert new(jnp.ones(2)).shape == (5,)
