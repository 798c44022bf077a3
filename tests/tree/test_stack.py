# SPDX-License-Identifier: Apache-2.0
"""Stacked modules: the members go in and come out; oracle is NumPy's stack."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, StackedError, StructureError


def members() -> list[Any]:
    return [nn.Linear(2, 3, key=jax.random.key(i)) for i in range(3)]


def test_leaves_have_an_axis_in_front():
    ms = members()
    stacked = tether.stack(ms)
    np.testing.assert_array_equal(stacked.weight, np.stack([m.weight for m in ms]))
    assert jax.tree.structure(stacked) != jax.tree.structure(ms[0])
    ms[0].bias = jnp.full(3, 9.0)
    assert not (stacked.bias == 9).any()


@pytest.mark.parametrize("place", [0, 2, -1, np.int64(1), jnp.asarray(1)])
def test_index(place: Any):
    ms = members()
    member = tether.index(tether.stack(ms), place)
    np.testing.assert_array_equal(member.weight, ms[int(place)].weight)
    assert jax.tree.structure(member) == jax.tree.structure(ms[0])
    assert member(jnp.ones(2)).shape == (3,)


def test_unstack_gives_the_members_back():
    ms = members()
    for member, again in zip(ms, tether.unstack(tether.stack(ms)), strict=True):
        np.testing.assert_array_equal(member.weight, again.weight)


def test_set_index_writes_one_member_in_place():
    stacked = tether.stack(members())
    before = np.asarray(stacked.weight)
    new = nn.Linear(2, 3, key=jax.random.key(9))
    tether.set_index(stacked, -2, new)
    np.testing.assert_array_equal(stacked.weight[1], new.weight)
    np.testing.assert_array_equal(np.asarray(stacked.weight)[[0, 2]], before[[0, 2]])


def test_keys_ties_and_states():
    class Part(tether.Module):
        def __init__(self, seed: int):
            self.rng = tether.Rng(seed)
            self.a = nn.BatchNorm(2)
            self.b = self.a

    stacked = tether.stack([Part(0), Part(1)])
    assert len(jax.tree.leaves(stacked)) == 5
    assert stacked.rng.shape == (2,)
    assert (tether.index(stacked, 1).rng == jax.random.key(1)).all()
    assert tether.index(stacked, 0).a is not None and len(jax.tree.leaves(tether.index(stacked, 0))) == 5


def test_stacks_of_stacks():
    two = tether.stack([tether.stack(members()), tether.stack(members())])
    assert two.weight.shape == (2, 3, 3, 2)
    assert tether.index(tether.index(two, 1), 2)(jnp.ones(2)).shape == (3,)


def test_vmap_maps_over_the_members():
    ms = members()
    x = np.ones(2, np.float32)
    out = tether.vmap(lambda m, x: m(x), in_axes=(0, None))(tether.stack(ms), x)
    np.testing.assert_allclose(out, np.stack([x @ np.asarray(m.weight).T + np.asarray(m.bias) for m in ms]), rtol=1e-5)


def test_inside_jit_with_a_traced_place():
    ms = members()
    stacked = tether.stack(ms)
    f = tether.jit(lambda m, i: tether.index(m, i).bias)
    np.testing.assert_array_equal(f(stacked, 2), ms[2].bias)
    np.testing.assert_array_equal(f(stacked, 1), ms[1].bias)
    assert f.traces == 1


@pytest.mark.parametrize(
    "different",
    [
        list,
        lambda: [nn.Linear(2, 3), nn.LayerNorm(2)],
        lambda: [nn.Linear(2, 3), nn.Linear(2, 3, use_bias=False)],
        lambda: [nn.LayerNorm(2), nn.LayerNorm(3)],
        lambda: [nn.Dropout(0.1), nn.Dropout(0.2)],
        lambda: [nn.BatchNorm(2), nn.BatchNorm(2).eval()],
        lambda: [nn.Linear(2, 2), jax.tree.map(lambda x: x.astype(jnp.bfloat16), nn.Linear(2, 2))],
    ],
)
def test_what_differs_is_refused(different: Any):
    with pytest.raises(StructureError, match="stack:"):
        tether.stack(different())


@pytest.mark.parametrize("place", [3, -4, 1.0, "a", None])
def test_no_such_member(place: Any):
    stacked = tether.stack(members())
    with pytest.raises(ArgumentError, match="no such member"):
        tether.index(stacked, place)
    with pytest.raises(ArgumentError, match="no such member"):
        tether.set_index(stacked, place, members()[0])


def test_not_stacked():
    for use in (lambda m: tether.index(m, 0), tether.unstack, lambda m: tether.set_index(m, 0, m)):
        with pytest.raises(StackedError, match="isn't stacked"):
            use(members()[0])


def test_a_member_that_does_not_fit_changes_nothing():
    stacked = tether.stack(members())
    before = np.asarray(stacked.weight)
    with pytest.raises(StructureError):
        tether.set_index(stacked, 0, nn.Linear(3, 3))
    np.testing.assert_array_equal(stacked.weight, before)
