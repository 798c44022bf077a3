# SPDX-License-Identifier: Apache-2.0
"""BatchNorm differentiated, and with its batch spread over mapped axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.nn.batchnorm_oracle import RNG, STANDARD, X, by_hand, close, normal, oracle
from tether import nn
from tether.errors import ArgumentError, ShapeError, VmapWriteError


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order():
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.mark.parametrize("wrap", [lambda f: f, tether.jit], ids=["eager", "jit"])
def test_gradients_against_plain_jax(wrap):
    norm, c, x = nn.BatchNorm(3), normal(5, 3), jnp.asarray(normal(5, 3))
    norm.weight, norm.bias = normal(3), normal(3)
    weight, bias = norm.weight, norm.bias
    d_x, d_weight, d_bias = jax.grad(lambda *a: jnp.sum(c * by_hand(*a)), argnums=(0, 1, 2))(x, weight, bias)
    for _ in range(2):
        gradient = wrap(tether.grad(lambda norm, x: jnp.sum(c * norm(x)), argnums=(0, 1)))
        d_norm, actual = gradient(norm, x)
        close(actual, d_x)
        close(d_norm.weight, d_weight)
        close(d_norm.bias, d_bias)
    close(norm.mean, (1 - 0.9**2) * x.mean(0))


def test_gradient_against_finite_differences():
    x, c, h = RNG.normal(size=(5, 2)), RNG.normal(size=(5, 2)), 1e-6
    numeric = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = h
        numeric[index] = (c * (oracle(x + step, (0,))[0] - oracle(x - step, (0,))[0])).sum() / (2 * h)
    norm = nn.BatchNorm(2)
    loss = lambda x: jnp.sum(jnp.asarray(c, jnp.float32) * norm(x))
    close(tether.grad(loss)(jnp.asarray(x, jnp.float32)), numeric, 1e-4)


def test_differentiated_twice_by_plain_jax_as_well():
    """The statistics move once for each call, hold plain arrays, and no tracer is left behind."""
    norm, c, x = nn.BatchNorm(3), normal(5, 3), jnp.asarray(normal(5, 3))
    expected = jax.grad(lambda x: jnp.sum(c * by_hand(x, jnp.ones(3), jnp.zeros(3))))(x)
    with jax.checking_leaks():
        for grad in (tether.grad, tether.grad, jax.grad, jax.grad):
            close(grad(lambda x: jnp.sum(c * norm(x)))(x), expected)
            assert type(norm.mean) is type(norm.var) is type(x)
    close(norm.mean, (1 - 0.9**4) * x.mean(0))
    close(norm.var, 0.9**4 + (1 - 0.9**4) * x.var(0))


def test_second_derivative():
    norm, c, x, v = nn.BatchNorm(2), normal(5, 2), jnp.asarray(normal(5, 2)), normal(5, 2)
    gradient = lambda f, grad: grad(lambda x: jnp.sum(v * grad(f)(x)))(x)
    hand = gradient(lambda x: jnp.sum(c * by_hand(x, jnp.ones(2), jnp.zeros(2)) ** 3), jax.grad)
    close(gradient(lambda x: jnp.sum(c * norm(x) ** 3), tether.grad), hand, 1e-4)


def test_statistics_carry_no_gradient():
    norm = nn.BatchNorm(2)

    def loss(x):
        norm(x)
        return norm.mean.sum() + norm.var.sum()

    np.testing.assert_array_equal(tether.grad(loss)(jnp.asarray(X)), np.zeros_like(X))


@pytest.mark.parametrize("vmap", [jax.vmap, tether.vmap])
@pytest.mark.parametrize("mode", ["batch", "ema"])
@pytest.mark.parametrize("variance", ["biased", "unbiased"])
def test_one_example_per_lane(vmap, mode: str, variance: str):
    x = normal(6, 3, 4, loc=100)
    norm = nn.BatchNorm(3, axis_name="batch", mode=mode, variance=variance)
    batched = nn.BatchNorm(3, mode=mode, variance=variance)
    for _ in range(3):
        y = vmap(norm, axis_name="batch")(x)
        close(y, batched(x), 2e-5)
        if mode == "batch":
            close(y, oracle(x, (0, 2))[0])
        assert norm.mean.shape == (3,)
        close([norm.mean, norm.var], [batched.mean, batched.var])
    close(jax.vmap(norm.eval())(x), batched.eval()(x))


@pytest.mark.parametrize("vmap", [jax.vmap, tether.vmap])
def test_nested_lanes(vmap):
    x = normal(2, 5, 3, 4)
    z, mean, _ = oracle(x, (0, 1, 3))
    both = nn.BatchNorm(3, axis_name=("i", "j"))
    close(vmap(vmap(both, axis_name="j"), axis_name="i")(x), z)
    one = nn.BatchNorm(3, axis_name="i", channel_axis=1)  # a batch in each lane
    close(vmap(one, axis_name="i")(x), z)
    close([both.mean, one.mean], [0.1 * mean, 0.1 * mean])


def test_lanes_keep_the_precision():
    x = np.float32([[4096], [4097], [4098], [4099]])
    close(tether.vmap(nn.BatchNorm(1, axis_name="batch"), axis_name="batch")(x)[:, 0], STANDARD, 1e-4)
    constant = tether.vmap(nn.BatchNorm(1, axis_name="batch"), axis_name="batch")(jnp.full((999, 1), 1e7))
    np.testing.assert_array_equal(constant, np.zeros((999, 1)))


def test_gradient_through_lanes():
    x, c = jnp.asarray(normal(6, 3)), normal(6, 3)
    norm = nn.BatchNorm(3, axis_name="batch")
    expected = jax.grad(lambda x: jnp.sum(c * by_hand(x, jnp.ones(3), jnp.zeros(3))))(x)
    close(tether.grad(lambda x: jnp.sum(c * tether.vmap(norm, axis_name="batch")(x)))(x), expected)
    close(jax.grad(lambda x: jnp.sum(c * jax.vmap(norm, axis_name="batch")(x)))(x), expected)
    close(norm.mean, (1 - 0.9**2) * x.mean(0))


def test_lanes_under_jit():
    x = normal(6, 3)
    norm = nn.BatchNorm(3, axis_name="batch")
    step = tether.jit(lambda x: tether.vmap(norm, axis_name="batch")(x))
    for _ in range(3):
        close(step(x), oracle(x, (0,))[0])
    close(norm.mean, (1 - 0.9**3) * x.mean(0))
    assert step.traces == 1


def test_bad_shape_in_a_lane():
    norm = nn.BatchNorm(3, axis_name="batch")
    with pytest.raises(ShapeError, match="axis 0 of x has 2 channels; it should have 3") as error:
        tether.vmap(norm, axis_name="batch")(jnp.ones((5, 2)))
    assert "channel_axis=1 where each lane holds a batch" in error.value.fixes


def test_values_are_counted_over_the_lanes():
    norm = nn.BatchNorm(3, axis_name="batch")
    tether.vmap(norm, axis_name="batch")(jnp.ones((2, 3)))
    with pytest.raises(ShapeError, match="this batch has 1"):
        tether.vmap(norm, axis_name="batch")(jnp.ones((1, 3)))


@pytest.mark.parametrize("axis_name", ["batch", ("batch", "device")])
def test_training_outside_the_named_axis(axis_name):
    norm = nn.BatchNorm(3, axis_name=axis_name)
    with pytest.raises(ArgumentError, match="training outside of the mapped axis") as error:
        norm(jnp.ones((4, 3)))
    assert error.value.__cause__ is None
    assert error.value.fixes[0].endswith("axis_name='batch')(x)")
    assert norm(jnp.ones(3), training=False).shape == (3,)


def test_lanes_that_differ_are_an_error_of_the_write():
    norm = nn.BatchNorm(2)
    with pytest.raises(VmapWriteError):
        tether.vmap(norm)(np.stack([X, 2 * X]))
    np.testing.assert_array_equal(norm.mean, [0, 0])
