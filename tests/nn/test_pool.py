# SPDX-License-Identifier: Apache-2.0
"""Pooling against a plain float64 loop; that loop was checked against PyTorch 2.13."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError

RNG = np.random.default_rng(0)
MAX = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}


def oracle(x, kernel, stride, pads, of_window):
    """Hands each window, NaN where it is padding, to a function."""
    axes = len(kernel)
    lead = x.ndim - axes
    x = np.pad(np.asarray(x, np.float64), [(0, 0)] * lead + pads, constant_values=np.nan)
    sizes = [(n - k) // s + 1 for n, k, s in zip(x.shape[lead:], kernel, stride, strict=True)]
    y = np.zeros((*x.shape[:lead], *sizes))
    for at in itertools.product(*map(range, sizes)):
        window = tuple(slice(i * s, i * s + k) for i, s, k in zip(at, stride, kernel, strict=True))
        y[(..., *at)] = of_window(x[(..., *window)], tuple(range(-axes, 0)))
    return y


def padded_mean(window, axes):
    return np.nan_to_num(window).mean(axes)


CASES = [
    (1, {"kernel_size": 2}, (2,), (2,), [(0, 0)]),
    (1, {"kernel_size": 3, "stride": 1, "padding": ((2, 0),)}, (3,), (1,), [(2, 0)]),
    (2, {"kernel_size": 2}, (2, 2), (2, 2), [(0, 0)] * 2),
    (2, {"kernel_size": 3, "stride": 2, "padding": 1}, (3, 3), (2, 2), [(1, 1)] * 2),
    (2, {"kernel_size": (3, 2), "stride": (1, 3), "padding": (0, 1)}, (3, 2), (1, 3), [(0, 0), (1, 1)]),
    (2, {"kernel_size": 3, "padding": "SAME"}, (3, 3), (3, 3), [(1, 1), (0, 0)]),
    (2, {"kernel_size": 4, "padding": "VALID", "stride": 1}, (4, 4), (1, 1), [(0, 0)] * 2),
    (3, {"kernel_size": 2, "stride": 1}, (2,) * 3, (1,) * 3, [(0, 0)] * 3),
    (3, {"kernel_size": 3, "stride": 2, "padding": 1}, (3,) * 3, (2,) * 3, [(1, 1)] * 3),
]


@pytest.mark.parametrize(("axes", "options", "kernel", "stride", "pads"), CASES, ids=str)
def test_values(axes: int, options: dict, kernel: tuple, stride: tuple, pads: list):
    x = RNG.normal(size=(2, 3, 7, 6, 5)[: axes + 2])
    for pool, of_window in (
        (MAX[axes](**options), np.nanmax),
        (AVG[axes](**options), padded_mean),
        (AVG[axes](**options, count_include_pad=False), np.nanmean),
    ):
        wanted = oracle(x, kernel, stride, pads, of_window)
        np.testing.assert_allclose(pool(x), wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pool(x[0]), wanted[0], rtol=1e-5, atol=1e-6)


def test_padding_never_wins_a_maximum():
    assert nn.MaxPool1d(3, padding=1)(jnp.asarray([[-5.0, -3.0, -4.0]])).tolist() == [[-3.0]]
    assert nn.MaxPool1d(3, padding=1)(jnp.asarray([[-5, -3, -4]])).tolist() == [[-3]]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint8, jnp.bool_], ids=lambda dtype: dtype.__name__)
def test_integers(dtype):
    x = jnp.asarray([[0, 1, 1, 3]]).astype(dtype)
    most, mean = nn.MaxPool1d(2, padding=1)(x), nn.AvgPool1d(2)(x)
    assert most.dtype == dtype
    assert most.astype(int).tolist() == [[0, 1, int(x[0, 3])]]
    assert mean.dtype == jnp.float32
    assert mean.tolist() == [[0.5, (1 + int(x[0, 3])) / 2]]


def test_average_is_summed_in_float32():
    """Nine times 30000 overflows float16; a bfloat16 sum of 4096 ones stops at 256."""
    assert nn.AvgPool2d(3)(jnp.full((1, 3, 3), 30000, jnp.float16)).tolist() == [[[30000.0]]]
    assert nn.AvgPool1d(4096)(jnp.ones((1, 4096), jnp.bfloat16)).tolist() == [[1.0]]


def test_nan_is_not_hidden():
    x = jnp.asarray([[1.0, jnp.nan, 2.0, 3.0]])
    for pool in (nn.MaxPool1d(2), nn.AvgPool1d(2)):
        y = pool(x)
        assert np.isnan(y[0, 0])
        assert np.isfinite(y[0, 1])


def test_gradients():
    x = jnp.asarray(RNG.permutation(36).reshape(1, 6, 6), jnp.float32)
    c = jnp.asarray(RNG.normal(size=(1, 3, 3)), jnp.float32)
    wide = np.kron(np.asarray(c[0]), np.ones((2, 2)))[None]
    windows = np.asarray(x).reshape(1, 3, 2, 3, 2)
    is_max = (windows == windows.max((2, 4), keepdims=True)).reshape(1, 6, 6)
    most = tether.grad(lambda x: (c * nn.MaxPool2d(2)(x)).sum())(x)
    mean = tether.grad(lambda x: (c * nn.AvgPool2d(2)(x)).sum())(x)
    np.testing.assert_allclose(most, is_max * wide, rtol=1e-6)
    np.testing.assert_allclose(mean, wide / 4, rtol=1e-6)
    jitted = tether.jit(lambda x: tether.grad(lambda x: (c * nn.MaxPool2d(2)(x)).sum())(x))
    np.testing.assert_allclose(jitted(x), most, rtol=1e-6)


def test_settings_are_read_back_in_one_form():
    pool = nn.MaxPool2d(3, padding=1)
    assert (pool.kernel_size, pool.stride, pool.padding) == ((3, 3), (3, 3), ((1, 1), (1, 1)))


def test_complex_numbers_have_a_mean_and_no_maximum():
    x = jnp.asarray([[1 + 1j, 3 - 1j]], jnp.complex64)
    assert nn.AvgPool1d(2)(x).tolist() == [[2 + 0j]]
    with pytest.raises(DtypeError, match="MaxPool1d: complex numbers"):
        nn.MaxPool1d(2)(x)


@pytest.mark.parametrize("pool", [nn.MaxPool2d, nn.AvgPool2d])
class TestErrors:
    def test_input_smaller_than_the_window(self, pool: type):
        with pytest.raises(ShapeError) as caught:
            pool(3)(jnp.ones((5, 2, 8)))
        assert str(caught.value) == (
            f"{pool.__name__}: the window is larger than the padded input.\n"
            f"  at:       the module itself  ({pool.__name__})\n"
            "  got:      float32[5, 2, 8], window (3, 3), padding ((0, 0), (0, 0))\n"
            "  expected: space axes of at least (3, 3)\n"
            "  fix:      one of\n"
            "    1. a larger input\n"
            "    2. padding='SAME'\n"
            "    3. a smaller kernel_size"
        )

    def test_wrong_rank(self, pool: type):
        with pytest.raises(ShapeError, match=f"{pool.__name__}: x has 2 axes, one example has 3") as caught:
            pool(2)(jnp.ones((4, 4)))
        assert caught.value.expected == "[..., channels, H, W]"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kernel_size": 0}, "kernel_size is not an integer of at least 1"),
            ({"kernel_size": 2, "stride": -1}, "stride is not an integer of at least 1"),
            ({"kernel_size": 2, "padding": -1}, "padding is not an integer of at least 0"),
            ({"kernel_size": 2, "padding": 2}, "padding as wide as the window leaves windows without an element"),
            ({"kernel_size": (2, 3), "padding": ((0, 2), (0, 0))}, "padding as wide as the window"),
            ({"kernel_size": (2, 2, 2)}, "kernel_size has 3 numbers for 2 space axes"),
            ({"kernel_size": 2, "padding": "FULL"}, "padding is a word that means nothing here"),
        ],
        ids=str,
    )
    def test_wrong_options(self, pool: type, options: dict, message: str):
        with pytest.raises(ArgumentError, match=f"{pool.__name__}: {message}"):
            pool(**options)


def test_axes_are_in_the_message():
    with pytest.raises(ShapeError) as caught:
        nn.MaxPool3d(2)(jax.numpy.ones((4, 4, 4)))
    assert caught.value.expected == "[..., channels, D, H, W]"
