# SPDX-License-Identifier: Apache-2.0
"""replace and map_modules: other parts, all the rest shared."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tether
from tether import nn
from tether.errors import SelectionError, StructureError


class Net(tether.Module):
    def __init__(self):
        self.norm = nn.BatchNorm(2)
        self.also = self.norm
        self.blocks = {"a": [nn.Linear(2, 2), self.norm]}
        self.cache = tether.State({"k": jnp.zeros(2), "v": [jnp.zeros(1)]})


class Outer(tether.Module):
    def __init__(self):
        self.net = Net()


def others(new: Any, old: Any, *changed: str) -> None:
    for path, variable in tether.variables(old).items():
        if not path.startswith(changed):
            assert tether.cell(new, path) is variable, path


@pytest.mark.parametrize("path", ["blocks['a'][0]", "blocks['a'][0].weight", "cache['v'][0]", "cache['k']"])
def test_replaced_part_alone_differs(path: str):
    net = Net()
    is_module = path.endswith("[0]") and path.startswith("blocks")
    part: Any = nn.Linear(2, 2) if is_module else tether.State(jnp.ones(2))
    new = tether.replace(net, {path: part})
    others(new, net, path)
    if is_module:
        assert tether.modules(new)[path] is part
    else:
        assert tether.cell(new, path) is part
        assert tether.cell(net, path) is not part


def test_cell_of_a_pytree_in_a_submodule_of_something():
    net = Outer().net  # its Variables carry paths that begin at the outer module
    new = tether.replace(net, {"cache['k']": tether.State(jnp.ones(2))})
    assert new.cache["k"].tolist() == [1, 1] and net.cache["k"].tolist() == [0, 0]


def test_shared_module_keeps_its_tie_and_changes_by_any_place():
    for place in ("norm", "also", "blocks['a'][1]"):
        net = Net()
        new = tether.replace(net, {f"{place}.mean": tether.State(jnp.ones(2))})
        assert new.norm is new.also is new.blocks["a"][1]
        assert new.norm.mean.tolist() == [1, 1] and net.norm.mean.tolist() == [0, 0]


def test_a_part_at_one_place_unties_that_place():
    net = Net()
    new = tether.replace(net, {"also": nn.LayerNorm(2)})
    assert isinstance(new.also, nn.LayerNorm) and new.norm is new.blocks["a"][1]


def test_tied_and_untied():
    model = nn.Sequential([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied = tether.replace(model, {"[1].weight": tether.cell(model, "[0].weight")})
    assert list(tether.variables(tied)) == ["[0].weight", "[0].bias", "[1].bias"]
    untied = tether.replace(tied, {"[1].weight": tether.Param(jnp.zeros((2, 2)))})
    assert list(tether.variables(untied)) == list(tether.variables(model))


def test_works_and_is_sealed():
    model = nn.Sequential([nn.Linear(2, 3), nn.Linear(3, 1)])
    new = tether.replace(model, {"[1]": nn.Linear(3, 5)})
    assert new(jnp.ones(2)).shape == (5,)
    assert tether.jit(lambda m: m(jnp.ones(2)))(new).shape == (5,)
    assert jax.tree.structure(new) == jax.tree.structure(nn.Sequential([nn.Linear(2, 3), nn.Linear(3, 5)]))


def test_dataclass_container():
    @dataclasses.dataclass(frozen=True)
    class Pair:
        a: Any
        b: Any

    class Holder(tether.Module):
        def __init__(self):
            self.pair = Pair(nn.Linear(2, 2), tether.Param(1.0))

    holder = Holder()
    new = tether.replace(holder, {"pair.b": tether.Param(2.0)})
    assert (float(new.pair.b), float(holder.pair.b)) == (2, 1)
    assert new.pair.a.weight is holder.pair.a.weight


def test_modes_and_frozen_parts_stay():
    model = tether.freeze(nn.Sequential([nn.Linear(2, 2), nn.Linear(2, 2)]).eval(), "[0]")
    new = tether.replace(model, {"[1]": nn.LayerNorm(2)})
    assert new.training is False
    assert list(tether.variables(new, tether.Param)) == ["[1].weight", "[1].bias"]


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"nothing": nn.Linear(2, 2)}, SelectionError),
        ({"blocks": nn.Linear(2, 2)}, SelectionError),
        ({"norm.eps": tether.State(1.0)}, SelectionError),
        ({"norm": nn.LayerNorm(2), "norm.mean": tether.State(jnp.ones(2))}, SelectionError),
        ({"norm": 3}, StructureError),
        ({"norm.mean": jnp.ones(2)}, StructureError),
        ({"norm": tether.State(1.0)}, StructureError),
        ({"norm.mean": nn.Linear(2, 2)}, StructureError),
    ],
)
def test_refused(parts: Any, error: type[Exception]):
    net = Net()
    with pytest.raises(error):
        tether.replace(net, parts)
    assert len(tether.variables(net)) == 8


class TestMapModules:
    def test_each_module_of_a_class(self):
        model = nn.Sequential([nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential([nn.Dropout(0.1)])])
        new = tether.map_modules(lambda dropout: nn.Dropout(dropout.p / 2), model, nn.Dropout)
        assert [part.p for part in tether.modules(new, nn.Dropout).values()] == [0.25, 0.05]
        assert tether.cell(new, "[0].weight") is tether.cell(model, "[0].weight")

    def test_a_shared_module_is_mapped_once_in_all_its_places(self):
        calls: list[Any] = []

        def fn(norm: Any) -> Any:
            calls.append(norm)
            return nn.LayerNorm(2)

        new = tether.map_modules(fn, Net(), nn.BatchNorm)
        assert len(calls) == 1
        assert isinstance(new.norm, nn.LayerNorm)
        assert new.norm is new.also is new.blocks["a"][1]

    def test_outer_ones_are_left_to_fn(self):
        class Holder(tether.Module):
            def __init__(self):
                self.part = nn.Sequential([nn.Sequential([nn.Linear(2, 2)])])

        model = Holder()
        seen: list[Any] = []
        tether.map_modules(lambda m: seen.append(m) or m, model, nn.Sequential)
        assert seen == [model.part]

    def test_root_and_none(self):
        linear = nn.Linear(2, 2)
        assert isinstance(tether.map_modules(lambda m: nn.LayerNorm(2), linear, nn.Linear), nn.LayerNorm)
        assert tether.map_modules(lambda m: 1 / 0, linear, nn.Dropout) is linear
