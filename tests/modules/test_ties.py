# SPDX-License-Identifier: Apache-2.0
"""Ties (CASES 9 and 21): one Variable or Module in two places is one leaf, one gradient, and stays tied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tether
from tether import nn


class Held(tether.Module):
    """Holds whatever it is given."""

    def __init__(self, part: Any):
        self.part = part


class Square(tether.Module):
    def __init__(self):
        self.weight = tether.Param(jnp.asarray([[1.0, 2.0], [3.0, 4.0]]))


class Siblings(tether.Module):
    """O5."""

    def __init__(self):
        self.enc, self.dec = Square(), Square()
        self.dec.weight = tether.cell(self.enc, "weight")

    def __call__(self, x: Any) -> Any:
        return x @ self.enc.weight @ self.dec.weight


def test_one_leaf_one_gradient():
    model = Siblings()
    assert list(tether.variables(model)) == ["enc.weight"]
    assert len(jax.tree.leaves(model)) == 1
    gradient = tether.grad(lambda m: m(jnp.ones(2)).sum())(model)
    assert gradient.enc.weight.tolist() == gradient.dec.weight.tolist() == [[7, 11], [9, 13]]


@pytest.mark.parametrize(
    "copied",
    [
        lambda m: jax.tree.map(lambda x: x, m),
        copy.deepcopy,
        tether.clone,
        tether.snapshot,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: tether.filter(m, tether.Param),
        lambda m: tether.combine(*tether.partition(m, tether.Param)),
        lambda m: tether.jit(tether.clone)(m),
        lambda m: tether.index(tether.stack([m, m]), 1),
        lambda m: tether.replace(m, {"enc": m.enc}),
    ],
)
def test_stay_after(copied: Any):
    other = copied(Siblings())
    assert tether.cell(other, "enc.weight") is tether.cell(other, "dec.weight")
    other.enc.weight = jnp.zeros((2, 2))
    assert other.dec.weight.tolist() == [[0, 0], [0, 0]]
    assert len(jax.tree.leaves(other)) == 1


def test_shared_module_updates_one_statistic_in_order():
    """O2: one BatchNorm called on 2 then 4, decay 0.9."""
    norm = nn.BatchNorm(1, decay=0.9)
    model = Held([norm, norm])

    def twice(model: Any) -> Any:
        for layer, value in zip(model.part, (2.0, 4.0), strict=True):
            layer(jnp.full((4, 1), value))

    twice(model)
    assert float(norm.mean[0]) == pytest.approx(0.58)
    norm.mean = jnp.zeros(1)
    tether.jit(twice)(model)
    assert float(norm.mean[0]) == pytest.approx(0.58)
    assert model.part[0] is model.part[1]


def test_module_in_two_places_is_one():
    shared = nn.Linear(2, 2)
    model = Held({"a": shared, "b": [shared]})
    assert list(tether.modules(model)) == ["", "part['a']"]
    other = jax.tree.map(lambda x: x, model)
    assert other.part["a"] is other.part["b"][0]
    assert tether.cell(model, "part['b'][0].weight") is tether.cell(model, "part['a'].weight")


def test_untied_on_purpose():
    model = Siblings()
    untied = tether.replace(model, {"dec.weight": tether.Param(model.dec.weight)})
    assert list(tether.variables(untied)) == ["enc.weight", "dec.weight"]
    gradient = tether.grad(lambda m: m(jnp.ones(2)).sum())(untied)
    assert gradient.enc.weight.tolist() == [[3, 7], [3, 7]]
    assert gradient.dec.weight.tolist() == [[4, 4], [6, 6]]
