# SPDX-License-Identifier: Apache-2.0
"""A function called with other values for some Variables: what it reads, what it writes, and that nothing stays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether._modules.overlay import called_with
from tether.errors import DtypeError, SealedError, ShapeError


class Counting(tether.Module):
    """Reads a weight, counts its calls, and draws."""

    def __init__(self):
        self.weight = tether.Param(jnp.ones(3))
        self.calls = tether.State(0)
        self.noise = tether.State(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.calls = self.calls + 1
        self.noise = jax.random.normal(tether.random.draw())
        return x * self.weight


def twice(layer: Counting, x: Any) -> Any:
    """The layer with a weight twice its own."""
    weight = tether.cell(layer, "weight")
    return called_with({weight: 2 * weight.value}, lambda: layer(x))


WRAPPERS = {
    "eager": lambda f: f,
    "jit": tether.jit,
    "plain jit": jax.jit,
    "cond": lambda f: lambda x: tether.cond(x.sum() > 0, f, f, x),
    "checkpoint": tether.checkpoint,
    "scan": lambda f: lambda x: tether.scan(lambda c, _: (c, f(x)), 0.0, length=1)[1][0],
}


@pytest.mark.parametrize("wrapped", WRAPPERS)
def test_reads_the_value_and_writes_the_rest(wrapped: str):
    layer, x = Counting(), jnp.arange(1.0, 4)
    before = jax.random.key_data(tether.random.draw())
    y = WRAPPERS[wrapped](lambda x: twice(layer, x))(x)
    np.testing.assert_allclose(y, 2 * x)
    np.testing.assert_array_equal(layer.weight, jnp.ones(3))
    assert int(layer.calls) == 1
    assert float(layer.noise) != 0
    assert not np.array_equal(jax.random.key_data(tether.random.draw()), before)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(layer))


def test_draws_what_it_would_have_drawn():
    plain, other = Counting(), Counting()
    for _ in range(2):
        plain(jnp.ones(3), key=jax.random.key(3))
        tether.seed(0)
        with tether.random.scope(jax.random.key(3)):
            twice(other, jnp.ones(3))
    np.testing.assert_array_equal(other.noise, plain.noise)


def test_lanes_draw_apart():
    layer = nn.Dropout(0.5)
    linear = nn.Linear(1, 1)
    weight = tether.cell(linear, "weight")
    y = tether.vmap(lambda x: called_with({weight: weight.value}, lambda: layer(x)))(jnp.ones((4, 16)))
    assert len({tuple(lane) for lane in np.asarray(y).tolist()}) == 4


def test_gradient_reaches_the_variable_through_the_value():
    layer = Counting()
    grads = tether.grad(lambda layer: twice(layer, jnp.arange(3.0)).sum())(layer)
    np.testing.assert_allclose(grads.weight, [0, 2, 4])
    assert int(layer.calls) == 1


def test_calls_nest_and_the_innermost_counts():
    layer, x = Counting(), jnp.ones(3)
    weight = tether.cell(layer, "weight")
    outer = called_with({weight: jnp.full(3, 5.0)}, lambda: (twice(layer, x), layer(x)))
    np.testing.assert_allclose(outer, [x * 10, x * 5])
    assert int(layer.calls) == 2


def test_a_plain_transformation_inside_is_not_found_again_with_the_old_value():
    layer = Counting()
    weight = tether.cell(layer, "weight")
    product = jax.jit(lambda x: x * layer.weight)
    for factor in (1.0, 2.0, 3.0):
        y = called_with({weight: jnp.full(3, factor)}, lambda: product(jnp.ones(3)))
        np.testing.assert_allclose(y, np.full(3, factor))


def test_an_exception_leaves_everything_as_it_was():
    layer = Counting()

    def fails():
        layer(jnp.ones(3))
        raise RuntimeError("after the write")

    with pytest.raises(RuntimeError, match="after the write"):
        called_with({tether.cell(layer, "weight"): jnp.zeros(3)}, fails)
    assert int(layer.calls) == 0
    np.testing.assert_allclose(layer(jnp.ones(3)), np.ones(3))


def test_paths_of_what_is_called_stay():
    model = nn.Sequential([nn.Linear(2, 2), nn.Linear(2, 2)])
    weight = tether.cell(model, "[1].weight")
    f = lambda x: called_with({weight: jnp.zeros((2, 2))}, lambda: model(x))
    assert list(tether.capture(f, nn.Linear)(jnp.ones(2))[1]) == ["[0]", "[1]"]


def test_a_write_to_such_a_variable_is_an_error():
    layer = Counting()

    def writes():
        layer.weight = jnp.zeros(3)

    with pytest.raises(SealedError) as caught:
        called_with({tether.cell(layer, "weight"): jnp.zeros(3)}, writes)
    assert str(caught.value) == (
        "a Variable is written while it has another value for the length of a call.\n"
        "  at:       weight  (Param)\n"
        "  got:      a write by the layer whose weight is computed\n"
        "  expected: a layer that only reads it\n"
        "  fix:      write the Variable outside the layer that computes the weight"
    )
    np.testing.assert_array_equal(layer.weight, np.ones(3))


def test_the_value_must_fit():
    weight = tether.cell(Counting(), "weight")
    with pytest.raises(ShapeError, match="a write changes the shape of a Variable"):
        called_with({weight: jnp.zeros(4)}, lambda: None)
    with pytest.raises(DtypeError, match="a write would lose"):
        called_with({weight: jnp.zeros(3, jnp.complex64)}, lambda: None)
