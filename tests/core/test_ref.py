# SPDX-License-Identifier: Apache-2.0
"""Variables that live in a jax.Ref: every access goes through it, and nothing else is slowed down."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether._core import ref
from tether.errors import PlainTransformError


class Net(tether.Module):
    def __init__(self):
        self.w = tether.Param(jnp.asarray([1.0, 2.0]))
        self.s = tether.State(jnp.zeros(2))

    def __call__(self, x: Any) -> Any:
        self.s = self.s + x
        return self.w * self.s


@pytest.fixture
def net() -> Net:
    """Both cells live in Refs, which a compiled function of JAX's holds."""
    net = Net()
    jax.jit(net)(jnp.ones(2))
    return net


def moved(net: Any) -> list[bool]:
    return [ref.holds(variable) for variable in tether.variables(net).values()]


def test_says_where(net: Net):
    assert moved(net) == [True, True]
    places = [ref.where(variable) for variable in tether.variables(net).values()]
    assert all(place is not None and place.startswith(f"{__file__}:") for place in places)
    assert ref.where(tether.State(0.0)) is None
    count = len(ref.moved)
    del net
    gc.collect()
    assert len(ref.moved) <= count


def test_an_array_that_was_read_before_stays():
    net = Net()
    before = net.s
    jax.jit(net)(jnp.ones(2))
    assert before.tolist() == [0, 0] and net.s.tolist() == [1, 1]
    again = net.s
    jax.jit(net)(jnp.ones(2))
    assert again.tolist() == [1, 1] and net.s.tolist() == [2, 2]


def test_reads_writes_and_trees(net: Net):
    assert isinstance(net.s, jax.Array) and net.s.tolist() == [1, 1]
    net.s = [5.0, 6.0]  # type: ignore[assignment]
    assert [leaf.tolist() for leaf in jax.tree.leaves(net)] == [[1, 2], [5, 6]]
    tether.update(net, {"s": jnp.zeros(2), "w": jnp.ones(2)})
    assert net.s.tolist() == [0, 0] and moved(net) == [True, True]
    assert repr(tether.cell(net, "s")) == "State(float32[2], s)"
    with pytest.raises(tether.errors.ShapeError):
        net.s = jnp.ones(3)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        tether.clone,
        tether.snapshot,
        lambda net: jax.tree.map(lambda x: x, net),
        lambda net: pickle.loads(pickle.dumps(net)),
    ],
    ids=["deepcopy", "clone", "snapshot", "tree.map", "pickle"],
)
def test_copies_have_arrays_of_their_own(net: Net, copied: Any):
    other = copied(net)
    assert moved(other) == [False, False]
    net.s = jnp.full(2, 9.0)
    assert other.s.tolist() == [1, 1]


@pytest.mark.parametrize("donate", [False, True])
def test_under_tether_jit(net: Net, donate: bool):
    @tether.jit(donate_state=donate)
    def step(net: Any, x: Any) -> Any:
        return net(x)

    for calls in (2, 3, 4):
        assert step(net, jnp.ones(2)).tolist() == [calls, 2 * calls]
        assert net.s.tolist() == [calls, calls]
    assert step.traces == 1 and moved(net) == [True, True]
    plain = Net()
    assert step(plain, jnp.ones(2)).tolist() == [1, 2] and moved(plain) == [False, False] and step.traces == 1


def test_programs_of_tether_jit_are_shared_in_and_out_of_frames(net: Net):
    other = Net()
    inner = tether.jit(other)
    outer = tether.jit(lambda x: inner(x) + inner(x))
    assert outer(jnp.ones(2)).tolist() == [3, 6] and inner(jnp.ones(2)).tolist() == [3, 6]
    assert (inner.traces, outer.traces) == (1, 1) and moved(net) == [True, True] and moved(other) == [False, False]


def test_under_other_transformations(net: Net):
    grads = tether.grad(lambda net: net(jnp.ones(2)).sum())(net)
    assert grads.w.tolist() == [2, 2] and net.s.tolist() == [2, 2]
    assert tether.vmap(lambda i: net(jnp.ones(2)) * i)(jnp.arange(3.0)).shape == (3, 2) and net.s.tolist() == [3, 3]
    assert tether.checkpoint(net)(jnp.ones(2)).tolist() == [4, 8] and net.s.tolist() == [4, 4]


@pytest.mark.parametrize(
    "inner",
    [tether.jit, tether.checkpoint, lambda f: tether.vmap(f, in_axes=None, axis_size=2)],
    ids=["jit", "checkpoint", "vmap"],
)
def test_tether_inside_plain_jit(inner: Any):
    net = Net()
    step = jax.jit(lambda x: inner(net)(x))
    for calls in (1, 2, 3):
        assert step(jnp.ones(2)).reshape(-1, 2)[0].tolist() == [calls, 2 * calls]
        assert net.s.tolist() == [calls, calls]


def test_takes_no_value_with_a_tangent(net: Net):
    def f(x: Any) -> Any:
        net.s = net.s * x
        return x

    with pytest.raises(PlainTransformError, match=r"(?s)tangent.*s  \(State\).*test_ref\.py"):
        jax.grad(f)(2.0)
    assert net.s.tolist() == [1, 1]
    assert float(tether.grad(f)(2.0)) == 1 and net.s.tolist() == [2, 2]


def test_a_cell_with_no_array_yet_is_refused():
    holder = tether.eval_shape(Net)
    with pytest.raises(PlainTransformError, match="holds no array"):
        jax.jit(lambda: holder.w or 0.0)()


def test_a_cell_of_none_is_read_and_not_written_then():
    """As the other half of a partition has them; a trace that read None must not be found when it is no longer so."""
    net = Net()
    arrays, rest = tether.partition(net, tether.is_array)
    f = jax.jit(lambda arrays: tether.combine(arrays, rest).w * 2)
    assert f(arrays).tolist() == (2 * net.w).tolist()
    with pytest.raises(PlainTransformError, match="is written after"):
        rest.w = net.w
    assert rest.w is None and moved(net) == moved(rest) == [False, False]


def test_a_refused_access_moves_nothing():
    net = Net()
    with pytest.raises(PlainTransformError):
        jax.checkpoint(net)(jnp.ones(2))
    with pytest.raises(PlainTransformError):
        jax.vmap(jax.jit(lambda x: setattr(net, "s", jnp.ones(2)) or x))(jnp.ones(2))
    assert moved(net) == [False, False]


def test_keys():
    rng = tether.Rng(0)
    draw = jax.jit(lambda: jax.random.uniform(tether.random.draw(rng)))
    other = tether.Rng(0)
    by_hand = [float(jax.random.uniform(tether.random.draw(other))) for _ in range(3)]
    np.testing.assert_allclose([float(draw()) for _ in range(3)], by_hand)
    assert (rng.value == other.value).all()


def test_of_another_model_is_its_own():
    layers = [nn.Linear(2, 2, key=jax.random.key(i)) for i in range(2)]
    for layer in layers:
        np.testing.assert_allclose(jax.jit(layer)(jnp.ones(2)), layer(jnp.ones(2)), rtol=1e-6)
