# SPDX-License-Identifier: Apache-2.0
"""``filter``, ``partition``, ``combine``: on plain trees as Equinox has them, on modules by selection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tether
from tether import Param, State, combine, is_array, is_inexact_array, partition
from tether.errors import ArgumentError, SelectionError, StructureError


class Linear(tether.Module):
    def __init__(self, n_in, n_out):
        self.weight = Param(jnp.ones((n_out, n_in)))
        self.bias = Param(jnp.zeros(n_out))


class Norm(tether.Module):
    def __init__(self, size):
        self.scale = Param(jnp.ones(size))
        self.mean = State(jnp.zeros(size))
        self.count = State(0)
        self.rng = tether.Rng(0)


class Net(tether.Module):
    def __init__(self):
        self.first = Linear(2, 3)
        self.norm = Norm(3)
        self.last = Linear(3, 2)
        self.activation = jax.nn.relu


class Tied(tether.Module):
    def __init__(self):
        self.embed, self.head = Linear(2, 2), Linear(2, 2)
        self.head.weight = tether.cell(self.embed, "weight")


PARAMS = ["first.weight", "first.bias", "norm.scale", "last.weight", "last.bias"]
STATES = ["norm.mean", "norm.count"]


def kept(tree, root=""):
    """Paths at which a filtered module has a value."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [path.removeprefix(root).removeprefix(".") for path in paths]


class TestPlainTrees:
    @pytest.mark.parametrize(
        ("tree", "spec", "expected"),
        [
            ([1, 2.0], [True, False], [1, None]),
            ([1, 2.0], True, [1, 2.0]),
            ([1, (2, 3)], [False, True], [None, (2, 3)]),
            ([1, (2, 3)], [True, [lambda x: x > 2, 0][0]], [1, (None, 3)]),
            ([1, None], True, [1, None]),
            ([1, None], [True, None], [1, None]),
            ([1, None], [False, True], [None, None]),
            ({"a": 1, "b": 2.0}, lambda x: isinstance(x, int), {"a": 1, "b": None}),
            ({"a": 1, "b": 2}, {"a": True, "b": False}, {"a": 1, "b": None}),
            ([[]], True, [[]]),
            (None, True, None),
            (None, None, None),
            ([1, 2], lambda x: x - 1, [None, 2]),  # true enough
        ],
    )
    def test_filter(self, tree, spec, expected):
        assert tether.filter(tree, spec) == expected
        rest = tether.filter(tree, spec, inverse=True)
        assert (tether.filter(tree, spec), rest) == partition(tree, spec)
        assert combine(expected, rest) == tree

    def test_replace(self):
        assert tether.filter([1, (2, 3)], [True, False], replace="r") == [1, ("r", "r")]
        assert tether.filter([1, (2, 3)], True, inverse=True, replace=0) == [0, (0, 0)]
        assert partition([1, 2], [True, False], replace=0) == ([1, 0], [0, 2])

    def test_is_leaf(self):
        def is_tuple(x):
            return isinstance(x, tuple)

        assert tether.filter([1, (2, 3)], is_tuple, is_leaf=is_tuple) == [None, (2, 3)]
        assert tether.filter([1, (2, 3)], [True, is_tuple], is_leaf=is_tuple) == [1, (2, 3)]
        assert partition([1, (2, 3)], is_tuple, is_leaf=is_tuple) == ([None, (2, 3)], [1, None])
        assert tether.filter([None, 1], lambda x: x is None, replace=0, is_leaf=lambda x: x is None) == [None, 0]

    def test_predicate_is_asked_once(self):
        asked = []
        partition([1, 2], lambda x: asked.append(x) or True)
        assert asked == [1, 2]

    @pytest.mark.parametrize("spec", [0, 1, np.True_, jnp.array(True), 2.5, [1, True]])
    def test_other_specs_raise(self, spec):
        with pytest.raises(
            StructureError, match=r"filter: a leaf of filter_spec is neither bool, predicate nor"
        ) as error:
            tether.filter([1, 2], spec)
        assert isinstance(error.value, ValueError)
        assert error.value.at == ("filter_spec[0]" if isinstance(spec, list) else "filter_spec")

    def test_traced_spec_raises(self):
        with pytest.raises(StructureError, match="got:      bool"):
            jax.jit(lambda keep: tether.filter([1.0], keep))(True)

    @pytest.mark.parametrize("predicate", [lambda x: x > 0, lambda x: None, lambda x: jnp.stack([x, x])])
    def test_predicate_without_an_answer_raises(self, predicate):
        with pytest.raises(StructureError, match="partition: the predicate says neither True nor False") as error:
            jax.make_jaxpr(lambda x: partition({"a": [1, x]}, {"a": [True, predicate]}))(1.0)
        assert error.value.at == "pytree['a'][1]"

    def test_error_of_a_predicate_passes(self):
        def predicate(leaf):
            raise ValueError("my own")

        with pytest.raises(ValueError, match="^my own$"):
            tether.filter([1], predicate)

    @pytest.mark.parametrize(
        ("tree", "spec", "at", "got", "expected"),
        [
            ([1, 2], [True], "pytree", "list of 2", "list of 1"),
            ({"a": [1, 2]}, {"a": (True, False)}, "pytree['a']", "list of 2", "tuple of 2"),
            ({"a": 1}, {"b": True}, "pytree", "dict of 1 with ['a']", "dict of 1 with ['b']"),
            ([1], [[True]], "pytree[0]", "1", "list of 1"),
            ([1], None, "pytree", "list of 1", "None"),
        ],
    )
    def test_no_prefix_raises(self, tree, spec, at, got, expected):
        with pytest.raises(StructureError, match="filter: filter_spec is not a prefix of the tree") as error:
            tether.filter(tree, spec)
        assert (error.value.at, error.value.got, error.value.expected) == (at, got, expected)
        assert error.value.fixes


class TestCombine:
    @pytest.mark.parametrize(
        ("trees", "expected"),
        [
            ([[1, None], [None, 2]], [1, 2]),
            ([[1, None], [3, 2]], [1, 2]),
            ([[None], [None]], [None]),
            ([[1]], [1]),
            ([[None, 5], [(1, 2), 6]], [(1, 2), 5]),
            ([[None, 0], [False, 6]], [False, 0]),  # None alone is no value
            ([{"a": None}, {"a": None}, {"a": 3}], {"a": 3}),
        ],
    )
    def test_first_value_wins(self, trees, expected):
        assert combine(*trees) == expected

    def test_is_leaf(self):
        assert combine([(1, None), None], [None, 3], is_leaf=lambda x: isinstance(x, tuple)) == [(1, None), 3]

    def test_other_structure_raises(self):
        with pytest.raises(StructureError, match="combine: the trees don't have one structure") as error:
            combine({"a": [1]}, {"a": [None]}, {"a": [2, 3]})
        assert (error.value.at, error.value.got) == ("tree 2['a']", "list of 2")

    def test_no_tree_raises(self):
        with pytest.raises(ArgumentError, match="combine: no tree was given"):
            combine()

    def test_modules_of_other_structure_raise(self):
        with pytest.raises(StructureError, match="settings, kinds, ties or modes") as error:
            combine(Linear(2, 3), tether.freeze(Linear(2, 3)))
        assert error.value.expected == "Linear with 2 cells"
        with pytest.raises(StructureError, match=r"got:      Net with 8 cells"):
            combine(Linear(2, 3), Net())


trees = st.recursive(
    st.one_of(st.integers(), st.floats(allow_nan=False), st.none(), st.text(max_size=2)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(trees)
def test_parts_of_any_tree_are_the_whole(tree):
    kept, rest = partition(tree, lambda leaf: isinstance(leaf, int))
    assert combine(kept, rest) == combine(rest, kept) == tree
    assert all(isinstance(leaf, int) for leaf in jax.tree.leaves(kept))
    assert not any(isinstance(leaf, int) for leaf in jax.tree.leaves(rest))


class TestModules:
    @pytest.mark.parametrize(
        ("select", "expected"),
        [
            (Param, PARAMS),
            (State, STATES),
            (tether.Variable, [*PARAMS[:3], *STATES, "norm.rng", *PARAMS[3:]]),
            ([State, tether.Rng], [*STATES, "norm.rng"]),
            (~Param, [*STATES, "norm.rng"]),
            ("*.bias", ["first.bias", "last.bias"]),
            ("norm", ["norm.scale", *STATES, "norm.rng"]),
            (["first.*", Norm], [*PARAMS[:3], *STATES, "norm.rng"]),
            (~Linear, ["norm.scale", *STATES, "norm.rng"]),
            (tether.where(lambda path, variable: variable.value.ndim == 2), ["first.weight", "last.weight"]),
        ],
        ids=str,
    )
    def test_selection(self, select, expected):
        model = Net()
        part, rest = partition(model, select)
        assert kept(part) == kept(tether.filter(model, select)) == expected
        assert set(kept(rest)) == set(tether.variables(model)) - set(expected)
        assert bool(tether.tree_equal(combine(part, rest), model))
        assert type(part) is Net and part.activation is jax.nn.relu

    def test_only_trainable_parameters(self):
        leaves, _ = jax.tree.flatten(tether.filter(Net(), Param))
        assert [leaf.shape for leaf in leaves] == [(3, 2), (3,), (3,), (2, 3), (2,)]

    def test_frozen_cell_is_no_param(self):
        frozen = tether.freeze(Net(), "first")
        assert kept(tether.filter(frozen, Param)) == PARAMS[2:]
        assert set(PARAMS[:2]) <= set(kept(tether.filter(frozen, ~Param)))

    def test_part_of_the_model_is_a_selection(self):
        model = Net()
        assert kept(tether.filter(model, model.norm)) == ["norm.scale", *STATES, "norm.rng"]
        assert kept(tether.filter(model, tether.cell(model, "last.bias"))) == ["last.bias"]
        assert kept(tether.filter(model, [model.first, "last.bias"])) == ["first.weight", "first.bias", "last.bias"]

    def test_predicate_of_a_leaf(self):
        assert kept(tether.filter(Net(), is_inexact_array)) == [*PARAMS[:3], "norm.mean", *PARAMS[3:]]
        assert len(kept(tether.filter(Net(), is_array))) == 8

    def test_module_of_bools_is_a_mask(self):
        model = Net()
        mask = jax.tree.map(lambda _: False, model)
        assert kept(tether.filter(model, mask)) == []
        mask = tether.tree_at(lambda m: m.last.bias, mask, True)
        assert kept(tether.filter(model, mask)) == ["last.bias"]
        assert kept(tether.filter([model, model], [mask, mask])) == ["[0].last.bias", "[1].last.bias"]
        mixed = tether.tree_at(lambda m: m.norm.scale, mask, is_array)
        assert kept(tether.filter(model, mixed)) == ["norm.scale", "last.bias"]

    def test_mask_of_another_module_raises(self):
        with pytest.raises(StructureError, match="not a prefix"):
            tether.filter(Net(), jax.tree.map(lambda _: True, Norm(3)))

    def test_it_is_a_copy(self):
        model = Net()
        part = tether.filter(model, Param)
        part.first.bias = jnp.ones(3)
        assert not model.first.bias.any()
        assert part.norm.mean is None

    def test_twice(self):
        params = tether.filter(Net(), Param)
        assert kept(tether.filter(params, "first")) == PARAMS[:2]
        assert kept(tether.filter(params, State)) == []
        assert kept(tether.filter(params, "first", inverse=True)) == PARAMS[2:]

    def test_replace_on_cells(self):
        part = tether.filter(Linear(2, 3), "bias", replace=0)
        assert part.weight == 0 and part.bias.shape == (3,)

    def test_tied_cell_is_one(self):
        model = Tied()
        part, rest = partition(model, "head.weight")
        assert kept(part) == ["embed.weight"] and part.head.weight is part.embed.weight
        again = combine(part, rest)
        assert tether.cell(again, "head.weight") is tether.cell(again, "embed.weight")

    def test_gradients_of_the_kept(self):
        model = Linear(2, 1)
        params, rest = partition(model, "weight")

        def loss(params):
            whole = combine(params, rest)
            return jnp.sum(whole.weight @ jnp.array([2.0, 3.0]) + whole.bias)

        gradient = jax.grad(loss)(params)
        assert kept(gradient) == ["weight"]
        np.testing.assert_allclose(gradient.weight, [[2.0, 3.0]])


class TestContainersOfModules:
    def test_kinds_in_each_module(self):
        tree = {"model": Linear(2, 3), "norm": Norm(3), "lr": 0.1, "x": jnp.ones(2)}
        part = tether.filter(tree, Param)
        assert kept(part) == ["['model'].weight", "['model'].bias", "['norm'].scale"]
        assert part["lr"] is None and part["x"] is None
        assert part["norm"].mean is None

    def test_selections_as_leaves_of_a_prefix_tree(self):
        tree = {"model": Net(), "lr": 0.1, "x": jnp.ones(2)}
        part = tether.filter(tree, {"model": "last", "lr": True, "x": is_array})
        assert kept(part) == ["['lr']", "['model'].last.weight", "['model'].last.bias", "['x']"]

    def test_path_in_one_of_several(self):
        assert kept(tether.filter([Linear(2, 3), Norm(3)], "scale")) == ["[1].scale"]

    def test_a_path_where_there_is_no_module(self):
        with pytest.raises(SelectionError, match="a path stands where the tree has no module") as caught:
            tether.filter({"a": (1, 2), "b": 3}, {"a": (True, "x"), "b": False})
        assert "filter_spec['a'][1]" in str(caught.value)

    def test_path_in_none_raises(self):
        with pytest.raises(SelectionError, match="nothing"):
            tether.filter([Linear(2, 3), Linear(2, 3)], "scale")

    def test_nothing_of_a_plain_tree(self):
        assert tether.filter([1, jnp.ones(2)], Param) == [None, None]

    def test_bare_variables(self):
        param, state = Param(1.0), State(2.0)
        assert tether.filter([param, state], Param) == [param, None]
        assert tether.filter([param, state], ~Param) == [None, state]
        assert tether.filter([param, state], [Param, State]) == [param, state]
        assert tether.filter([param, state], state) == [None, state]
        assert tether.filter([param, state], "path") == [None, None]
