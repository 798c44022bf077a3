# SPDX-License-Identifier: Apache-2.0
"""place: on devices and shardings, in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tether
from tether import nn
from tether.errors import SelectionError, TetherError


def devices(model: Any) -> set[Any]:
    return set().union(*(leaf.devices() for leaf in jax.tree.leaves(model)))


def test_moves_all_and_stays_there():
    model, there = nn.BatchNorm(2), jax.devices()[1]
    cell = tether.cell(model, "mean")
    tether.place(model, there)
    assert devices(model) == {there} and tether.cell(model, "mean") is cell
    for call in (model, tether.jit(model), tether.jit(model, donate_state=True)):
        for _ in range(2):
            out = call(jax.device_put(jnp.ones((3, 2)), there))
        assert devices(model) == {there} and out.devices() == {there}
    model.mean = jnp.zeros(2)
    assert devices(model) == {there}


def test_two_stages_on_two_devices():
    first, second = nn.Linear(2, 2), nn.BatchNorm(2)
    one, two = jax.devices()[1:3]
    tether.place(first, one)
    tether.place(second, two)
    x = first(jax.device_put(jnp.ones((3, 2)), one))
    second(jax.device_put(x, two))
    assert devices(first) == {one} and devices(second) == {two}


def test_selected_only():
    model, there = nn.BatchNorm(2), jax.devices()[1]
    tether.place(model, there, tether.State)
    assert model.mean.devices() == {there} and model.weight.devices() == {jax.devices()[0]}


def test_sharding():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    linear = nn.Linear(2, 4)
    tether.place(linear, sharding)
    assert linear.weight.sharding == sharding and linear.bias.sharding == sharding


def test_keys_and_ties():
    class Part(tether.Module):
        def __init__(self):
            self.rng = tether.Rng(0)
            self.a = nn.Linear(2, 2)
            self.b = self.a

    part, there = Part(), jax.devices()[1]
    tether.place(part, there)
    assert devices(part) == {there} and part.a is part.b


def test_views_move_too():
    model = nn.BatchNorm(2)
    view = model.eval()
    tether.place(view, jax.devices()[1])
    assert devices(model) == {jax.devices()[1]}


def test_refused():
    linear = nn.Linear(2, 2)
    with pytest.raises(SelectionError):
        tether.place(linear, jax.devices()[1], "nothing")
    with pytest.raises((TypeError, ValueError)):
        tether.place(linear, "there")
    with pytest.raises(TetherError):
        tether.place((linear, linear), jax.devices()[1])  # type: ignore[arg-type]
    assert devices(linear) == {jax.devices()[0]}
