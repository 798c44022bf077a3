# SPDX-License-Identifier: Apache-2.0
"""Pooling window by window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tether.compat.equinox as eqx

RNG = np.random.default_rng(7)


def pooled(x, kernel, stride, pads, fill, reduce):
    x = np.pad(np.asarray(x, np.float64), ((0, 0), *pads), constant_values=fill)
    size = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:], kernel, stride, strict=True)]
    y = np.zeros((x.shape[0], *size))
    for place in np.ndindex(*size):
        window = tuple(slice(p * s, p * s + k) for p, s, k in zip(place, stride, kernel, strict=True))
        y[(slice(None), *place)] = reduce(x[(slice(None), *window)].reshape(len(x), -1), 1)
    return y


CASES = [
    (1, (2, 3), {}, (2,), (3,), ((0, 0),)),
    (1, ((3,), (1,)), {"padding": ((0, 2),)}, (3,), (1,), ((0, 2),)),
    (2, (2, (3, 2)), {}, (2, 2), (3, 2), ((0, 0), (0, 0))),
    (2, ((3, 2), 2), {"padding": (1, 0)}, (3, 2), (2, 2), ((1, 1), (0, 0))),
    (3, (2, 1), {"padding": ((0, 1), (1, 1), (0, 0))}, (2, 2, 2), (1, 1, 1), ((0, 1), (1, 1), (0, 0))),
    (1, (3, 2), {"use_ceil": True}, (3,), (2,), ((0, 0),)),  # 7 = 3 + 2 * 2 is met
    (1, (3, 3), {"use_ceil": True}, (3,), (3,), ((0, 2),)),  # 7 = 3 + 3 + 1: a last window of one element
    (2, (3, 2), {"use_ceil": True, "padding": 1}, (3, 3), (2, 2), ((1, 1), (1, 2))),  # 6 + 2 = 3 + 2 * 2 + 1
]


@pytest.mark.parametrize(("axes", "arguments", "options", "kernel", "stride", "pads"), CASES)
def test_windows(axes, arguments, options, kernel, stride, pads):
    x = jnp.asarray(RNG.normal(size=(2, 7, 6, 5)[: axes + 1]) - 3, jnp.float32)  # a maximum with a 0 would show
    mean = getattr(eqx.nn, f"AvgPool{axes}d")(*arguments, **options)
    np.testing.assert_allclose(mean(x), pooled(x, kernel, stride, pads, 0, np.mean), rtol=1e-5)
    most = getattr(eqx.nn, f"MaxPool{axes}d")(*arguments, **options)
    np.testing.assert_array_equal(most(x), pooled(x, kernel, stride, pads, -np.inf, np.max))
    assert isinstance(most, eqx.nn.Pool) and most.num_spatial_dims == axes
    assert (most.kernel_size, most.stride) == (kernel, stride)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16])
def test_dtypes(dtype):
    x = jnp.arange(4).reshape(1, 4).astype(dtype)
    most = eqx.nn.MaxPool1d(2, 2)(x)
    assert most.dtype == dtype and most.tolist() == [[1, 3]]
    mean = eqx.nn.AvgPool1d(2, 2)(x)
    assert mean.dtype == (jnp.float32 if dtype == jnp.int32 else dtype) and mean.tolist() == [[0.5, 2.5]]


def test_any_operation():
    x = jnp.asarray(RNG.normal(size=(2, 5)), jnp.float32)
    product = eqx.nn.Pool(1.0, lax.mul, 1, 2, padding=1)
    np.testing.assert_allclose(product(x), pooled(x, (2,), (1,), ((1, 1),), 1, np.prod), rtol=1e-5)
    least = eqx.nn.Pool(jnp.inf, lambda a, b: jnp.minimum(a, b), 1, 3, 2)
    np.testing.assert_array_equal(least(x), pooled(x, (3,), (2,), ((0, 0),), np.inf, np.min))
    assert jax.tree.leaves(product) == [1.0, lax.mul]


def test_gradients_under_jit():
    x = jnp.asarray([[1.0, 3.0, 2.0, 0.0]])
    most = jax.jit(jax.grad(lambda x: eqx.nn.MaxPool1d(2, 2)(x).sum()))(x)
    assert most.tolist() == [[0.0, 1.0, 1.0, 0.0]]
    mean = jax.jit(jax.grad(lambda x: eqx.nn.AvgPool1d(2, 2)(x).sum()))(x)
    assert mean.tolist() == [[0.5] * 4]


def test_a_padding_that_is_wider_than_the_window():
    assert eqx.nn.MaxPool1d(2, 1, 2)(jnp.ones((1, 2))).tolist() == [[-jnp.inf, 1.0, 1.0, 1.0, -jnp.inf]]
    with pytest.raises(RuntimeError) as error:
        eqx.nn.MaxPool1d(2, 1, 3)(jnp.ones((1, 8)))
    assert str(error.value) == (
        "MaxPool1d: padding is wider than the window.\n"
        "  got:      padding ((3, 3),), kernel_size (2,), stride (1,)\n"
        "  expected: padding <= kernel_size, on each side\n"
        "  fix:      padding=kernel_size // 2"
    )
    with pytest.raises(RuntimeError) as error:
        eqx.nn.AvgPool1d(2, 3, use_ceil=True)(jnp.ones((1, 9)))
    assert str(error.value) == (
        "AvgPool1d: padding is wider than the window, with what use_ceil adds.\n"
        "  got:      padding ((0, 3),), kernel_size (2,), stride (3,)\n"
        "  expected: padding <= kernel_size, on each side\n"
        "  fix:      one of\n"
        "    1. use_ceil=False\n"
        "    2. a smaller stride or padding"
    )
