# SPDX-License-Identifier: Apache-2.0
"""Adaptive and global pooling against a float64 loop over PyTorch's windows."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError

RNG = np.random.default_rng(0)
AVG = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
MAX = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}


def windows(sizes, out):
    """The place of each output, and the slices of its window."""
    for at in itertools.product(*map(range, out)):
        ends = [(i * n // m, math.ceil((i + 1) * n / m)) for i, n, m in zip(at, sizes, out, strict=True)]
        yield at, tuple(slice(first, end) for first, end in ends)


def oracle(x, out, of_window):
    axes = len(out)
    y = np.zeros((*x.shape[:-axes], *out))
    for at, window in windows(x.shape[-axes:], out):
        y[(..., *at)] = of_window(x[(..., *window)], tuple(range(-axes, 0)))
    return y


@pytest.mark.parametrize(
    ("sizes", "out"),
    [((7,), 3), ((6,), 3), ((3,), 7), ((5,), 1), ((7, 5), (3, None)), ((4, 6), 4), ((2, 3), (5, 2)), ((5, 4, 3), 2)],
)
def test_values(sizes: tuple, out):
    x = RNG.normal(size=(2, 3, *sizes))
    asked = out if isinstance(out, tuple) else (out,) * len(sizes)
    asked = tuple(n if m is None else m for n, m in zip(sizes, asked, strict=True))
    for pool, of_window in ((AVG[len(sizes)](out), np.mean), (MAX[len(sizes)](out), np.max)):
        wanted = oracle(x, asked, of_window)
        y = tether.jit(pool)(x)
        assert y.shape == wanted.shape
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_worked_example():
    """Five elements into three windows: [0, 2), [1, 4), [3, 5)."""
    x = jnp.asarray([[1.0, 3.0, 8.0, 4.0, 2.0]])
    assert nn.AdaptiveAvgPool1d(3)(x).tolist() == [[2.0, 5.0, 3.0]]
    assert nn.AdaptiveMaxPool1d(3)(x).tolist() == [[3.0, 8.0, 4.0]]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_global_pools(axes: int):
    x = RNG.normal(size=(2, 3, 4, 3, 2)[: axes + 2])
    space = tuple(range(2, axes + 2))
    np.testing.assert_allclose(nn.GlobalAvgPool(axes)(x), x.mean(space), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tether.jit(nn.GlobalMaxPool(axes))(x), x.max(space), rtol=1e-6)


def test_first_of_equal_elements_has_the_gradient():
    """In the order of rows, as in PyTorch."""
    x = jnp.asarray(RNG.integers(0, 3, (1, 5, 7)), jnp.float32)
    c = RNG.normal(size=(1, 3, 4))
    wanted = np.zeros(x.shape)
    for at, window in windows((5, 7), (3, 4)):
        part = np.asarray(x)[(0, *window)]
        place = np.unravel_index(part.argmax(), part.shape)
        wanted[(0, *(s.start + p for s, p in zip(window, place, strict=True)))] += c[(0, *at)]
    pool = nn.AdaptiveMaxPool2d((3, 4))
    got = tether.jit(tether.grad(lambda x: (jnp.asarray(c, jnp.float32) * pool(x)).sum()))(x)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    tied = jnp.asarray([[[1.0, 5.0], [5.0, 5.0]]])
    assert tether.grad(lambda x: nn.GlobalMaxPool(2)(x).sum())(tied).tolist() == [[[0.0, 1.0], [0.0, 0.0]]]


def test_gradient_of_an_average_is_shared_out():
    got = tether.grad(lambda x: (jnp.asarray([[6.0, 60.0, 600.0]]) * nn.AdaptiveAvgPool1d(3)(x)).sum())(
        jnp.ones((1, 5))
    )
    assert got.tolist() == [[3.0, 23.0, 20.0, 320.0, 300.0]]


def test_nan_stays_in_its_windows():
    x = jnp.asarray([[1.0, 2.0, 3.0, jnp.nan, 5.0]])
    for pool in (nn.AdaptiveAvgPool1d(3), nn.AdaptiveMaxPool1d(3)):
        assert np.isnan(pool(x)).tolist() == [[False, True, True]]
    for pool in (nn.GlobalAvgPool(1), nn.GlobalMaxPool(1)):
        assert np.isnan(pool(x)).all()


def test_infinite_elements_and_their_gradients():
    x = jnp.asarray([[1.0, 2.0, jnp.inf, -jnp.inf, -jnp.inf]])
    assert nn.AdaptiveMaxPool1d(3)(x).tolist() == [[2.0, jnp.inf, -jnp.inf]]
    got = tether.grad(lambda x: (jnp.asarray([[1.0, 2.0, 3.0]]) * nn.AdaptiveMaxPool1d(3)(x)).sum())(x)
    assert got.tolist() == [[0.0, 1.0, 2.0, 3.0, 0.0]]
    got = tether.grad(lambda x: nn.AdaptiveAvgPool1d(3)(x)[0, 0])(x)
    assert got.tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0]]


def test_averages_are_summed_in_float32():
    """Nine times 30000 overflows float16; a bfloat16 sum of 4096 ones stops at 256."""
    assert nn.AdaptiveAvgPool2d(1)(jnp.full((1, 3, 3), 30000, jnp.float16)).tolist() == [[[30000.0]]]
    assert nn.GlobalAvgPool(2)(jnp.full((1, 3, 3), 30000, jnp.float16)).tolist() == [30000.0]
    assert nn.AdaptiveAvgPool1d(1)(jnp.ones((1, 4096), jnp.bfloat16)).tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.bool_], ids=lambda dtype: dtype.__name__)
def test_integers(dtype):
    x = jnp.asarray([[0, 1, 1, 0]]).astype(dtype)
    for pool, wanted in ((nn.AdaptiveMaxPool1d(3), [[1, 1, 1]]), (nn.GlobalMaxPool(1), [1])):
        assert pool(x).dtype == dtype
        assert pool(x).astype(int).tolist() == wanted
    for pool, wanted in ((nn.AdaptiveAvgPool1d(3), [[0.5, 1.0, 0.5]]), (nn.GlobalAvgPool(1), [0.5])):
        assert pool(x).dtype == jnp.float32
        assert pool(x).tolist() == wanted


def test_sizes_are_read_back_in_one_form_and_empty_batches_pass():
    assert nn.AdaptiveAvgPool2d([3, None]).output_size == (3, None)
    assert nn.AdaptiveAvgPool2d(None).output_size == (None, None)
    assert nn.AdaptiveMaxPool3d(2).output_size == (2, 2, 2)
    for pool in (nn.AdaptiveAvgPool1d(2), nn.AdaptiveMaxPool1d(2)):
        assert pool(jnp.ones((0, 3, 5))).shape == (0, 3, 2)
    assert nn.GlobalMaxPool(1)(jnp.ones((0, 3, 5))).shape == (0, 3)


def test_complex_numbers_have_a_mean_and_no_maximum():
    x = jnp.asarray([[1 + 1j, 3 - 1j]], jnp.complex64)
    assert nn.AdaptiveAvgPool1d(1)(x).tolist() == [[2 + 0j]]
    assert nn.GlobalAvgPool(1)(x).tolist() == [2 + 0j]
    for pool in (nn.AdaptiveMaxPool1d(1), nn.GlobalMaxPool(1)):
        with pytest.raises(DtypeError, match=f"{type(pool).__name__}: complex numbers"):
            pool(x)


POOLS = [nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.GlobalAvgPool(2), nn.GlobalMaxPool(2)]


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: type(pool).__name__)
def test_wrong_inputs(pool: tether.Module):
    name = type(pool).__name__
    with pytest.raises(ShapeError, match=f"{name}: x has 2 axes, one example has 3") as caught:
        pool(jnp.ones((4, 4)))
    assert caught.value.expected == "[..., channels, H, W]"
    with pytest.raises(ShapeError, match=f"{name}: a space axis of x is empty"):
        pool(jnp.ones((2, 4, 0)))
    with pytest.raises(DtypeError, match=f"{name}: the input is not an array of numbers"):
        pool([[[1.0]]])


def test_number_of_sizes_says_what_to_do():
    with pytest.raises(ArgumentError) as caught:
        nn.AdaptiveMaxPool2d((1, 2, 3))
    assert str(caught.value) == (
        "AdaptiveMaxPool2d: output_size has 3 numbers for 2 space axes.\n"
        "  got:      output_size=(1, 2, 3)\n"
        "  expected: an int, or 2 of them; None keeps the size of an axis\n"
        "  fix:      output_size=(1, 1)"
    )


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", (2, 0), True, ()])
def test_wrong_sizes(size):
    with pytest.raises(ArgumentError, match="AdaptiveAvgPool2d: output_size"):
        nn.AdaptiveAvgPool2d(size)


@pytest.mark.parametrize("axes", [0, -1, None, (2,)])
def test_wrong_number_of_axes(axes):
    with pytest.raises(ArgumentError, match="GlobalAvgPool: num_spatial_dims is not an integer of at least 1"):
        nn.GlobalAvgPool(axes)
    with pytest.raises(ArgumentError, match="GlobalMaxPool: num_spatial_dims"):
        nn.GlobalMaxPool(axes)


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: type(pool).__name__)
def test_under_jit_and_vmap(pool: tether.Module):
    x = jnp.asarray(RNG.normal(size=(3, 2, 5, 4)), jnp.float32)
    np.testing.assert_allclose(tether.jit(jax.vmap(pool))(x), tether.jit(pool)(x), rtol=1e-6)
