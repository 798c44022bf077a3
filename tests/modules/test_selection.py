# SPDX-License-Identifier: Apache-2.0
"""The selection grammar: each form, their combinations, and what names nothing."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import tether
from tether import nn
from tether._modules import is_selection, matches
from tether.errors import SelectionError


class Adapter(tether.Param):
    __slots__ = ()


class Block(tether.Module):
    def __init__(self):
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm(2)
        self.adapter = Adapter(jnp.zeros(2))


class Model(tether.Module):
    def __init__(self):
        self.blocks = [Block(), Block()]
        self.head = nn.Linear(2, 2)
        self.head.weight = tether.cell(self.blocks[0].linear, "weight")
        self.table = {"a": tether.Constant(jnp.ones(1))}
        self.rng = tether.Rng(0)


MODEL = Model()
ALL = [
    "blocks[0].linear.weight",
    "blocks[0].linear.bias",
    "blocks[0].norm.weight",
    "blocks[0].norm.bias",
    "blocks[0].norm.mean",
    "blocks[0].norm.var",
    "blocks[0].adapter",
    "blocks[1].linear.weight",
    "blocks[1].linear.bias",
    "blocks[1].norm.weight",
    "blocks[1].norm.bias",
    "blocks[1].norm.mean",
    "blocks[1].norm.var",
    "blocks[1].adapter",
    "head.bias",
    "table['a']",
    "rng",
]
STATS = [path for path in ALL if path.endswith(("mean", "var"))]
ADAPTERS = ["blocks[0].adapter", "blocks[1].adapter"]


def but(*paths: str) -> list[str]:
    return [path for path in ALL if path not in paths]


PARAMS = but(*STATS, "table['a']", "rng")


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (tether.Variable, ALL),
        (tether.State, STATS),
        (tether.Param, PARAMS),
        (Adapter, ADAPTERS),
        (tether.Rng, ["rng"]),
        (tether.Constant, ["table['a']"]),
        (~tether.Param, [*STATS, "table['a']", "rng"]),
        (~~tether.Param, PARAMS),
        ([tether.State, tether.Rng], [*STATS, "rng"]),
        (~tether.where(lambda path, _: path != "rng"), ["rng"]),
        ("rng", ["rng"]),
        ("blocks[1].linear", ["blocks[1].linear.weight", "blocks[1].linear.bias"]),
        ("blocks[?].adapter", ADAPTERS),
        ("*.mean", ["blocks[0].norm.mean", "blocks[1].norm.mean"]),
        ("head", ["blocks[0].linear.weight", "head.bias"]),
        ("head.weight", ["blocks[0].linear.weight"]),
        ("table['a']", ["table['a']"]),
        ("*", ALL),
        (nn.BatchNorm, [path for path in ALL if ".norm." in path]),
        (Block, [path for path in ALL if path.startswith("blocks")]),
        (Model, ALL),
        (MODEL.head, ["blocks[0].linear.weight", "head.bias"]),
        (tether.cell(MODEL, "head.bias"), ["head.bias"]),
        (tether.where(lambda path, variable: variable.value.ndim == 0), ["rng"]),
        (["rng", MODEL.head, Adapter], ["blocks[0].linear.weight", *ADAPTERS, "head.bias", "rng"]),
        (~nn.BatchNorm, [path for path in ALL if ".norm." not in path]),
        ([], []),
        ({"rng", "head.bias"}, ["head.bias", "rng"]),
        (tether.State | tether.Rng if hasattr(type, "__or__") else tether.State, [*STATS, "rng"]),
    ],
)
def test_what_is_selected(select: Any, expected: list[str]):
    # A module class selects by the modules that the *first* place of a Variable lies in; order is that of the leaves.
    found = list(tether.variables(MODEL, select))
    assert found == [path for path in ALL if path in expected]
    assert set(matches(select, MODEL)) == {tether.cell(MODEL, path) for path in expected}


def test_a_class_selects_by_every_place_of_a_tied_cell():
    class Special(nn.Linear):
        pass

    class Tied(tether.Module):
        def __init__(self):
            self.first = nn.Linear(2, 2)
            self.second = Special(2, 2)
            self.second.weight = tether.cell(self.first, "weight")

    assert list(tether.variables(Tied(), Special)) == ["first.weight", "second.bias"]


@pytest.mark.parametrize("select", ["nothing", "blocks[2]", "blocks[0].linear.wieght", "*.nothing", "", "head."])
def test_path_that_names_nothing(select: str):
    with pytest.raises(SelectionError) as caught:
        matches(select, MODEL)
    assert caught.value.got == repr(select)


def test_error_offers_what_looks_alike():
    with pytest.raises(SelectionError, match="'head.bias'"):
        tether.variables(MODEL, "head.bais")


@pytest.mark.parametrize("select", [3, None, int, object(), lambda x: True, [3], ["rng", 3]])
def test_no_selection(select: Any):
    with pytest.raises(SelectionError):
        matches(select, MODEL)


def test_kind_or_class_without_any_is_empty():
    assert matches(nn.Dropout, MODEL) == ()
    assert matches(tether.Rng, nn.Linear(2, 2)) == ()


def test_frozen_cells_are_no_params_but_keep_their_subclass_and_path():
    frozen = tether.freeze(MODEL, "blocks[0]")
    assert not any(path.startswith("blocks[0]") for path in tether.variables(frozen, tether.Param))
    assert list(tether.variables(frozen, "blocks[0].linear.bias")) == ["blocks[0].linear.bias"]
    assert list(tether.variables(frozen, tether.Variable)) == ALL


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (tether.Param, True),
        (Adapter, True),
        (nn.Linear, True),
        ("a.b", True),
        (MODEL, True),
        (tether.cell(MODEL, "rng"), True),
        (tether.where(lambda p, v: True), True),
        (~tether.Param, True),
        ([tether.Param, "a"], True),
        (tether.is_inexact_array, False),
        (lambda x: True, False),
        (True, False),
        ([True, False], False),
        ([], False),
        (int, False),
        (None, False),
    ],
)
def test_is_selection(value: Any, expected: bool):
    assert is_selection(value) is expected


class TestVariables:
    def test_of_containers(self):
        a, b = nn.Linear(1, 1), tether.State(1.0)
        assert list(tether.variables([a, b])) == ["[0].weight", "[0].bias", "[1]"]
        assert list(tether.variables({"m": nn.Sequential([a])})) == ["['m'][0].weight", "['m'][0].bias"]
        assert list(tether.variables((a, a))) == ["[0].weight", "[0].bias"]
        assert list(tether.variables([a, b], tether.Param)) == ["[0].weight", "[0].bias"]

    def test_of_nothing(self):
        for value in (3, None, jnp.ones(2), "a"):
            with pytest.raises(SelectionError):
                tether.variables(value)

    def test_cell(self):
        assert tether.cell(MODEL, "head.weight") is tether.cell(MODEL, "blocks[0].linear.weight")
        for path in ("head", "nothing", "", "*"):
            with pytest.raises(SelectionError):
                tether.cell(MODEL, path)

    def test_modules(self):
        found = tether.modules(MODEL)
        assert list(found)[:3] == ["", "blocks[0]", "blocks[0].linear"] and found[""] is MODEL
        assert list(tether.modules(MODEL, nn.BatchNorm)) == ["blocks[0].norm", "blocks[1].norm"]
        assert tether.modules(MODEL, (nn.BatchNorm, Block))["blocks[0]"] is MODEL.blocks[0]
        assert tether.modules(MODEL, nn.Dropout) == {}

    def test_what_no_call_reaches_is_listed(self):
        assert "blocks[1].adapter" in tether.variables(MODEL)
