# SPDX-License-Identifier: Apache-2.0
"""First values: their draws, and their statistics against closed forms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax._errors import MisuseError

init = objax.nn.init
SHAPE = (3, 3, 40, 30)
FAN_IN, FAN_OUT = 3 * 3 * 40, 30
COUNT = math.prod(SHAPE)


@pytest.fixture(autouse=True)
def _seed():
    objax.random.DEFAULT_GENERATOR.seed(0)


def first_key():
    return jax.random.split(jax.random.PRNGKey(0), 2)[1]


def test_gains():
    assert init.kaiming_normal_gain(SHAPE) == pytest.approx(1 / math.sqrt(FAN_IN))
    assert init.xavier_normal_gain(SHAPE) == pytest.approx(math.sqrt(2 / (FAN_IN + FAN_OUT)))
    assert init.gain_leaky_relu() == pytest.approx(math.sqrt(2 / 1.01))
    assert init.gain_leaky_relu(0) == pytest.approx(math.sqrt(2))
    assert (init.kaiming_normal_gain((5,)), init.kaiming_normal_gain((0, 5))) == (1, 1)


@pytest.mark.parametrize(
    ("make", "deviation"),
    [(init.kaiming_normal, 3 / math.sqrt(FAN_IN)), (init.xavier_normal, 3 * math.sqrt(2 / (FAN_IN + FAN_OUT)))],
)
def test_normal_weights_are_the_draws_of_objax(make, deviation):
    np.testing.assert_allclose(make(SHAPE, gain=3), deviation * jax.random.normal(first_key(), SHAPE), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "deviation"),
    [
        (init.kaiming_truncated_normal, 1 / math.sqrt(FAN_IN)),
        (init.xavier_truncated_normal, math.sqrt(2 / (FAN_IN + FAN_OUT))),
        (init.truncated_normal, 1.0),
    ],
)
def test_truncated_weights_have_the_deviation_that_was_asked_for(make, deviation):
    w = np.asarray(make(SHAPE), np.float64) / deviation
    assert abs(w.mean()) < 5 / math.sqrt(COUNT)
    assert abs(w.std() - 1) < 5 / math.sqrt(2 * COUNT)
    # A standard normal cut at +-2 has the deviation 0.87962566; scaled to 1, it is cut at +-2.2737.
    assert 2.26 < np.abs(w).max() <= 2 / 0.8796256610 + 1e-5


def test_bounds_that_are_not_symmetric():
    w = np.asarray(init.truncated_normal((20000,), lower=0, upper=math.inf, stddev=2), np.float64)
    half = math.sqrt(1 - 2 / math.pi)  # deviation of the half-normal distribution
    assert w.min() >= 0
    assert abs(w.std() / 2 - 1) < 0.03
    assert abs(w.mean() * half / 2 - math.sqrt(2 / math.pi)) < 0.02


@pytest.mark.parametrize(("lower", "upper"), [(-2, 2), (-1, 3), (0.5, 0.6), (5, 6), (-9, -7), (-40, 40)])
def test_the_deviation_of_a_truncated_normal_is_its_integral(lower, upper):
    x = np.linspace(max(lower, -12), min(upper, 12), 400001)
    density = np.exp(-(x**2) / 2 + min(abs(lower), abs(upper)) ** 2 / 2 * (lower * upper > 0))
    mean = np.trapezoid(x * density, x) / np.trapezoid(density, x)
    deviation = math.sqrt(np.trapezoid((x - mean) ** 2 * density, x) / np.trapezoid(density, x))
    got = np.asarray(init.truncated_normal((50,), lower, upper), np.float64)
    raw = np.asarray(jax.random.truncated_normal(first_key(), lower, upper, (50,)), np.float64)
    np.testing.assert_allclose(got, raw / deviation, rtol=2e-6)


@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 4), -1), ((4, 6), -1), ((5, 5), 0), ((2, 3, 4), 1), ((2, 2, 3, 20), -1)]
)
def test_orthogonal_rows_or_columns(shape, axis):
    w = np.moveaxis(np.asarray(init.orthogonal(shape, gain=2, axis=axis), np.float64), axis, 0)
    rows = w.reshape(w.shape[0], -1)
    gram = rows @ rows.T if rows.shape[0] <= rows.shape[1] else rows.T @ rows
    np.testing.assert_allclose(gram, 4 * np.eye(len(gram)), atol=1e-5)


def test_orthogonal_matrices_are_uniform():
    draws = np.stack([init.orthogonal((3, 3)) for _ in range(400)]).astype(np.float64)
    # Of a uniform one each entry has mean 0 and variance 1/3; without mended signs the diagonal leans to one side.
    assert np.abs(draws.mean(0)).max() < 4.5 * math.sqrt(1 / 3 / 400)
    np.testing.assert_allclose((draws**2).mean(0), np.full((3, 3), 1 / 3), atol=0.08)
    assert 0.4 < (np.linalg.det(draws) > 0).mean() < 0.6


def test_orthogonal_weights_can_be_made_in_a_compiled_function():
    made = objax.Jit(lambda: init.orthogonal((4, 4)))()
    np.testing.assert_allclose(made @ made.T, np.eye(4), atol=1e-5)


def test_identity():
    assert init.identity((2, 3), gain=2).tolist() == [[2, 0, 0], [0, 2, 0]]
    with pytest.raises(AssertionError) as error:
        init.identity((2, 2, 2))
    assert str(error.value) == (
        "identity: the shape isn't that of a matrix.\n  got:      shape=(2, 2, 2)\n  expected: rank 2"
    )


def test_bounds_in_the_wrong_order():
    with pytest.raises(MisuseError) as error:
        init.truncated_normal((2,), lower=1, upper=1)
    assert str(error.value) == (
        "truncated_normal: lower isn't below upper.\n  got:      lower=1, upper=1\n  expected: lower < upper"
    )


def test_every_call_draws_anew_and_a_seed_repeats():
    first, second = objax.nn.Linear(3, 4), objax.nn.Linear(3, 4)
    assert bool((first.w.value != second.w.value).all())
    objax.random.DEFAULT_GENERATOR.seed(0)
    np.testing.assert_array_equal(objax.nn.Linear(3, 4).w.value, first.w.value)


def test_an_initializer_of_ones_own():
    layer = objax.nn.Linear(2, 3, w_init=lambda shape: jnp.full(shape, 7.0))
    assert layer(jnp.ones(2)).tolist() == [14.0, 14.0, 14.0]
