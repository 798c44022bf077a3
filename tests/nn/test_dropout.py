# SPDX-License-Identifier: Apache-2.0
"""Dropout: how often, how much, and when it draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError


def next_draw() -> float:
    """What the default stream would give now; two equal ones mean that nothing was drawn between."""
    return float(jax.random.uniform(tether.random.draw()))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_values(p: float, key: jax.Array):
    x = jnp.arange(1.0, 10001.0)
    y = np.asarray(nn.Dropout(p)(x, key=key))
    kept = y != 0
    assert kept.mean() == pytest.approx(1 - p, abs=0.02)  # four standard deviations
    np.testing.assert_allclose(y[kept], np.asarray(x)[kept] / (1 - p), rtol=1e-6)


def test_dropped_elements_are_zero_whatever_they_were(key: jax.Array):
    y = np.asarray(nn.Dropout(0.5)(jnp.full(100, jnp.nan), key=key))
    assert 20 < np.isnan(y).sum() < 80
    assert (y[~np.isnan(y)] == 0).all()


def test_masks_differ_from_call_to_call_and_repeat_with_the_seed():
    dropout, x = nn.Dropout(0.5), jnp.ones(64)
    first, second = dropout(x), dropout(x)
    assert not np.array_equal(first, second)
    tether.seed(0)
    np.testing.assert_array_equal(dropout(x), first)
    with tether.random.scope(3):
        scoped = dropout(x)
    with tether.random.scope(3):
        np.testing.assert_array_equal(dropout(x), scoped)


def test_masks_of_jit_are_those_of_eager():
    dropout, x = nn.Dropout(0.5), jnp.ones(64)
    eager = [dropout(x) for _ in range(3)]
    tether.seed(0)
    step = tether.jit(dropout)
    np.testing.assert_array_equal([step(x) for _ in range(3)], eager)
    assert step.traces == 1


def test_two_layers_and_two_lanes_draw_apart(key: jax.Array):
    model = nn.Sequential([nn.Dropout(0.5), nn.Dropout(0.5)])
    first = nn.Dropout(0.5)(jnp.ones(64), key=key)
    both = model(jnp.ones(64), key=key)
    assert not np.array_equal(both, first * 2)
    lanes = tether.vmap(nn.Dropout(0.5))(jnp.ones((4, 16)))
    assert len({tuple(lane) for lane in np.asarray(lanes).tolist()}) == 4


def test_evaluation_is_the_identity_and_draws_nothing():
    x = jnp.asarray([1.0, jnp.nan, -2.0])
    dropout = nn.Dropout(0.5)
    for call in (dropout.eval(), lambda x: dropout(x, training=False), tether.view(dropout, p=0.0), nn.Dropout(0)):
        tether.seed(1)
        undisturbed = next_draw()
        tether.seed(1)
        np.testing.assert_array_equal(call(x), x)
        assert next_draw() == undisturbed
    tether.seed(1)
    dropout(x)
    assert next_draw() != undisturbed


@pytest.mark.parametrize("axes", [(-2, -1), [2, 3], (-1, 2)])
def test_shared_axes_share_a_draw(axes, key: jax.Array):
    y = np.asarray(nn.Dropout(0.5, shared_axes=axes)(jnp.ones((8, 16, 3, 4)), key=key))
    assert (y == y[:, :, :1, :1]).all()
    assert 0.3 < (y[:, :, 0, 0] == 0).mean() < 0.7


def test_one_shared_axis_may_be_an_int(key: jax.Array):
    y = np.asarray(nn.Dropout(0.5, shared_axes=-1)(jnp.ones((64, 4)), key=key))
    assert (y == y[:, :1]).all()
    assert len(set(y[:, 0].tolist())) == 2


def test_p_of_a_view_counts(key: jax.Array):
    dropout = nn.Dropout(0.1)
    assert float((tether.view(dropout, p=0.9)(jnp.ones(1000), key=key) == 0).mean()) > 0.8
    with pytest.raises(ArgumentError, match="Dropout: p, the probability to drop, is not in"):
        tether.view(dropout, p=1.5)(jnp.ones(3))


def test_gradient_goes_where_the_value_went(key: jax.Array):
    dropout = nn.Dropout(0.25)
    grad = tether.grad(lambda x: dropout(x, key=key).sum())(jnp.ones(100))
    np.testing.assert_allclose(grad, dropout(jnp.ones(100), key=key))


@pytest.mark.parametrize("p", [1.0, 1, -0.1, 1.5, float("nan"), True, "0.5", None])
def test_p_is_a_probability(p):
    with pytest.raises(ArgumentError) as caught:
        nn.Dropout(p)
    assert caught.value.what == "Dropout: p, the probability to drop, is not in [0, 1)."
    assert (caught.value.got, caught.value.expected) == (f"p={p!r}", "a float, 0 <= p < 1")


@pytest.mark.parametrize("axes", [1.5, "0", (0, None), True])
def test_shared_axes_are_axis_numbers(axes):
    with pytest.raises(ArgumentError, match="Dropout: shared_axes are not axis numbers"):
        nn.Dropout(0.5, shared_axes=axes)


@pytest.mark.parametrize("training", [True, False])
def test_input_without_a_shared_axis(training: bool):
    with pytest.raises(ShapeError, match=r"Dropout: x has no axis -2 to share a draw along") as caught:
        nn.Dropout(0.5, shared_axes=(-1, -2))(jnp.ones(3), training=training)
    assert caught.value.got == "float32[3]"


@pytest.mark.parametrize("training", [True, False])
def test_integers_are_refused_in_both_modes(training: bool):
    with pytest.raises(DtypeError, match="Dropout: x is not floating"):
        nn.Dropout(0.5)(jnp.ones(3, jnp.int32), training=training)
