# SPDX-License-Identifier: Apache-2.0
"""Structures: equal recipes are one, ties are part of them, values are not; random module trees."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import gc
import pickle
import weakref
from collections import namedtuple
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether._core.structure import StaticKey, is_below, joined
from tether.errors import SealedError, StaticError

Point = namedtuple("Point", ["x", "y"])


class Bag(tether.Module):
    """Holds whatever it is given."""

    def __init__(self, **parts: Any):
        for name, part in parts.items():
            setattr(self, name, part)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def structure(module: Any) -> Any:
    return jax.tree.structure(module)


class TestStaticKey:
    """Settings are equal exactly where programs traced with them are."""

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (1, True),
            (1, 1.0),
            (0.0, -0.0),
            (0, False),
            ("1", 1),
            ((1, 2), [1, 2]),
            ((1, (2,)), (1, (2.0,))),
            ({"a": 1}, {"a": 2}),
            ({"a": 1}, {"a": True}),
            (Color.RED, Color.BLUE),
            (None, 0),
            (jnp.float32, jnp.float16),
            (lambda x: x + 1, lambda x: x + 2),
            (functools.partial(max, 1), functools.partial(max, 2)),
            (functools.partial(max, 1), functools.partial(min, 1)),
            (0.1, np.float64(0.1)),
        ],
    )
    def test_different(self, a: Any, b: Any):
        assert StaticKey(a) != StaticKey(b)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: 3,
            lambda: float("nan"),
            lambda: (1, [2, {"a": 0.5}]),
            lambda: {"a": 1, "b": 2},
            lambda: Color.RED,
            lambda: functools.partial(max, 3),
            lambda: Point(1, 2),
            lambda: lambda x: x * 2,
            lambda: jnp.dtype("float32"),
        ],
    )
    def test_equal(self, make: Any):
        assert StaticKey(make()) == StaticKey(make())
        assert hash(StaticKey(make())) == hash(StaticKey(make()))

    def test_dict_order_does_not_matter(self):
        assert StaticKey({"a": 1, "b": 2}) == StaticKey({"b": 2, "a": 1})

    def test_functions_by_what_they_capture(self):
        def make(power: Any, scale: Any = 1) -> Any:
            def f(x: Any, s: Any = scale) -> Any:
                return x**power * s

            return f

        assert StaticKey(make(2)) == StaticKey(make(2))
        assert StaticKey(make(2)) != StaticKey(make(3))
        assert StaticKey(make(2)) != StaticKey(make(2, scale=3))
        assert StaticKey(make(2)) != StaticKey(make(2.0))

    def test_captured_arrays_by_identity(self):
        def make(array: Any) -> Any:
            return lambda x: x + array

        array = jnp.ones(2)
        assert StaticKey(make(array)) == StaticKey(make(array))
        assert StaticKey(make(array)) != StaticKey(make(jnp.ones(2)))

    def test_recursive_functions(self):
        def make() -> Any:
            def f(n: int) -> int:
                return 1 if n == 0 else n * f(n - 1)

            return f

        f = make()
        assert StaticKey(f) == StaticKey(f)
        hash(StaticKey(f))

    def test_dataclasses_by_value(self):
        @dataclasses.dataclass
        class Config:
            width: int
            rates: list[float]

        assert StaticKey(Config(1, [0.5])) == StaticKey(Config(1, [0.5]))
        assert StaticKey(Config(1, [0.5])) != StaticKey(Config(1, [0.25]))

    def test_opaque(self):
        value = {"any": {1, 2}}
        assert StaticKey(tether.Static(value)) == StaticKey(tether.Static(value))
        assert StaticKey(tether.Static(value)) != StaticKey(tether.Static({"any": {1, 2}}))
        assert StaticKey(tether.Static((1, 2))) == StaticKey(tether.Static((1, 2)))

    def test_unhashable_is_refused_with_its_name(self):
        with pytest.raises(StaticError) as caught:
            Bag(tags={1, 2})
        assert "tags" in (caught.value.at or "")


class TestStructure:
    def test_equal_modules_share_one(self):
        key = jax.random.key(0)
        a, b = (nn.Sequential([nn.Linear(2, 3, key=key), nn.Lambda(lambda x: x * 2)]) for _ in range(2))
        assert structure(a) == structure(b) and hash(structure(a)) == hash(structure(b))
        assert a._tether.structure is b._tether.structure

    def test_no_shapes_and_dtypes(self):
        assert structure(Bag(w=tether.Param(jnp.ones(2)))) == structure(Bag(w=tether.Param(jnp.ones(3, jnp.int8))))

    @pytest.mark.parametrize(
        "other",
        [
            lambda: Bag(w=tether.State(jnp.ones(2)), n=1),
            lambda: Bag(v=tether.Param(jnp.ones(2)), n=1),
            lambda: Bag(w=tether.Param(jnp.ones(2)), n=2),
            lambda: Bag(w=tether.Param(jnp.ones(2)), n=True),
            lambda: Bag(w=tether.Param(jnp.ones(2)), n=1, m=None),
            lambda: tether.view(Bag(w=tether.Param(jnp.ones(2)), n=1), training=False),
            lambda: tether.freeze(Bag(w=tether.Param(jnp.ones(2)), n=1)),
        ],
    )
    def test_what_differs(self, other: Any):
        assert structure(other()) != structure(Bag(w=tether.Param(jnp.ones(2)), n=1))

    def test_ties_are_part_of_it(self):
        shared = nn.Linear(2, 2)
        tied, untied = Bag(a=shared, b=shared), Bag(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
        assert structure(tied) != structure(untied)
        assert (structure(tied).num_leaves, structure(untied).num_leaves) == (2, 4)

    def test_is_dropped_with_the_last_module(self):
        bag = Bag(unique_name=tether.Param(jnp.ones(2)), setting=object())
        gone = weakref.ref(bag._tether.structure)
        del bag
        gc.collect()
        assert gone() is None

    @pytest.mark.parametrize(
        "names", [["b", "a", "c"], [3, 1, 2], [Color.RED, Color.BLUE], ["a", 1, None], [(1, 2), (0, 5)]]
    )
    def test_dict_order_does_not_matter(self, names: list[Any]):
        items = list(enumerate(names))
        forth = Bag(d={k: tether.Param(jnp.full((), i)) for i, k in items})
        back = Bag(d={k: tether.Param(jnp.full((), i)) for i, k in reversed(items)})
        assert structure(forth) == structure(back)
        assert all(bool(a == b) for a, b in zip(jax.tree.leaves(forth), jax.tree.leaves(back), strict=True))
        assert {name: float(forth.d[name]) for name in names} == {name: i for i, name in items}

    @pytest.mark.parametrize(
        ("container", "paths"),
        [
            (lambda a, b: [a, b], ["c[0]", "c[1]"]),
            (lambda a, b: (a, [b]), ["c[0]", "c[1][0]"]),
            (lambda a, b: {"x": a, 3: b}, None),
            (lambda a, b: Point(a, b), ["c[0]", "c[1]"]),
            (lambda a, b: {"x": [a], "y": {"z": b}}, ["c['x'][0]", "c['y']['z']"]),
        ],
    )
    def test_containers(self, container: Any, paths: Any):
        bag = Bag(c=container(tether.Param(jnp.zeros(1)), tether.State(jnp.ones(1))))
        found = list(tether.variables(bag))
        assert found == paths or (paths is None and len(found) == 2)
        again = jax.tree.map(lambda x: x + 1, bag)
        assert type(again.c) is type(bag.c)
        assert sorted(float(x[0]) for x in jax.tree.leaves(again)) == [1, 2]

    def test_dataclass_container(self):
        @dataclasses.dataclass
        class Pair:
            a: Any
            b: Any

        bag = Bag(pair=Pair(tether.Param(jnp.zeros(2)), nn.Linear(2, 2)))
        assert list(tether.variables(bag)) == ["pair.a", "pair.b.weight", "pair.b.bias"]
        assert bag.pair.a.tolist() == [0, 0]
        again = jax.tree.map(lambda x: x + 1, bag)
        assert isinstance(again.pair, Pair) and again.pair.a.tolist() == [1, 1]

    def test_a_dict_attribute_is_a_tree_node(self):
        bag = Bag(ws={"b": tether.Param(jnp.ones(2)), "a": tether.Param(jnp.zeros(2))})
        assert [leaf.tolist() for leaf in jax.tree.leaves(bag.ws)] == [[0, 0], [1, 1]]
        assert jax.tree.map(lambda x: x + 1, bag.ws)["a"].tolist() == [1, 1]
        gradient = tether.grad(lambda ws: (ws["a"] * 3 + ws["b"]).sum())(bag.ws)
        assert gradient["a"].tolist() == [3, 3]

    def test_a_dict_attribute_is_dynamic_in_jit(self):
        bag = Bag(ws={"a": tether.Param(jnp.zeros(2))})
        f = tether.jit(lambda ws: ws["a"] * 2)
        f(bag.ws)
        bag.ws = {"a": jnp.ones(2)}
        assert f(bag.ws).tolist() == [2, 2]
        assert f.traces == 1

    def test_dicts_are_read_only(self):
        bag = Bag(d={"a": nn.Linear(2, 2)})
        attempts: list[Any] = [
            lambda: bag.d.update(b=1),
            lambda: bag.d.pop("a"),
            lambda: bag.d.clear(),
            lambda: bag.d.setdefault("b", 1),
            lambda: bag.d.__setitem__("a", 1),
            lambda: bag.d.__delitem__("a"),
            lambda: bag.d.popitem(),
            lambda: bag.d.__ior__({"b": 1}),
        ]
        for attempt in attempts:
            with pytest.raises(SealedError):
                attempt()
        assert list(bag.d) == ["a"]


@pytest.mark.parametrize(
    ("path", "name", "whole"),
    [("a", "b", "a.b"), ("", "b", "b"), ("a", "[0]", "a[0]"), ("a", "", "a"), ("", "[0]", "[0]")],
)
def test_joined(path: str, name: str, whole: str):
    assert joined(path, name) == whole


@pytest.mark.parametrize(
    ("path", "module", "inside"),
    [
        ("a.b", "a", True),
        ("a", "a", True),
        ("ab", "a", False),
        ("a[0]", "a", True),
        ("a", "", True),
        ("a", "a.b", False),
    ],
)
def test_is_below(path: str, module: str, inside: bool):
    assert is_below(path, module) is inside


# Random module trees with random ties. A plan is plain data: an int stands for a Variable of a pool, so that equal ints
# are ties; a pair ("module", name -> plan) for a Bag, ("again", i) for a module that was built before.

NAMES = st.sampled_from(["a", "b", "weight", "x1"])
LEAF = st.integers(0, 4)
SETTING = st.sampled_from([("setting", value) for value in (None, True, 2, 0.5, "relu", (1, 2))])


def _extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(st.just("module"), st.dictionaries(NAMES, inner, max_size=3)),
        st.tuples(st.just("list"), st.lists(inner, max_size=3)),
        st.tuples(st.just("dict"), st.dictionaries(st.sampled_from(["k", "l", "m"]), inner, max_size=3)),
        st.tuples(st.just("again"), st.integers(0, 3)),
    )


PLANS = st.dictionaries(NAMES, st.recursive(st.one_of(LEAF, SETTING), _extend, max_leaves=10), max_size=4)
POOL_KINDS = [tether.Param, tether.State, tether.Param, tether.Constant, tether.State]


class Builder:
    """Builds a plan; keeps what it made, so that plans can tie."""

    def __init__(self, *, backwards: bool = False):
        self.backwards = backwards
        self.pool: dict[int, Any] = {i: kind(jnp.full((i + 1,), float(i))) for i, kind in enumerate(POOL_KINDS)}
        self.modules: list[Any] = []
        self.used: dict[int, None] = {}

    def build(self, plan: dict[str, Any]) -> Bag:
        return Bag(**{name: self.part(part) for name, part in plan.items()})

    def part(self, plan: Any) -> Any:
        if isinstance(plan, int):
            self.used[plan] = None
            return self.pool[plan]
        tag, inner = plan
        if tag == "setting":
            return inner
        if tag == "again":
            return self.modules[inner] if inner < len(self.modules) else inner
        if tag == "list":
            return [self.part(item) for item in inner]
        if tag == "dict":
            made = {key: self.part(item) for key, item in sorted(inner.items())}
            return dict(reversed(made.items())) if self.backwards else made
        module = self.build(inner)
        self.modules.append(module)
        return module


def ties(module: Any) -> list[list[str]]:
    """Which places of a module are one Variable, found by writing: a write is seen at every tied place."""
    groups: dict[int, list[str]] = {}
    for path in module._tether.structure.places:
        groups.setdefault(id(tether.cell(module, path)), []).append(path)
    return sorted(sorted(group) for group in groups.values())


def assert_same(one: Any, other: Any) -> None:
    assert structure(one) == structure(other)
    assert list(tether.variables(one)) == list(tether.variables(other))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert ties(one) == ties(other)


COPIES = {
    "unflatten": lambda m: jax.tree.unflatten(*reversed(jax.tree.flatten(m))),
    "map": lambda m: jax.tree.map(lambda x: x, m),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "deepcopy": copy.deepcopy,
    "clone": tether.clone,
    "snapshot": tether.snapshot,
}


@hypothesis.settings(max_examples=100)
@hypothesis.given(PLANS)
def test_random_trees(plan: dict[str, Any]):
    builder = Builder()
    module = builder.build(plan)
    jax.tree.structure(module)
    # One leaf for each Variable that is in it, whatever the ties.
    assert sorted(leaf.shape[0] - 1 for leaf in jax.tree.leaves(module)) == sorted(builder.used)
    found = tether.variables(module)
    assert sorted(map(id, found.values())) == sorted(id(builder.pool[i]) for i in builder.used)
    # The order of a dict's entries means nothing.
    backwards = Builder(backwards=True).build(plan)
    assert structure(module) == structure(backwards) and list(found) == list(tether.variables(backwards))
    for name, copied in COPIES.items():
        other = copied(module)
        assert other is not module, name
        assert_same(module, other)
        assert not set(map(id, tether.variables(other).values())) & set(map(id, found.values())), name


@hypothesis.settings(max_examples=20)
@hypothesis.given(PLANS)
def test_a_write_to_a_copy_stays_in_it(plan: dict[str, Any]):
    module = Builder().build(plan)
    before = [leaf.tolist() for leaf in jax.tree.leaves(module)]
    for copied in COPIES.values():
        for variable in tether.variables(copied(module), ~tether.Constant).values():
            variable.value = variable.value + 1
    assert [leaf.tolist() for leaf in jax.tree.leaves(module)] == before


def test_keyed_paths_are_those_of_variables():
    shared = nn.Linear(2, 2)
    bag = Bag(a=shared, b=[shared, nn.BatchNorm(2)], c={"k": tether.State({"x": jnp.ones(1)})})
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(bag)[0]]
    assert [jax.tree_util.keystr(path) for path in keys] == [f".{path}" for path in tether.variables(bag)]


def test_leaves_may_be_anything():
    linear = nn.Linear(2, 3)
    masks = jax.tree.map(lambda x: x.ndim > 1, linear)
    assert (masks.weight, masks.bias) == (True, False)
    assert jax.tree.leaves(jax.tree.map(lambda x: None, linear)) == []
    assert structure(jax.tree.map(lambda x: "spec", linear)) == structure(linear)
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), linear)
    assert specs.weight.shape == (3, 2)
