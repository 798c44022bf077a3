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
MIN = {1: nn.MinPool1d, 2: nn.MinPool2d, 3: nn.MinPool3d}
AVG = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}


def oracle(x, kernel, stride, pads, of_window, dilation=None):
    """Hands each window, NaN where it is padding, to a function."""
    axes = len(kernel)
    dilation = dilation or (1,) * axes
    lead = x.ndim - axes
    x = np.pad(np.asarray(x, np.float64), [(0, 0)] * lead + pads, constant_values=np.nan)
    kernel = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    sizes = [(n - k) // s + 1 for n, k, s in zip(x.shape[lead:], kernel, stride, strict=True)]
    y = np.zeros((*x.shape[:lead], *sizes))
    for at in itertools.product(*map(range, sizes)):
        window = tuple(slice(i * s, i * s + k, d) for i, s, k, d in zip(at, stride, kernel, dilation, strict=True))
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
    (2, {"kernel_size": (3, 2), "padding": "CAUSAL", "stride": 2}, (3, 2), (2, 2), [(2, 0), (1, 0)]),
    (2, {"kernel_size": 4, "padding": "VALID", "stride": 1}, (4, 4), (1, 1), [(0, 0)] * 2),
    (3, {"kernel_size": 2, "stride": 1}, (2,) * 3, (1,) * 3, [(0, 0)] * 3),
    (3, {"kernel_size": 3, "stride": 2, "padding": 1}, (3,) * 3, (2,) * 3, [(1, 1)] * 3),
]


@pytest.mark.parametrize(("axes", "options", "kernel", "stride", "pads"), CASES, ids=str)
def test_values(axes: int, options: dict, kernel: tuple, stride: tuple, pads: list):
    x = RNG.normal(size=(2, 3, 7, 6, 5)[: axes + 2])
    for pool, of_window in (
        (MAX[axes](**options), np.nanmax),
        (MIN[axes](**options), np.nanmin),
        (AVG[axes](**options), padded_mean),
        (AVG[axes](**options, count_include_pad=False), np.nanmean),
    ):
        wanted = oracle(x, kernel, stride, pads, of_window)
        np.testing.assert_allclose(tether.jit(pool)(x), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("axes", "options", "stride", "pads"),
    [
        (1, {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2}, (2,), [(2, 2)]),
        (1, {"kernel_size": 2, "stride": 3, "padding": "SAME", "dilation": 3}, (3,), [(1, 2)]),
        (1, {"kernel_size": 3, "stride": 1, "padding": "CAUSAL", "dilation": 2}, (1,), [(4, 0)]),
        (2, {"kernel_size": (2, 3), "stride": 1, "dilation": (3, 1)}, (1, 1), [(0, 0)] * 2),
        (3, {"kernel_size": 2, "stride": 2, "padding": 1, "dilation": (1, 2, 3)}, (2,) * 3, [(1, 1)] * 3),
    ],
    ids=str,
)
def test_dilated_windows(axes: int, options: dict, stride: tuple, pads: list):
    x = RNG.normal(size=(2, 3, 7, 6, 5)[: axes + 2])
    for pool, of_window in ((MAX[axes](**options), np.nanmax), (MIN[axes](**options), np.nanmin)):
        wanted = oracle(x, pool.kernel_size, stride, pads, of_window, pool.dilation)
        np.testing.assert_allclose(tether.jit(pool)(x), wanted, rtol=1e-6)


# PyTorch's examples: 1. the window of ceil_mode hangs over; 2. it would begin in the padding, and isn't there;
# 3. x is shorter than a window; 4. nothing is left over.
CEIL = [(6, 3, 2, 0, 3), (4, 2, 3, 1, 2), (2, 3, 2, 0, 1), (7, 3, 2, 0, 3)]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "count"), CEIL)
def test_ceil_mode(size: int, kernel: int, stride: int, padding: int, count: int):
    x = RNG.normal(size=(1, size))
    windows = [range(max(first, 0), min(first + kernel, size)) for first in np.arange(count) * stride - padding]
    padded = [min(i * stride + kernel, size + 2 * padding) - i * stride for i in range(count)]
    options = {"stride": stride, "padding": padding, "ceil_mode": True}
    for pool, wanted in (
        (nn.MaxPool1d(kernel, **options), [x[0, w].max() for w in windows]),
        (nn.MinPool1d(kernel, **options), [x[0, w].min() for w in windows]),
        (nn.AvgPool1d(kernel, **options, count_include_pad=False), [x[0, w].mean() for w in windows]),
        (nn.AvgPool1d(kernel, **options), [x[0, w].sum() / n for w, n in zip(windows, padded, strict=True)]),
    ):
        assert pool(x).shape == (1, count)
        np.testing.assert_allclose(pool(x)[0], wanted, rtol=1e-5)


def test_ceil_mode_with_dilation_and_axes_of_their_own():
    x = RNG.normal(size=(1, 6, 7))
    pool = nn.MaxPool2d(2, (3, 4), ((0, 1), (0, 0)), (3, 2), ceil_mode=True)
    wanted = oracle(x, (2, 2), (3, 4), [(0, 1), (0, 0)], np.nanmax, (3, 2))  # fits without a rest
    np.testing.assert_allclose(pool(x), wanted, rtol=1e-6)
    assert pool(np.concatenate([x, x], -1)).shape == (1, 2, 4)  # 14 elements: windows at 0, 4, 8, 12


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize(("pool", "sign"), [(nn.MaxPool2d, 1), (nn.MinPool2d, -1)])
def test_first_of_equal_elements_has_the_gradient(pool: type, sign: int, dilation: int):
    """In the order of rows; windows of 2 x 2 over few different values, so that most have ties."""
    x = sign * jnp.asarray(RNG.integers(0, 3, (1, 5, 6)), jnp.float32)
    layer = pool(2, 1, dilation=dilation)
    c = RNG.normal(size=layer(x).shape)
    wanted = np.zeros(x.shape)
    for i, j in itertools.product(*map(range, c.shape[1:])):
        window = sign * np.asarray(x)[0, i : i + dilation + 1 : dilation, j : j + dilation + 1 : dilation]
        a, b = np.unravel_index(window.argmax(), (2, 2))
        wanted[0, i + a * dilation, j + b * dilation] += c[0, i, j]
    got = tether.jit(tether.grad(lambda x: (jnp.asarray(c, jnp.float32) * layer(x)).sum()))(x)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dilation", [1, 2])
def test_forward_mode(dilation: int):
    pool = nn.MaxPool1d(2, 1, dilation=dilation)
    x, t = jnp.asarray([[1.0, 4.0, 2.0, 3.0]]), jnp.asarray([[10.0, 20.0, 30.0, 40.0]])
    _, moved = tether.jvp(pool, (x,), (t,))
    assert moved.tolist() == {1: [[20.0, 20.0, 40.0]], 2: [[30.0, 20.0]]}[dilation]


def test_padding_never_wins():
    assert nn.MinPool1d(3, padding=1)(jnp.asarray([[5, 3, 4]])).tolist() == [[3]]
    assert nn.MinPool1d(2, dilation=2, padding=1)(jnp.asarray([[5.0, 3.0]])).tolist() == [[3.0]]
    assert nn.MaxPool1d(2, dilation=2, padding=1)(jnp.asarray([[-jnp.inf, -jnp.inf]])).tolist() == [[-jnp.inf]]
    assert nn.MaxPool1d(3, padding=1)(jnp.asarray([[-5.0, -3.0, -4.0]])).tolist() == [[-3.0]]
    assert nn.MaxPool1d(3, padding=1)(jnp.asarray([[-5, -3, -4]])).tolist() == [[-3]]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint8, jnp.bool_], ids=lambda dtype: dtype.__name__)
def test_integers(dtype):
    x = jnp.asarray([[0, 1, 1, 3]]).astype(dtype)
    most, mean = nn.MaxPool1d(2, padding=1)(x), nn.AvgPool1d(2)(x)
    least = nn.MinPool1d(2, padding=1)(x)
    assert (most.dtype, least.dtype) == (dtype, dtype)
    assert least.astype(int).tolist() == [[0, 1, int(x[0, 3])]]
    assert nn.MaxPool1d(2, dilation=3)(x).tolist() == [[x[0, 3].item()]]
    assert most.astype(int).tolist() == [[0, 1, int(x[0, 3])]]
    assert mean.dtype == jnp.float32
    assert mean.tolist() == [[0.5, (1 + int(x[0, 3])) / 2]]


def test_average_is_summed_in_float32():
    """Nine times 30000 overflows float16; a bfloat16 sum of 4096 ones stops at 256."""
    assert nn.AvgPool2d(3)(jnp.full((1, 3, 3), 30000, jnp.float16)).tolist() == [[[30000.0]]]
    assert nn.AvgPool1d(4096)(jnp.ones((1, 4096), jnp.bfloat16)).tolist() == [[1.0]]


@pytest.mark.parametrize(
    "pool", [nn.MaxPool1d(2), nn.MinPool1d(2), nn.AvgPool1d(2)], ids=lambda pool: type(pool).__name__
)
def test_nan_is_not_hidden(pool: tether.Module):
    assert np.isnan(pool(jnp.asarray([[1.0, jnp.nan, 2.0, 3.0]]))).tolist() == [[True, False]]


@pytest.mark.parametrize("pool", [nn.MaxPool1d, nn.MinPool1d])
def test_nan_is_not_hidden_from_dilated_windows(pool: type):
    y = pool(2, 1, dilation=2)(jnp.asarray([[1.0, jnp.nan, 2.0, 3.0]]))
    assert np.isnan(y).tolist() == [[False, True]]


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


def test_window_that_lies_in_the_padding_says_what_to_do():
    with pytest.raises(ShapeError) as caught:
        nn.MaxPool1d(2, padding=1, dilation=2)(jnp.ones((3, 1)))
    assert str(caught.value) == (
        "MaxPool1d: a window has all of its elements in the padding.\n"
        "  at:       the module itself  (MaxPool1d)\n"
        "  got:      float32[3, 1], padding ((1, 1),), dilation (2,)\n"
        "  expected: at least one element of x in each window\n"
        "  fix:      one of\n"
        "    1. less padding\n"
        "    2. a smaller dilation"
    )


def test_padding_as_wide_as_the_window_says_how_wide_it_may_be():
    with pytest.raises(ArgumentError) as caught:
        nn.MaxPool1d(2, padding=3, dilation=2)
    assert str(caught.value) == (
        "MaxPool1d: padding as wide as the window leaves windows without an element.\n"
        "  got:      padding=((3, 3),), kernel_size=(2,)\n"
        "  expected: padding < (kernel_size - 1) * dilation + 1 on each side\n"
        "  fix:      padding=kernel_size // 2"
    )


@pytest.mark.parametrize("pool", [nn.MaxPool2d, nn.MinPool2d, nn.AvgPool2d])
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

    def test_ceil_mode_needs_a_window_that_begins_in_x(self, pool: type):
        assert pool(3, 2, ceil_mode=True)(jnp.ones((1, 2, 2))).shape == (1, 1, 1)
        with pytest.raises(ShapeError, match="the window is larger than the padded input"):
            pool(3, 1, ceil_mode=True)(jnp.ones((1, 2, 2)))

    def test_empty_space_axis(self, pool: type):
        with pytest.raises(ShapeError, match="a space axis of x is empty"):
            pool(3, padding=2)(jnp.ones((1, 4, 0)))

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
            ({"kernel_size": 2, "padding": (1, 1, 1)}, "padding has 3 numbers for 2 space axes"),
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


@pytest.mark.parametrize("pool", [nn.MaxPool2d, nn.MinPool2d])
@pytest.mark.parametrize("dilation", [0, -1, 1.5, (1, 1, 1), True])
def test_wrong_dilation(pool: type, dilation):
    with pytest.raises(ArgumentError, match=f"{pool.__name__}: dilation"):
        pool(2, dilation=dilation)
