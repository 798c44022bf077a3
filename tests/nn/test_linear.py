# SPDX-License-Identifier: Apache-2.0
"""Linear against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError, TetherError

RNG = np.random.default_rng(0)


def oracle(linear: nn.Linear, x: np.ndarray) -> np.ndarray:
    weight, bias = np.asarray(linear.weight, np.float64), linear.bias
    return np.einsum("...i,oi->...o", x.astype(np.float64), weight) + (
        0 if bias is None else np.asarray(bias, np.float64)
    )


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 1, 5), (0, 5)])
def test_values(shape: tuple[int, ...], use_bias: bool, key: jax.Array):
    linear = nn.Linear(5, 3, use_bias=use_bias, key=key)
    x = RNG.normal(size=shape)
    np.testing.assert_allclose(linear(x), oracle(linear, x), rtol=1e-5, atol=1e-6)


def test_layout_and_first_values(key: jax.Array):
    linear = nn.Linear(64, 500, key=key)
    assert (linear.weight.shape, linear.bias.shape) == ((500, 64), (500,))
    for values in (linear.weight, linear.bias):  # U(-1/8, 1/8), as in PyTorch: standard deviation 1 / (8 sqrt 3)
        assert 0.12 < float(jnp.abs(values).max()) <= 0.125
        assert float(values.std()) == pytest.approx(0.125 / 3**0.5, rel=0.1)
        assert abs(float(values.mean())) < 0.01


def test_weight_of_a_key_does_not_depend_on_the_bias(key: jax.Array):
    with_bias, without = nn.Linear(5, 3, key=key), nn.Linear(5, 3, use_bias=False, key=key)
    np.testing.assert_array_equal(with_bias.weight, without.weight)
    assert without.bias is None
    assert list(tether.variables(without)) == ["weight"]


def test_key_is_optional_and_may_be_legacy():
    tether.seed(3)
    first, second = nn.Linear(5, 3), nn.Linear(5, 3)
    assert not np.array_equal(first.weight, second.weight)
    tether.seed(3)
    np.testing.assert_array_equal(nn.Linear(5, 3).weight, first.weight)
    np.testing.assert_array_equal(
        nn.Linear(5, 3, key=jax.random.PRNGKey(7)).weight, nn.Linear(5, 3, key=jax.random.key(7)).weight
    )


def test_own_initializers_and_dtype(key: jax.Array):
    linear = nn.Linear(
        2, 3, key=key, dtype=jnp.bfloat16, weight_init=nn.init.constant(0.5), bias_init=lambda k, s, d: jnp.ones(s, d)
    )
    assert (linear.weight.dtype, linear.bias.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert linear(jnp.ones(2)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("given", "parameters", "wanted"),
    [
        (jnp.float16, jnp.float32, jnp.float16),
        (jnp.float32, jnp.bfloat16, jnp.float32),
        (jnp.uint8, jnp.bfloat16, jnp.bfloat16),
        (jnp.bool_, jnp.float32, jnp.float32),
        (jnp.float32, jnp.complex64, jnp.complex64),
        (jnp.complex64, jnp.float32, jnp.complex64),
    ],
    ids=str,
)
def test_dtype_of_the_output(given, parameters, wanted, key: jax.Array):
    assert nn.Linear(4, 2, key=key, dtype=parameters)(jnp.ones((3, 4), given)).dtype == wanted


def test_float64_input_computes_in_float64(key: jax.Array):
    linear = nn.Linear(5, 3, key=key)
    x = RNG.normal(size=(2, 5))
    with jax.enable_x64(True):
        y = linear(x)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, oracle(linear, x), rtol=1e-13)


def test_view_sets_the_compute_dtype(key: jax.Array):
    linear = nn.Linear(5, 3, key=key)
    low = tether.view(linear, compute_dtype=jnp.bfloat16)
    assert low(jnp.ones((2, 5))).dtype == jnp.bfloat16
    assert low.weight.dtype == linear.weight.dtype == jnp.float32
    assert linear(jnp.ones((2, 5))).dtype == jnp.float32


def test_gradient_by_hand(key: jax.Array):
    linear = nn.Linear(3, 2, key=key)
    x, c = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=(4, 2)).astype(np.float32)
    grads = tether.grad(lambda linear: (c * linear(x)).sum())(linear)
    np.testing.assert_allclose(grads.weight, c.T @ x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads.bias, c.sum(0), rtol=1e-5, atol=1e-6)


def test_wrong_shape_says_what_to_do(key: jax.Array):
    model = nn.Sequential([nn.Linear(5, 3, key=key), nn.Linear(4, 2, key=key)])
    with pytest.raises(ShapeError) as caught:
        model(jnp.ones((2, 5)))
    assert str(caught.value) == (
        "Linear: the last axis of x is not in_features, 4.\n"
        "  at:       [1]  (Linear)\n"
        "  got:      float32[2, 3]\n"
        "  expected: [..., 4]\n"
        "  fix:      one of\n"
        "    1. in_features as the input has them\n"
        "    2. x.reshape(x.shape[0], -1), or nn.Flatten, before this layer"
    )


@pytest.mark.parametrize("x", [[1.0, 2.0], 1.0, None, "abc", np.array(["a", "b"])])
def test_input_must_be_an_array_of_numbers(x, key: jax.Array):
    with pytest.raises(DtypeError, match="Linear: the input is not an array of numbers"):
        nn.Linear(2, 2, key=key)(x)


def test_keys_are_no_input(key: jax.Array):
    with pytest.raises(DtypeError, match="not an array of numbers"):
        nn.Linear(2, 2, key=key)(jax.random.split(key))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None, "3"])
def test_sizes_are_counts(size):
    with pytest.raises(ArgumentError, match=r"Linear: in_features is not an integer of at least 1") as caught:
        nn.Linear(size, 2)
    assert caught.value.got.startswith("in_features=")
    with pytest.raises(ArgumentError, match="Linear: out_features"):
        nn.Linear(2, size)


@pytest.mark.parametrize("dtype", [jnp.int32, None, "no such", bool])
def test_parameters_are_floating(dtype):
    with pytest.raises(ArgumentError, match="Linear: dtype is not a floating dtype"):
        nn.Linear(2, 2, dtype=dtype)


@pytest.mark.parametrize("wrong", [1.5, "key", np.ones(3), np.ones((3, 2), np.uint32)], ids=str)
def test_wrong_key_is_an_error(wrong):
    with pytest.raises(TetherError):
        nn.Linear(2, 2, key=wrong)


def test_subclass_is_named_by_its_own_name(key: jax.Array):
    class Projection(nn.Linear):
        pass

    with pytest.raises(ShapeError, match="Projection: the last axis"):
        Projection(2, 2, key=key)(jnp.ones(3))
