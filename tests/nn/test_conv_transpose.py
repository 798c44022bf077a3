# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions against a float64 loop, the gradient of JAX's convolution, and jax.lax.conv_transpose."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tether
from tether import nn
from tether.errors import ArgumentError, ShapeError

RNG = np.random.default_rng(0)
CLASSES = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def drawn(key, shape, dtype):
    """An initializer that needs no compilation."""
    return RNG.normal(size=shape)


DRAWN = {"weight_init": drawn, "bias_init": drawn}


def oracle(x, weight, bias, stride, pads, dilation, groups, more, flipped):
    """Scatters each element of x, times the kernel, into the output, and takes the padding off."""
    x, weight = (np.asarray(a, np.float64) for a in (x, weight))
    kernel, inputs, outputs = weight.shape[2:], weight.shape[0] // groups, weight.shape[1]
    if not flipped:
        weight = weight[(slice(None), slice(None), *[slice(None, None, -1)] * len(kernel))]
    sizes = [
        (n - 1) * s + (k - 1) * d + 1 + m
        for n, s, k, d, m in zip(x.shape[2:], stride, kernel, dilation, more, strict=True)
    ]
    y = np.zeros((x.shape[0], outputs * groups, *sizes))
    places = itertools.product(*map(range, x.shape[2:])), itertools.product(*map(range, kernel))
    for q, j in itertools.product(*places):
        at = tuple(a * s + b * d for a, s, b, d in zip(q, stride, j, dilation, strict=True))
        for i, o in itertools.product(range(weight.shape[0]), range(outputs)):
            y[(slice(None), i // inputs * outputs + o, *at)] += weight[(i, o, *j)] * x[(slice(None), i, *q)]
    y = y[(slice(None), slice(None), *(slice(a, n - b) for n, (a, b) in zip(y.shape[2:], pads, strict=True)))]
    return y if bias is None else y + np.asarray(bias, np.float64).reshape(-1, *[1] * len(kernel))


CASES = [
    (1, {"kernel_size": 3}, [(0, 0)], [0]),
    (1, {"kernel_size": 4, "stride": 3, "padding": 2, "dilation": 2, "output_padding": 2, "groups": 2}, [(2, 2)], [2]),
    (1, {"kernel_size": 2, "stride": 1, "padding": ((3, 0),), "dilation": 2}, [(3, 0)], [0]),
    (2, {"kernel_size": (3, 2), "stride": 2, "padding": (0, 1), "output_padding": (1, 0)}, [(0, 0), (1, 1)], [1, 0]),
    (2, {"kernel_size": (4, 2), "stride": (1, 3), "padding": "SAME", "groups": 2}, [(1, 2), (0, 0)], [0, 1]),
    (2, {"kernel_size": (4, 2), "stride": (1, 3), "padding": "same_lower"}, [(2, 1), (0, 0)], [0, 1]),
    (2, {"kernel_size": 2, "stride": (1, 3), "padding": "VALID", "use_bias": False}, [(0, 0)] * 2, [0, 1]),
    (3, {"kernel_size": (1, 2, 2), "stride": (2, 1, 1), "groups": 4}, [(0, 0)] * 3, [0, 0, 0]),
]


@pytest.mark.parametrize("convention", ["gradient", "correlation"])
@pytest.mark.parametrize(("axes", "options", "pads", "more"), CASES, ids=str)
def test_values(axes: int, options: dict, pads: list, more: list, convention: str):
    layer = CLASSES[axes](4, 8, **options, convention=convention, **DRAWN)
    x = RNG.normal(size=(2, 4, 4, 3, 2)[: axes + 2])
    wanted = oracle(
        x, layer.weight, layer.bias, layer.stride, pads, layer.dilation, layer.groups, more, convention == "gradient"
    )
    y = tether.jit(layer)(x)
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    if "SAME" in str(options.get("padding")).upper():
        assert y.shape[2:] == tuple(n * s for n, s in zip(x.shape[2:], layer.stride, strict=True))


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 1))], ids=str)
@pytest.mark.parametrize(("stride", "dilation"), [(1, 2), (3, 1)])
def test_it_is_the_gradient_of_a_convolution(padding, stride: int, dilation: int):
    """By its input, with the same weight and settings; the size of the input says how long the output is."""
    layer = nn.ConvTranspose2d(4, 6, 2, stride, padding, dilation, 2, use_bias=False, **DRAWN)
    y = jnp.asarray(RNG.normal(size=(1, 4, 3, 4)), jnp.float32)
    image = layer(y)

    def convolve(x):
        return lax.conv_general_dilated(
            x, layer.weight, (stride, stride), padding, rhs_dilation=(dilation, dilation), feature_group_count=2
        )

    (wanted,) = jax.linear_transpose(convolve, jax.ShapeDtypeStruct(image.shape, jnp.float32))(y)
    np.testing.assert_allclose(image, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("convention", ["gradient", "correlation"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 2, 1), (4, 2, 1), (4, 3, 2), (1, 2, 1), (2, 5, 3)])
def test_it_is_conv_transpose_of_jax(convention: str, padding: str, kernel: int, stride: int, dilation: int):
    layer = nn.ConvTranspose1d(2, 3, kernel, stride, padding, dilation, convention=convention, use_bias=False, **DRAWN)
    x = jnp.asarray(RNG.normal(size=(1, 2, 4)), jnp.float32)
    flipped = convention == "gradient"
    names = ("NCH", "OIH" if flipped else "IOH", "NCH")
    wanted = lax.conv_transpose(x, layer.weight, (stride,), padding, (dilation,), names, transpose_kernel=flipped)
    y = tether.jit(layer)(x)
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


def test_layout_and_first_values(key: jax.Array):
    layer = nn.ConvTranspose2d(4, 400, 5, groups=4, key=key)  # U(-bound, bound), bound = 1 / sqrt(100 * 25)
    assert layer.weight.shape == (4, 100, 5, 5)
    assert layer.bias.shape == (400,)
    for values in (layer.weight, layer.bias):
        assert 0.97 * 0.02 < float(jnp.abs(values).max()) <= 0.02 * (1 + 1e-6)
        assert float(values.std()) == pytest.approx(0.02 / 3**0.5, rel=0.1)
    without = nn.ConvTranspose2d(4, 400, 5, groups=4, use_bias=False, key=key)
    np.testing.assert_array_equal(without.weight, layer.weight)
    assert list(tether.variables(without)) == ["weight"]


def test_settings_are_read_back_in_one_form():
    layer = nn.ConvTranspose2d(2, 4, 3, 2, [1, 2], output_padding=1, **DRAWN)
    assert (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), (2, 2), ((1, 1), (2, 2)))
    assert (layer.dilation, layer.output_padding, layer.groups, layer.convention) == ((1, 1), (1, 1), 1, "gradient")


def test_gradient_equals_plain_lax():
    layer = nn.ConvTranspose1d(2, 3, 3, 2, 1, **DRAWN)
    x, c = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((2, 2, 4), (2, 3, 7)))

    def plain(weight, bias, x):
        y = lax.conv_transpose(x, weight, (2,), [(1, 1)], None, ("NCH", "OIH", "NCH"), transpose_kernel=True)
        return (c * (y + bias.reshape(1, 3, 1))).sum()

    wanted = jax.grad(plain, argnums=(0, 1, 2))(layer.weight, layer.bias, x)
    grads = tether.grad(lambda layer: (c * layer(x)).sum())(layer)
    got = grads.weight, grads.bias, tether.grad(lambda x: (c * layer(x)).sum())(x)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_integers_and_empty_batches():
    layer = nn.ConvTranspose1d(1, 2, 3, **DRAWN)
    x = RNG.integers(0, 9, (1, 1, 4)).astype(np.uint8)
    assert layer(x).dtype == jnp.float32
    np.testing.assert_allclose(
        layer(x), oracle(x, layer.weight, layer.bias, (1,), [(0, 0)], (1,), 1, [0], True), rtol=1e-4, atol=1e-4
    )
    assert layer(jnp.ones((2, 0, 1, 4))).shape == (2, 0, 2, 6)


def test_padding_that_leaves_nothing_says_what_to_do():
    layer = nn.ConvTranspose2d(1, 1, 3, padding=((0, 0), (2, 3)), **DRAWN)
    assert layer(jnp.ones((1, 1, 4))).shape == (1, 3, 1)
    with pytest.raises(ShapeError) as caught:
        layer(jnp.ones((1, 1, 3)))
    assert str(caught.value) == (
        "ConvTranspose2d: padding takes the whole output off.\n"
        "  at:       the module itself  (ConvTranspose2d)\n"
        "  got:      float32[1, 1, 3], padding ((0, 0), (2, 3)): space axes (3, 0) would be left\n"
        "  expected: at least 1 of (size - 1) * stride + (kernel_size - 1) * dilation + 1 on each axis\n"
        "  fix:      one of\n"
        "    1. padding='SAME'\n"
        "    2. a larger input"
    )


def test_output_padding_says_how_much_there_may_be():
    assert nn.ConvTranspose1d(1, 1, 3, 2, dilation=4, output_padding=3, **DRAWN).output_padding == (3,)
    with pytest.raises(ArgumentError) as caught:
        nn.ConvTranspose2d(1, 1, 3, (2, 3), output_padding=2)
    assert str(caught.value) == (
        "ConvTranspose2d: output_padding is not below the larger of stride and dilation.\n"
        "  got:      output_padding=(2, 2), stride=(2, 3), dilation=(1, 1)\n"
        "  expected: at most (1, 2)\n"
        "  fix:      less padding makes the output larger too"
    )


def test_output_padding_beside_a_word_is_refused():
    with pytest.raises(ArgumentError) as caught:
        nn.ConvTranspose1d(1, 1, 3, 2, "SAME", output_padding=1)
    assert str(caught.value) == (
        "ConvTranspose1d: padding 'SAME' already says how large the output is.\n"
        "  got:      output_padding=(1,), padding='SAME'\n"
        "  expected: output_padding=0, or padding in numbers\n"
        "  fix:      one of\n"
        "    1. output_padding=0\n"
        "    2. padding=0"
    )


def test_unknown_convention_says_what_there_is():
    with pytest.raises(ArgumentError) as caught:
        nn.ConvTranspose1d(1, 1, 3, convention="torch")
    assert str(caught.value) == (
        "ConvTranspose1d: convention is none that there is.\n"
        "  got:      convention='torch'\n"
        "  expected: 'gradient' (PyTorch) or 'correlation' (Equinox, Flax, Haiku)\n"
        "  fix:      convention='gradient'"
    )


def test_word_that_means_nothing_here():
    with pytest.raises(ArgumentError) as caught:
        nn.ConvTranspose1d(1, 1, 3, padding="CAUSAL")
    assert str(caught.value) == (
        "ConvTranspose1d: padding is a word that means nothing here.\n"
        "  got:      padding='CAUSAL'\n"
        "  expected: 'SAME', 'SAME_LOWER', 'VALID', or numbers\n"
        "  fix:      padding='SAME'"
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 4), "x has 2 axes, one example has 3"),
        ((3, 4, 4), "axis -3 of x has 3 channels, not 2"),
        ((2, 4, 0), "a space axis of x is empty"),
    ],
)
def test_wrong_inputs(shape: tuple, message: str):
    with pytest.raises(ShapeError, match=f"ConvTranspose2d: {message}"):
        nn.ConvTranspose2d(2, 3, 3, **DRAWN)(jnp.ones(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 0}, "kernel_size is not an integer of at least 1"),
        ({"stride": 0}, "stride is not an integer of at least 1"),
        ({"dilation": -1}, "dilation is not an integer of at least 1"),
        ({"padding": -1}, "padding is not an integer of at least 0"),
        ({"padding": (1, 2, 3)}, "padding has 3 numbers for 2 space axes"),
        ({"padding": "CIRCULAR"}, "padding is a word that means nothing here"),
        ({"output_padding": -1}, "output_padding is not an integer of at least 0"),
        ({"output_padding": (0, 0, 0)}, "output_padding has 3 numbers for 2 space axes"),
        ({"groups": 3}, "groups doesn't divide the channels"),
        ({"convention": None}, "convention is none that there is"),
        ({"dtype": jnp.int32}, "dtype is not a floating dtype"),
    ],
    ids=str,
)
def test_wrong_options(options: dict, message: str):
    with pytest.raises(ArgumentError, match=f"ConvTranspose2d: {message}") as caught:
        nn.ConvTranspose2d(2, 4, **{"kernel_size": 3, **options})
    assert caught.value.got and caught.value.expected and caught.value.fixes


def test_size_is_that_of_the_formula():
    """length' = (length - 1) * stride + extent - before - after + output_padding."""
    layer = nn.ConvTranspose1d(1, 1, 3, 4, ((1, 2),), 2, output_padding=3, **DRAWN)
    assert layer(jnp.ones((1, 6))).shape[-1] == 5 * 4 + 5 - 3 + 3
    assert math.ceil((25 + 3 - 5 + 1) / 4) == 6  # and the Conv1d of these settings takes it back
