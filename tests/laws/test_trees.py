# SPDX-License-Identifier: Apache-2.0
"""Random trees of modules: every way to copy, take apart and put together keeps ties, paths, order, settings, values.

What must hold is worked out from the plan of a tree, in tests/laws/trees.py, without the library.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import tether
from tests.laws import trees
from tests.laws.trees import CHANGES, FILLED, PLANS, SETTINGS, Builder, Leaf, Mod, examples


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def raw(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


@functools.cache
def reader(path: str) -> Any:
    return compile(f"model{'.' if path[:1] not in ('', '.', '[') else ''}{path}", path, "eval")


def at(model: Any, path: str) -> Any:
    """What Python finds at a path: a path is an expression."""
    return eval(reader(path), {"model": model})


def planned_values(plan: Mod, builder: Builder) -> dict[str, Any]:
    """The value at every path."""
    return {path: builder.value(name) for path, name in trees.places(plan)}


def assert_values(model: Any, planned: dict[str, Any]) -> None:
    for path, value in planned.items():
        found = at(model, path)
        assert found.dtype == value.dtype, path
        np.testing.assert_array_equal(raw(found), raw(value), path)


def assert_paths_and_order(plan: Mod, model: Any) -> None:
    first = trees.first_places(trees.places(plan))
    found = tether.variables(model)
    assert list(found) == list(first.values())
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(model)[0]]
    assert keys == [(jax.tree_util.GetAttrKey(path),) for path in first.values()]
    assert list(tether.modules(model)) == list(trees.first_places(trees.module_places(plan)).values())
    for variable, name in zip(found.values(), first, strict=True):
        assert (type(variable), variable.reduce) == trees.declaration(name[0])


def assert_ties(plan: Mod, model: Any) -> None:
    """One Variable at two paths exactly where the plan says so; likewise modules."""
    pairs, modules = list(trees.places(plan)), list(trees.module_places(plan))
    assert trees.groups((path, id(tether.cell(model, path))) for path, _ in pairs) == trees.groups(pairs)
    assert trees.groups((path, id(at(model, path))) for path, _ in modules) == trees.groups(modules)


def assert_settings(plan: Any, found: Any) -> None:
    """Settings, classes, modes and lengths are those of the plan."""
    if isinstance(plan, Leaf):
        if plan.what == "setting":
            setting, found = (x.value if isinstance(x, tether.Static) else x for x in (SETTINGS[plan.number], found))
            assert type(found) is type(setting) or isinstance(setting, dict)
            assert repr(found) == repr(setting)  # tells 0.0 from -0.0, and a NaN is one
        return
    if isinstance(plan, Mod):
        assert (type(found), found._tether.training) == (plan.cls, plan.training)
    elif plan.kind != "record":
        assert len(found) == len(plan.parts)
    for step, part in trees.steps(plan, ""):
        assert_settings(part, at(found, step))


def assert_as_planned(plan: Mod, model: Any, planned: dict[str, Any]) -> None:
    assert_paths_and_order(plan, model)
    assert_ties(plan, model)
    assert_settings(plan, model)
    assert_values(model, planned)
    for leaf, path in zip(jax.tree.leaves(model), trees.first_places(trees.places(plan)).values(), strict=True):
        np.testing.assert_array_equal(raw(leaf), raw(planned[path]), path)


def zeros(model: Any) -> Any:
    return jax.tree.map(lambda x: x if is_key(x) else jnp.zeros_like(x), model)


def updated(model: Any, values: Any) -> Any:
    report = tether.update(model, values)
    assert report.updated == tuple(tether.variables(model)) and not report.missing and not report.unexpected
    return model


def one_by_one(model: Any) -> Any:
    """A copy of which every leaf is put there by tree_at."""
    new = zeros(model)
    for path, variable in tether.variables(model).items():
        new = tether.tree_at(lambda m, path=path: at(m, path), new, variable.value)
    return new


COPIES: dict[str, Callable[[Any], Any]] = {
    "unflatten": lambda m: jax.tree.unflatten(*reversed(jax.tree.flatten(m))),
    "tree map": lambda m: jax.tree.map(lambda x: x, m),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "deepcopy": copy.deepcopy,
    "clone": tether.clone,
    "snapshot": tether.snapshot,
    "clone in a container": lambda m: tether.clone({"a": [m], "b": m})["b"],
    "combine": lambda m: tether.combine(*tether.partition(m, tether.State)),
    "update": lambda m: updated(zeros(m), m),
    "update by path": lambda m: updated(zeros(m), {path: v.value for path, v in tether.variables(m).items()}),
    "bind": lambda m: tether.bind(zeros(m), m),
}


@hypothesis.settings(max_examples=examples(60))
@hypothesis.given(PLANS)
def test_every_copy_is_as_planned(plan: Mod):
    builder = Builder()
    model, planned = builder.build(plan), planned_values(plan, builder)
    assert_as_planned(plan, model, planned)
    originals = set(map(id, tether.variables(model).values()))
    for name, copied in COPIES.items():
        hypothesis.note(name)
        other = copied(model)
        assert_as_planned(plan, other, planned)
        assert jax.tree.structure(other) == jax.tree.structure(model)
        assert hash(jax.tree.structure(other)) == hash(jax.tree.structure(model))
        assert not originals & set(map(id, tether.variables(other).values()))


@hypothesis.settings(max_examples=examples(100))
@hypothesis.given(PLANS, st.one_of(st.sampled_from(sorted(CHANGES)).map(CHANGES.get), PLANS.map(lambda p: lambda _: p)))
def test_equal_exactly_where_the_plans_are(plan: Mod, change: Callable[[Mod], Mod]):
    """Structures by classes, settings, kinds and ties; trees by values, too. A dict's order and shapes mean nothing."""
    other = change(plan)
    one, two = Builder().build(plan), Builder(backwards=True).build(other)
    alike = trees.signature(plan) == trees.signature(other)
    assert (jax.tree.structure(one) == jax.tree.structure(two)) is alike
    if alike:
        assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(two))
        assert one._tether.structure is two._tether.structure
        jax.tree.map(lambda x, y: None, one, two)
    names = [list(trees.first_places(trees.places(p))) for p in (plan, other)]
    assert bool(tether.tree_equal(one, two)) is (alike and names[0] == names[1])


@hypothesis.settings(max_examples=examples(60))
@hypothesis.given(FILLED, st.data())
def test_views_share_and_survive_copies(plan: Mod, data: st.DataObject):
    """A frozen part, a part in a mode of its own, and the whole in another: all of it is there in every copy."""
    model = Builder().build(plan)
    paths = dict(trees.places(plan))
    modules = dict(trees.module_places(plan))
    frozen = data.draw(st.sampled_from(sorted(paths)), "frozen")
    explicit = data.draw(st.sampled_from([path for path in modules if path] or [None]), "explicit")
    view = tether.freeze(model, frozen)
    modes = dict.fromkeys(modules, False)
    if explicit is not None:
        view = tether.view(view, explicit, training=True)
        inside = {id(part) for path, part in trees.module_places(modules[explicit])}
        modes = {path: id(part) in inside for path, part in modules.items()}
    view = view.eval()
    trained = [
        path
        for name, path in trees.first_places(trees.places(plan)).items()
        if issubclass(trees.declaration(name[0])[0], tether.Param) and name != paths[frozen]
    ]
    for name, copied in {"itself": lambda m: m, **COPIES}.items():
        hypothesis.note(name)
        other = copied(view)
        assert list(tether.variables(other, tether.Param)) == trained
        assert {path: at(other, path).training for path in modules} == modes
        assert jax.tree.structure(other) == jax.tree.structure(view) != jax.tree.structure(model)
        assert_ties(plan, other)
    assert all(a is b for a, b in zip(tether.variables(view).values(), tether.variables(model).values(), strict=True))
    assert jax.tree.structure(view.train()) != jax.tree.structure(model)


@hypothesis.settings(max_examples=examples(20))
@hypothesis.given(FILLED, st.integers(1, 2))
def test_stacked(plan: Mod, size: int):
    """Stack and unstack are inverse; a stacked module is copied as every module is."""
    builders = [Builder(offset=100 * i) for i in range(size)]
    members = [builder.build(plan) for builder in builders]
    values = [planned_values(plan, builder) for builder in builders]
    stacked = tether.stack(members)
    assert jax.tree.structure(stacked) != jax.tree.structure(members[0])
    for name in ("tree map", "pickle", "clone", "update"):
        hypothesis.note(name)
        other = COPIES[name](stacked)
        assert jax.tree.structure(other) == jax.tree.structure(stacked)
        assert_ties(plan, other)
        for path in values[0]:
            np.testing.assert_array_equal(raw(at(other, path)), np.stack([raw(v[path]) for v in values]), path)
    for member, planned in zip(tether.unstack(stacked), values, strict=True):
        assert_as_planned(plan, member, planned)
        assert jax.tree.structure(member) == jax.tree.structure(members[0])
    tether.set_index(stacked, size - 1, members[0])
    assert_values(tether.index(stacked, -1), values[0])


@hypothesis.settings(max_examples=examples(60))
@hypothesis.given(FILLED, st.data())
def test_bind_and_update_by_any_path(plan: Mod, data: st.DataObject):
    """Values for some cells, each under one of its paths: they are seen at all its paths, and the rest is shared."""
    here, there = Builder(), Builder(offset=50)
    model, paths = here.build(plan), dict(trees.places(plan))
    chosen = data.draw(st.lists(st.sampled_from(sorted(paths)), unique_by=lambda path: paths[path]), "chosen")
    given = {path: there.value(paths[path]) for path in chosen}
    names = {paths[path] for path in chosen}
    mixed = {path: (there if name in names else here).value(name) for path, name in paths.items()}
    bound = tether.bind(model, given)
    assert_as_planned(plan, bound, mixed)
    assert jax.tree.structure(bound) == jax.tree.structure(model)
    for path, name in paths.items():
        assert (tether.cell(bound, path) is tether.cell(model, path)) is (name not in names)
    assert_values(model, planned_values(plan, here))
    first = trees.first_places(trees.places(plan))
    shaped = jax.tree.unflatten(
        jax.tree.structure(model), [there.value(name) if name in names else None for name in first]
    )
    for values in (given, shaped):
        other = tether.clone(model)
        report = tether.update(other, values)
        assert set(report.updated) == {first[name] for name in names}
        assert set(report.missing) == set(first.values()) - set(report.updated)
        assert_as_planned(plan, other, mixed)


@hypothesis.settings(max_examples=examples(40))
@hypothesis.given(FILLED, st.sampled_from([tether.Param, tether.State, trees.Adapter, tether.Rng, ~tether.Param]))
def test_filter_by_kind_and_bind_back(plan: Mod, select: Any):
    """The chosen leaves of one model in another of its structure: those of the first, the rest of the second."""
    here, there = Builder(), Builder(offset=50)
    one, two = here.build(plan), there.build(plan)
    kind = select if isinstance(select, type) else tether.Param
    takes = lambda name: issubclass(trees.declaration(name[0])[0], kind) is isinstance(select, type)
    mixed = {path: (here if takes(name) else there).value(name) for path, name in trees.places(plan)}
    part = tether.filter(one, select)
    assert len(jax.tree.leaves(part)) == sum(map(takes, trees.first_places(trees.places(plan))))
    assert_as_planned(plan, tether.bind(two, part), mixed)
    assert_as_planned(plan, tether.combine(part, two), mixed)


@hypothesis.settings(max_examples=examples(30))
@hypothesis.given(FILLED)
def test_tree_map_is_a_functor(plan: Mod):
    """The identity maps to itself (above), a composition to the composition, and a leaf may become anything."""
    model = Builder().build(plan)
    f, g = lambda x: x.shape, lambda shape: len(shape)
    once, twice = jax.tree.map(lambda x: g(f(x)), model), jax.tree.map(f, model)
    assert jax.tree.leaves(once) == [x.ndim for x in jax.tree.leaves(model)]
    for path, name in trees.places(plan):
        assert at(once, path) == g(at(twice, path)) == np.ndim(Builder().value(name))
    nothing = jax.tree.map(lambda x: None, model)
    assert jax.tree.leaves(nothing) == []
    assert_ties(plan, nothing)


@hypothesis.settings(max_examples=examples(5))
@hypothesis.given(FILLED, st.sampled_from(sorted(CHANGES)))
def test_equal_structures_share_one_compilation(plan: Mod, name: str):
    """Ten models of two plans, also views of them: as many traces as there are structures."""
    plans = [plan, CHANGES[name](plan)]
    builders = [Builder(offset=i, backwards=i % 2 == 1) for i in range(10)]
    models = [builder.build(plans[i % 2]) for i, builder in enumerate(builders)]
    values = [builder.value((plans[i % 2].parts["own"], 0)).tolist() for i, builder in enumerate(builders)]
    runs: list[int] = []

    @tether.jit
    def f(model: Any) -> Any:
        runs.append(1)
        return model.own

    for i, model in enumerate([*models, *(model.eval() for model in models), *models]):
        assert f(model).tolist() == values[i % 10]
    assert f.traces == len(runs) == 2 * len(set(map(trees.signature, plans)))
