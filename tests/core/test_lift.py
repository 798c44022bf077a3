# SPDX-License-Identifier: Apache-2.0
"""The lift: results as flat leaves, modules that come back as themselves, written values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tether
from tether import nn
from tether._core import frame
from tether._core.lift import Kept, Lifted, Packed, unpack


def test_packed_and_unpacked():
    out = {"a": jnp.ones(2), "b": (1, [None, jnp.zeros(())])}
    packed = Packed(out, birth=next(frame.births))
    leaves = packed.take()
    assert packed.count == 3 and packed.take() == []
    again = unpack(packed, [leaf * 2 for leaf in leaves])
    assert again["a"].tolist() == [2, 2] and again["b"] == (2, [None, 0])


def test_an_older_module_is_kept_and_a_younger_one_carried():
    old = nn.Linear(2, 2)
    birth = next(frame.births)
    young = nn.Linear(2, 2)
    packed = Packed((old, young), birth)
    assert packed.has_kept and packed.count == 2
    kept, carried = unpack(packed, packed.take())
    assert kept is old and carried is not young
    assert carried.weight is young.weight


def test_kept_compares_by_place_or_by_object():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert Kept((0, 1)) == Kept((0, 1)) and hash(Kept((0, 1))) == hash(Kept((0, 1)))
    assert Kept((0, 1)) != Kept((1, 0))
    assert Kept(module) == Kept(module) and Kept(module) != Kept(other)


def test_lifted_runs_once_and_writes_back_outside():
    state = tether.State(1.0)
    runs: list[int] = []

    def fun(x: Any) -> Any:
        runs.append(1)
        state.value = state.value + x
        return state.value * 2

    lifted = Lifted("test", fun)
    leaves, new = lifted.inside({}, 2.0)
    assert float(state.value) == 1 and lifted.written == [state]
    assert float(lifted.outside(leaves, new)) == 6
    assert float(state.value) == 3 and len(runs) == 1


def test_lifted_values_are_seen_inside_alone():
    state = tether.State(1.0)
    lifted = Lifted("test", lambda: state.value)
    leaves, new = lifted.inside({state: jnp.asarray(5.0)})
    assert float(lifted.outside(leaves, new)) == 5 and float(state.value) == 1


TRANSFORMED = {
    "jit": tether.jit,
    "checkpoint": tether.checkpoint,
    "vmap": lambda f: tether.vmap(f, in_axes=(None, 0), out_axes=(None, 0)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("by", ["argument", "part", "view", "closure"])
def test_a_module_that_is_returned_is_the_same_object(name: str, by: str):
    model = nn.Sequential([nn.Linear(2, 2), nn.Dropout(0.5)])
    view = model.eval()
    chosen = {
        "argument": (lambda m: m, model),
        "part": (lambda m: m[0], model[0]),
        "view": (lambda m: view, view),
        "closure": (lambda m: model, model),
    }
    choose, expected = chosen[by]
    f = TRANSFORMED[name](lambda m, x: (choose(m), x * 2))
    for _ in range(2):
        module, out = f(model, jnp.ones(3))
        assert module is expected
        assert out.tolist() == [2, 2, 2]


def test_a_kept_module_of_another_equal_model_is_its_own():
    step = tether.jit(lambda m: (m[1], m[0].weight.sum()))
    models = [nn.Sequential([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(3)]
    for model in models:
        part, total = step(model)
        assert part is model[1]
        assert float(total) == pytest.approx(float(model[0].weight.sum()), rel=1e-5)
    assert step.traces == 1


def test_writes_of_a_nested_lift_reach_the_outside_once():
    state = tether.State(0)

    def count(x: Any) -> Any:
        state.value = state.value + 1
        return x * x

    nested = tether.jit(tether.grad(tether.checkpoint(tether.jit(count))))
    for calls in (1, 2, 3):
        assert float(nested(3.0)) == 6
        assert int(state.value) == calls


def test_leaves_are_given_up():
    with jax.checking_leaks():
        tether.jit(lambda x: {"a": x, "b": nn.LayerNorm(2)})(jnp.ones(2))
