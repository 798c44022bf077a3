# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm against float64 NumPy, and on the inputs where careless statistics fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn._norm import RMSNorm

RNG = np.random.default_rng(0)


def oracle(x, shape, eps=1e-5, weight=1.0, bias=0.0):
    x = np.asarray(x, np.float64)
    axes = tuple(range(-len(shape), 0))
    mean = x.mean(axes, keepdims=True)
    var = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * weight + bias


@pytest.mark.parametrize(
    ("size", "shape", "x"), [(5, (5,), (5,)), (5, (5,), (2, 3, 5)), ((3, 5), (3, 5), (2, 1, 3, 5))]
)
def test_values(size, shape: tuple[int, ...], x: tuple[int, ...]):
    norm = nn.LayerNorm(size, eps=1e-3)
    norm.weight, norm.bias = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for _ in range(2))
    x = RNG.normal(3, 2, x)
    np.testing.assert_allclose(
        norm(x), oracle(x, shape, 1e-3, np.asarray(norm.weight), np.asarray(norm.bias)), rtol=1e-5, atol=1e-5
    )


def test_first_values_and_absent_parameters():
    norm = nn.LayerNorm([3, 4], dtype=jnp.bfloat16)
    assert norm.shape == (3, 4)
    np.testing.assert_array_equal(norm.weight, np.ones((3, 4)))
    np.testing.assert_array_equal(norm.bias, np.zeros((3, 4)))
    assert norm.weight.dtype == norm.bias.dtype == jnp.bfloat16
    assert list(tether.variables(nn.LayerNorm(3, use_bias=False))) == ["weight"]
    assert list(tether.variables(nn.LayerNorm(3, use_weight=False))) == ["bias"]
    bare = nn.LayerNorm(3, use_weight=False, use_bias=False)
    assert not tether.variables(bare)
    assert bare(jnp.arange(3)).dtype == jnp.float32  # integers, and no parameter to name a dtype


def test_large_offset():
    """E[x^2] - E[x]^2 gives +-1.06 and +-0.35 here."""
    y = nn.LayerNorm(4)(jnp.asarray([4096.0, 4097.0, 4098.0, 4099.0]))
    np.testing.assert_allclose(y, [-1.34164, -0.44721, 0.44721, 1.34164], atol=1e-4)


def test_small_variance_around_a_large_mean():
    x = RNG.normal(1e4, 1e-2, (4, 100)).astype(np.float32)
    np.testing.assert_allclose(nn.LayerNorm(100)(x), oracle(x, (100,)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [1e7, 0.1, -3e30, 123.456])
@pytest.mark.parametrize("size", [3, 7, 1000, 4099])
def test_constant_input_is_zero_exactly(value: float, size: int):
    np.testing.assert_array_equal(nn.LayerNorm(size)(jnp.full(size, value, jnp.float32)), np.zeros(size))


def test_float16_whose_squares_overflow():
    x = jnp.asarray([60000, 60032, 60064, 60096], jnp.float16)
    y = nn.LayerNorm(4)(x)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y.astype(jnp.float32), [-1.3416, -0.4472, 0.4472, 1.3416], atol=2e-3)


def test_float64_input_computes_in_float64():
    norm = nn.LayerNorm(6)
    x = RNG.normal(size=(2, 6))
    with jax.enable_x64(True):
        y = norm(x)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, oracle(x, (6,)), rtol=1e-12)


def test_gradient_agrees_with_float64_differences():
    norm = nn.LayerNorm(5)
    x, c, direction = (RNG.normal(size=(2, 5)) for _ in range(3))
    slope = ((oracle(x + 1e-6 * direction, (5,)) - oracle(x - 1e-6 * direction, (5,))) * c).sum() / 2e-6
    grad = tether.grad(lambda x: (jnp.asarray(c, jnp.float32) * norm(x)).sum())(x)
    assert float((np.asarray(grad) * direction).sum()) == pytest.approx(slope, rel=1e-4)


def test_wrong_shape_says_what_to_do():
    with pytest.raises(ShapeError) as caught:
        nn.LayerNorm((3, 4))(jnp.ones((2, 4, 3)))
    assert str(caught.value) == (
        "LayerNorm: the trailing axes of x are not (3, 4).\n"
        "  at:       the module itself  (LayerNorm)\n"
        "  got:      float32[2, 4, 3]\n"
        "  expected: [..., 3, 4]\n"
        "  fix:      give LayerNorm the sizes of the axes to normalize, the last ones of x"
    )


@pytest.mark.parametrize("shape", [(), [], 0, (3, -1), 2.5, None])
def test_shape_is_of_counts(shape):
    with pytest.raises(ArgumentError, match="LayerNorm: shape"):
        nn.LayerNorm(shape)


@pytest.mark.parametrize("eps", [0, -1e-5, float("nan"), float("inf"), "1e-5", True])
def test_eps_is_positive(eps):
    with pytest.raises(ArgumentError, match="LayerNorm: eps is not a positive number"):
        nn.LayerNorm(3, eps=eps)


def test_complex_numbers_are_refused():
    with pytest.raises(DtypeError, match="LayerNorm: complex numbers"):
        nn.LayerNorm(3)(jnp.ones(3, jnp.complex64))
    for cls in (nn.LayerNorm, RMSNorm):
        with pytest.raises(ArgumentError) as caught:
            cls(3, dtype=jnp.complex64)
        assert str(caught.value) == (
            f"{cls.__name__}: dtype is complex, and complex numbers have no variance here.\n"
            "  got:      dtype=complex64\n"
            "  expected: float16, bfloat16, float32 or float64\n"
            "  fix:      dtype=jnp.float32"
        )


def rms_oracle(x, rank, eps=1e-6, weight=1.0, bias=0.0):
    x = np.asarray(x, np.float64)
    square = (x * x).mean(tuple(range(-rank, 0)), keepdims=True)
    return x / np.sqrt(square + eps) * weight + bias


@pytest.mark.parametrize(("size", "x"), [(5, (5,)), (5, (2, 3, 5)), ((3, 5), (2, 1, 3, 5))])
@pytest.mark.parametrize("use_bias", [False, True])
def test_rms_values(size, x: tuple[int, ...], use_bias: bool):
    norm = RMSNorm(size, eps=1e-3, use_bias=use_bias)
    for name in tether.variables(norm):
        setattr(norm, name, jnp.asarray(RNG.normal(size=norm.shape), jnp.float32))
    x = RNG.normal(3, 2, x)
    bias = np.asarray(norm.bias) if use_bias else 0.0
    wanted = rms_oracle(x, len(norm.shape), 1e-3, np.asarray(norm.weight), bias)
    np.testing.assert_allclose(norm(x), wanted, rtol=1e-5, atol=1e-5)


def test_rms_first_values_and_absent_parameters():
    norm = RMSNorm([3, 4], use_bias=True, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(norm.weight, np.ones((3, 4)))
    np.testing.assert_array_equal(norm.bias, np.zeros((3, 4)))
    assert norm.weight.dtype == norm.bias.dtype == jnp.bfloat16
    assert list(tether.variables(RMSNorm(3))) == ["weight"]
    assert RMSNorm(3, use_weight=False)(jnp.arange(3)).dtype == jnp.float32


@pytest.mark.parametrize(("dtype", "large"), [(jnp.float16, 3e4), (jnp.bfloat16, 1e15), (jnp.float32, 1e15)])
def test_rms_of_squares_that_overflow_in_the_dtype_of_x(dtype, large: float):
    x = jnp.asarray([large, -large, large, large], dtype)
    y = RMSNorm(4)(x)
    assert y.dtype == dtype
    np.testing.assert_allclose(y.astype(jnp.float32), [1, -1, 1, 1], rtol=1e-2)


def test_rms_gradient_agrees_with_float64_differences():
    x, c, direction = (RNG.normal(size=(2, 5)) for _ in range(3))
    slope = ((rms_oracle(x + 1e-6 * direction, 1) - rms_oracle(x - 1e-6 * direction, 1)) * c).sum() / 2e-6
    norm = RMSNorm(5)
    grad = tether.grad(lambda x: (jnp.asarray(c, jnp.float32) * norm(x)).sum())(x)
    assert float((np.asarray(grad) * direction).sum()) == pytest.approx(slope, rel=1e-4)


def test_rms_of_zeros_is_zero_and_has_a_gradient():
    norm = RMSNorm(3)
    np.testing.assert_array_equal(norm(jnp.zeros(3)), np.zeros(3))
    np.testing.assert_allclose(tether.grad(lambda x: norm(x).sum())(jnp.zeros(3)), np.full(3, 1e3), rtol=1e-5)


def test_rms_bad_input():
    with pytest.raises(ShapeError) as caught:
        RMSNorm((3, 4))(jnp.ones((2, 4, 3)))
    assert caught.value.what == "RMSNorm: the trailing axes of x are not (3, 4)."
    assert caught.value.fixes == ["give RMSNorm the sizes of the axes to normalize, the last ones of x"]
    with pytest.raises(DtypeError, match="RMSNorm: complex numbers"):
        RMSNorm(3)(jnp.ones(3, jnp.complex64))
    with pytest.raises(ArgumentError, match="RMSNorm: eps is not a positive number") as eps:
        RMSNorm(3, eps=-1)
    assert eps.value.fixes == ["eps=1e-06"]
    with pytest.raises(ArgumentError, match="RMSNorm: shape names no axis"):
        RMSNorm(())
