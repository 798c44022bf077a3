# SPDX-License-Identifier: Apache-2.0
"""Dropout, DropPath, AlphaDropout: how often, how much, and when they draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn._dropout import AlphaDropout, DropPath

CLASSES = [nn.Dropout, DropPath, AlphaDropout]
classes = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


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


@classes
def test_evaluation_is_the_identity_and_draws_nothing(cls):
    x = jnp.asarray([1.0, jnp.nan, -2.0])
    layer = cls(0.5)
    for call in (layer.eval(), lambda x: layer(x, training=False), tether.view(layer, p=0.0), cls(0), cls(1).eval()):
        tether.seed(1)
        undisturbed = next_draw()
        tether.seed(1)
        np.testing.assert_array_equal(call(x), x)
        assert next_draw() == undisturbed
    tether.seed(1)
    layer(x)
    assert next_draw() != undisturbed


@classes
def test_p_of_one_gives_zeros_with_a_gradient_of_zeros(cls):
    x = jnp.asarray([1.0, jnp.nan, jnp.inf])
    tether.seed(1)
    undisturbed = next_draw()
    tether.seed(1)
    np.testing.assert_array_equal(cls(1)(x), np.zeros(3))
    np.testing.assert_array_equal(tether.grad(lambda x: cls(1.0)(x).sum())(x), np.zeros(3))
    assert next_draw() == undisturbed


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
    with pytest.raises(ArgumentError, match="AlphaDropout: p, the probability to drop, is not in"):
        tether.view(AlphaDropout(0.1), p=-1.0)(jnp.ones(3))


def test_gradient_goes_where_the_value_went(key: jax.Array):
    dropout = nn.Dropout(0.25)
    grad = tether.grad(lambda x: dropout(x, key=key).sum())(jnp.ones(100))
    np.testing.assert_allclose(grad, dropout(jnp.ones(100), key=key))


@classes
@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), True, "0.5", None])
def test_p_is_a_probability(cls, p):
    with pytest.raises(ArgumentError) as caught:
        cls(p)
    assert caught.value.what == f"{cls.__name__}: p, the probability to drop, is not in [0, 1]."
    assert (caught.value.got, caught.value.expected) == (f"p={p!r}", "a float, 0 <= p <= 1")


@pytest.mark.parametrize("axes", [1.5, "0", (0, None), True])
def test_axes_are_axis_numbers(axes):
    for cls in (nn.Dropout, AlphaDropout):
        with pytest.raises(ArgumentError, match=f"{cls.__name__}: shared_axes are not axis numbers"):
            cls(0.5, shared_axes=axes)
    with pytest.raises(ArgumentError, match="DropPath: example_axes are not axis numbers") as caught:
        DropPath(0.5, example_axes=axes)
    assert caught.value.fixes == ["example_axes=0"]


@pytest.mark.parametrize("training", [True, False])
def test_input_without_a_named_axis(training: bool):
    for cls in (nn.Dropout, AlphaDropout):
        with pytest.raises(ShapeError, match=rf"{cls.__name__}: x has no axis -2 to share a draw along") as caught:
            cls(0.5, shared_axes=(-1, -2))(jnp.ones(3), training=training)
        assert caught.value.got == "float32[3]"
    with pytest.raises(ShapeError) as caught:
        DropPath(0.5)(jnp.ones(()), training=training)
    assert str(caught.value) == (
        "DropPath: x has no axis 0 of examples.\n"
        "  at:       the module itself  (DropPath)\n"
        "  got:      float32[]\n"
        "  expected: an array with axes (0,)\n"
        "  fix:      example_axes=() draws once for all of x"
    )


@classes
@pytest.mark.parametrize("training", [True, False])
def test_integers_are_refused_in_both_modes(cls, training: bool):
    with pytest.raises(DtypeError, match=f"{cls.__name__}: x is not floating"):
        cls(0.5)(jnp.ones(3, jnp.int32), training=training)


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_drop_path_drops_whole_examples_and_keeps_the_mean(p: float, key: jax.Array):
    x = jnp.broadcast_to(jnp.arange(1.0, 7).reshape(1, 2, 3), (4000, 2, 3))
    y = np.asarray(DropPath(p)(x, key=key))
    kept = y[:, 0, 0] != 0
    np.testing.assert_allclose(y[kept], np.asarray(x)[kept] / (1 - p), rtol=1e-6)
    np.testing.assert_array_equal(y[~kept], np.zeros_like(y[~kept]))
    # Four standard deviations of a mean of 4000 draws of 0 or 1 / (1 - p).
    np.testing.assert_allclose(y.mean(0), x[0], rtol=4 * np.sqrt(p / (1 - p) / 4000))


def test_drop_path_of_several_example_axes(key: jax.Array):
    y = np.asarray(DropPath(0.5, example_axes=(0, -2))(jnp.ones((16, 3, 16, 2)), key=key))
    assert (y == y[:, :1, :, :1]).all()
    assert 0.3 < (y[:, 0, :, 0] == 0).mean() < 0.7
    assert len({tuple(row) for row in y[:, 0, :, 0].tolist()}) == 16


@pytest.mark.parametrize("vmap", [tether.vmap, jax.vmap])
def test_drop_path_of_one_example_draws_once_and_each_lane_for_itself(vmap, key: jax.Array):
    drop = DropPath(0.5, example_axes=())
    assert len(set(np.ravel(drop(jnp.ones((8, 8)), key=key)).tolist())) == 1
    keys = jax.random.split(key, 400)
    y = np.asarray(vmap(lambda x, key: drop(x, key=key))(jnp.ones((400, 2, 3)), keys))
    assert (y == y[:, :1, :1]).all()
    assert 0.4 < (y[:, 0, 0] == 0).mean() < 0.6  # four standard deviations
    own = np.asarray(tether.vmap(drop)(jnp.ones((400, 2, 3))))
    assert 0.4 < (own[:, 0, 0] == 0).mean() < 0.6
    assert (own == own[:, :1, :1]).all()


@pytest.mark.parametrize("p", [0.1, 0.6])
def test_alpha_dropout_keeps_mean_and_variance(p: float, key: jax.Array):
    """The constants are those of the paper, section "new dropout technique", for SELU with alpha01 and lambda01."""
    limit = -1.7580993408473766
    x = np.random.default_rng(0).normal(size=40000)
    y = np.asarray(AlphaDropout(p)(x, key=key), np.float64)
    a = (1 - p + p * (1 - p) * limit**2) ** -0.5
    b = -a * p * limit
    dropped = np.isclose(y, a * limit + b, atol=1e-5)
    assert dropped.mean() == pytest.approx(p, abs=0.011)
    np.testing.assert_allclose(y[~dropped], a * x[~dropped] + b, rtol=1e-4, atol=1e-5)
    # Some six standard deviations for 40,000 draws.
    assert (y.mean(), y.var()) == (pytest.approx(0, abs=0.03), pytest.approx(1, abs=0.04))


def test_alpha_dropout_shares_draws_along_axes(key: jax.Array):
    y = np.asarray(AlphaDropout(0.5, shared_axes=-1)(jnp.ones((64, 4)), key=key))
    assert (y == y[:, :1]).all()
    assert len(set(y[:, 0].tolist())) == 2
