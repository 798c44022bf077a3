# SPDX-License-Identifier: Apache-2.0
"""Convolutions against a plain float64 loop. Loop and default first values were checked against PyTorch 2.13."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, ShapeError

RNG = np.random.default_rng(0)
CLASSES = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def drawn(key, shape, dtype):
    """An initializer that needs no compilation: most tests here want many shapes, and any values."""
    return RNG.normal(size=shape)


DRAWN = {"weight_init": drawn, "bias_init": drawn}


def oracle(x, weight, bias, stride, pads, dilation, groups):
    """Cross-correlation by the definition: one output element at a time."""
    x, weight = (np.asarray(a, np.float64) for a in (x, weight))
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    kernel = weight.shape[2:]
    sizes = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]
    y = np.zeros((x.shape[0], weight.shape[0], *sizes))
    inputs, outputs = weight.shape[1], weight.shape[0] // groups
    for o, at in itertools.product(range(weight.shape[0]), itertools.product(*map(range, sizes))):
        window = tuple(
            slice(i * s, i * s + (k - 1) * d + 1, d) for i, s, k, d in zip(at, stride, kernel, dilation, strict=True)
        )
        first = o // outputs * inputs
        y[(slice(None), o, *at)] = (x[(slice(None), slice(first, first + inputs), *window)] * weight[o]).sum(
            tuple(range(1, x.ndim))
        )
    return y if bias is None else y + np.asarray(bias, np.float64).reshape(-1, *[1] * len(kernel))


CASES = [
    (1, {"kernel_size": 3}, [(0, 0)]),
    (1, {"kernel_size": 4, "stride": 2, "padding": 3, "dilation": 2, "groups": 2}, [(3, 3)]),
    (1, {"kernel_size": 2, "padding": ((2, 0),)}, [(2, 0)]),
    (2, {"kernel_size": 1, "use_bias": False}, [(0, 0), (0, 0)]),
    (
        2,
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2},
        [(1, 1), (2, 2)],
    ),
    (2, {"kernel_size": 3, "padding": ((1, 0), (2, 3)), "groups": 4}, [(1, 0), (2, 3)]),
    (2, {"kernel_size": 3, "padding": "SAME"}, [(1, 1), (1, 1)]),
    (2, {"kernel_size": (2, 4), "padding": "same", "dilation": (2, 1)}, [(1, 1), (1, 2)]),
    (2, {"kernel_size": 2, "padding": "SAME_LOWER"}, [(1, 0), (1, 0)]),
    (2, {"kernel_size": 3, "padding": "SAME", "stride": 2}, [(1, 1), (0, 1)]),
    (2, {"kernel_size": 3, "padding": "valid"}, [(0, 0), (0, 0)]),
    (3, {"kernel_size": (1, 2, 3), "padding": (0, 1, 2), "groups": 4}, [(0, 0), (1, 1), (2, 2)]),
    (3, {"kernel_size": 2, "stride": (1, 2, 3)}, [(0, 0)] * 3),
]


@pytest.mark.parametrize(("axes", "options", "pads"), CASES, ids=str)
def test_values(axes: int, options: dict, pads: list):
    conv = CLASSES[axes](4, 8, **options, **DRAWN)
    x = RNG.normal(size=(2, 4, 7, 6, 5)[: axes + 2])
    y = conv(x)
    wanted = oracle(x, conv.weight, conv.bias, conv.stride, pads, conv.dilation, conv.groups)
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(conv(x[0]), wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "options", "shape", "bound"),
    [
        (1, {"kernel_size": 25}, (400, 4, 25), 0.1),
        (2, {"kernel_size": 5, "groups": 4}, (400, 1, 5, 5), 0.2),
    ],
    ids=str,
)
def test_layout_and_first_values(axes: int, options: dict, shape: tuple, bound: float, key: jax.Array):
    conv = CLASSES[axes](4, 400, **options, key=key)
    assert conv.weight.shape == shape
    assert conv.bias.shape == (400,)
    assert math.prod(shape[1:]) == pytest.approx(bound**-2)
    for values in (conv.weight, conv.bias):  # U(-bound, bound)
        assert 0.97 * bound < float(jnp.abs(values).max()) <= bound * (1 + 1e-6)
        assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.1)


def test_weight_of_a_key_does_not_depend_on_the_bias(key: jax.Array):
    with_bias, without = (nn.Conv2d(2, 3, 3, use_bias=flag, key=key) for flag in (True, False))
    np.testing.assert_array_equal(with_bias.weight, without.weight)
    assert list(tether.variables(without)) == ["weight"]
    assert without.bias is None


def test_settings_are_read_back_in_one_form():
    conv = nn.Conv2d(2, 4, 3, padding=[1, 2], **DRAWN)
    assert (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((3, 3), (1, 1), ((1, 1), (2, 2)), (1, 1))
    assert (conv.in_channels, conv.out_channels, conv.groups, conv.num_spatial_dims) == (2, 4, 1, 2)


def test_integer_images_compute_in_the_dtype_of_the_parameters():
    conv = nn.Conv2d(1, 2, 3, **DRAWN)
    x = RNG.integers(0, 256, (2, 1, 5, 5)).astype(np.uint8)
    y = conv(x)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(
        y, oracle(x, conv.weight, conv.bias, (1, 1), [(0, 0)] * 2, (1, 1), 1), rtol=1e-4, atol=1e-2
    )


def test_empty_batch():
    assert nn.Conv2d(1, 2, 3, **DRAWN)(jnp.ones((0, 1, 5, 5))).shape == (0, 2, 3, 3)
    assert nn.Conv2d(1, 2, 3, **DRAWN)(jnp.ones((2, 0, 1, 5, 5))).shape == (2, 0, 2, 3, 3)


def test_gradient_equals_plain_lax():
    conv = nn.Conv2d(2, 3, 3, padding=1, **DRAWN)
    x, c = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((2, 2, 5, 5), (2, 3, 5, 5)))

    def plain(weight, bias, x):
        y = jax.lax.conv(x, weight, (1, 1), "SAME") + bias.reshape(1, 3, 1, 1)
        return (c * y).sum()

    wanted = jax.grad(plain, argnums=(0, 1, 2))(conv.weight, conv.bias, x)
    grads = tether.grad(lambda conv: (c * conv(x)).sum())(conv)
    got = grads.weight, grads.bias, tether.grad(lambda x: (c * conv(x)).sum())(x)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


BEYOND = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@pytest.mark.parametrize(
    ("axes", "options", "pads"),
    [
        (1, {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"}, [(2, 2)]),
        (1, {"kernel_size": 3, "padding": "causal", "dilation": 3, "stride": 2}, [(6, 0)]),
        (1, {"kernel_size": 3, "padding": "CAUSAL", "padding_mode": "REPLICATE"}, [(2, 0)]),
        (1, {"kernel_size": 2, "padding": ((9, 8),), "padding_mode": "circular"}, [(9, 8)]),
        (2, {"kernel_size": (2, 3), "padding": "CAUSAL"}, [(1, 0), (2, 0)]),
        (2, {"kernel_size": (3, 4), "padding": "SAME", "padding_mode": "circular"}, [(1, 1), (1, 2)]),
        (2, {"kernel_size": 3, "padding": "SAME", "stride": 2, "padding_mode": "reflect"}, [(1, 1), (0, 1)]),
        (2, {"kernel_size": 2, "padding": ((0, 9), (1, 0)), "padding_mode": "Replicate"}, [(0, 9), (1, 0)]),
        (3, {"kernel_size": 2, "padding": (0, 1, 2), "padding_mode": "reflect", "groups": 2}, [(0, 0), (1, 1), (2, 2)]),
    ],
    ids=str,
)
def test_what_lies_beyond_the_edge(axes: int, options: dict, pads: list):
    conv = CLASSES[axes](4, 4, **options, **DRAWN)
    x = RNG.normal(size=(2, 4, 7, 6, 5)[: axes + 2])
    wide = np.pad(x, [(0, 0), (0, 0), *pads], mode=BEYOND[conv.padding_mode])
    wanted = oracle(wide, conv.weight, conv.bias, conv.stride, [(0, 0)] * axes, conv.dilation, conv.groups)
    np.testing.assert_allclose(conv(x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["zeros", "replicate"])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 3)])
def test_causal_output_sees_nothing_later(mode: str, stride: int, dilation: int):
    conv = nn.Conv1d(1, 1, 3, stride, "CAUSAL", dilation, padding_mode=mode, **DRAWN)
    x = jnp.asarray(RNG.normal(size=(1, 10)), jnp.float32)
    seen = jax.jacobian(conv)(x)[0, :, 0] != 0
    assert seen.shape == (math.ceil(10 / stride), 10)
    for t in range(seen.shape[0]):
        assert seen[t, t * stride]
        assert not seen[t, t * stride + 1 :].any()


def test_reflected_past_the_other_edge_says_what_to_do():
    conv = nn.Conv2d(1, 1, 3, padding=((2, 0), (0, 3)), padding_mode="reflect", **DRAWN)
    assert conv(jnp.ones((1, 3, 4))).shape == (1, 3, 5)
    with pytest.raises(ShapeError) as caught:
        conv(jnp.ones((1, 2, 4)))
    assert str(caught.value) == (
        "Conv2d: x has too few elements to be reflected this far.\n"
        "  at:       the module itself  (Conv2d)\n"
        "  got:      float32[1, 2, 4], padding ((2, 0), (0, 3))\n"
        "  expected: space axes of at least (3, 4)\n"
        "  fix:      one of\n"
        "    1. padding_mode='replicate'\n"
        "    2. less padding: a smaller kernel_size or dilation"
    )
    with pytest.raises(ShapeError, match="to be reflected this far"):
        conv(jnp.ones((1, 3, 3)))


def test_unknown_padding_mode_says_what_there_is():
    with pytest.raises(ArgumentError) as caught:
        nn.Conv1d(1, 1, 3, padding=1, padding_mode="wrap")
    assert str(caught.value) == (
        "Conv1d: padding_mode is none that there is.\n"
        "  got:      padding_mode='wrap'\n"
        "  expected: one of 'zeros', 'reflect', 'replicate', 'circular'\n"
        "  fix:      padding_mode='zeros'"
    )


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_causal_with_later_elements_before_the_first_is_refused(mode: str):
    with pytest.raises(ArgumentError) as caught:
        nn.Conv1d(1, 1, 3, padding="CAUSAL", padding_mode=mode)
    assert str(caught.value) == (
        f"Conv1d: padding_mode '{mode}' puts later elements before the first, which is not causal.\n"
        f"  got:      padding='CAUSAL', padding_mode='{mode}'\n"
        "  expected: padding_mode 'zeros' or 'replicate' with padding 'CAUSAL'\n"
        "  fix:      one of\n"
        "    1. padding_mode='replicate'\n"
        "    2. padding='SAME'"
    )


def test_mode_where_padding_belongs_says_where_it_goes():
    with pytest.raises(ArgumentError) as caught:
        nn.Conv1d(1, 1, 3, padding="CIRCULAR")
    assert str(caught.value) == (
        "Conv1d: padding is a word that means nothing here.\n"
        "  got:      padding='CIRCULAR'\n"
        "  expected: 'SAME', 'SAME_LOWER', 'VALID', 'CAUSAL', or numbers\n"
        "  fix:      padding='SAME', padding_mode='circular'"
    )


@pytest.mark.parametrize("padding", ["SAME", 3])
def test_empty_space_axis(padding):
    with pytest.raises(ShapeError) as caught:
        nn.Conv1d(2, 1, 3, padding=padding, **DRAWN)(jnp.ones((4, 2, 0)))
    assert str(caught.value) == (
        "Conv1d: a space axis of x is empty.\n"
        "  at:       the module itself  (Conv1d)\n"
        "  got:      float32[4, 2, 0]\n"
        "  expected: [..., 2, L], space axes of at least 1\n"
        "  fix:      leave examples without an element out of the batch"
    )


def test_wrong_channels_says_what_to_do():
    with pytest.raises(ShapeError) as caught:
        nn.Conv2d(2, 3, 3, **DRAWN)(jnp.ones((4, 8, 8, 2)))
    assert str(caught.value) == (
        "Conv2d: axis -3 of x has 8 channels, not 2.\n"
        "  at:       the module itself  (Conv2d)\n"
        "  got:      float32[4, 8, 8, 2]\n"
        "  expected: [..., 2, H, W]\n"
        "  fix:      one of\n"
        "    1. in_channels as the input has them\n"
        "    2. jnp.moveaxis(x, -1, -3) if x is channels last"
    )


def test_wrong_rank_says_what_to_do():
    with pytest.raises(ShapeError) as caught:
        nn.Conv1d(1, 3, 3, **DRAWN)(jnp.ones(8))
    assert (caught.value.what, caught.value.expected) == ("Conv1d: x has 1 axes, one example has 2.", "[..., 1, L]")
    assert caught.value.fixes == ["x[None] adds the axis of a single channel"]


def test_input_smaller_than_the_kernel():
    conv = nn.Conv2d(1, 1, 3, dilation=2, padding=((1, 0), (0, 0)), **DRAWN)
    assert conv(jnp.ones((1, 4, 5))).shape == (1, 1, 1)
    with pytest.raises(ShapeError, match="Conv2d: the window is larger than the padded input") as caught:
        conv(jnp.ones((1, 3, 5)))
    assert caught.value.expected == "space axes of at least (4, 5)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": -1}, "stride is not an integer of at least 1"),
        ({"stride": 0}, "stride is not an integer of at least 1"),
        ({"dilation": 0}, "dilation is not an integer of at least 1"),
        ({"padding": -1}, "padding is not an integer of at least 0"),
        ({"padding": ((1, -1), (0, 0))}, "padding is not an integer of at least 0"),
        ({"padding": "FULL"}, "padding is a word that means nothing here"),
        ({"padding_mode": "SAME"}, "padding_mode is none that there is"),
        ({"padding_mode": None}, "padding_mode is none that there is"),
        ({"padding_mode": 1}, "padding_mode is none that there is"),
        ({"padding": (1, 2, 3)}, "padding has 3 numbers for 2 space axes"),
        ({"padding": ((1, 2, 3), (0, 0))}, "padding is not two numbers"),
        ({"padding": ((1, 1), 0)}, "padding is not an integer"),
        ({"padding": None}, "padding is not an integer"),
        ({"stride": (1, 2, 3)}, "stride has 3 numbers for 2 space axes"),
        ({"stride": 1.5}, "stride is not an integer"),
        ({"groups": 3}, "groups doesn't divide the channels"),
        ({"groups": 0}, "groups is not an integer of at least 1"),
    ],
    ids=str,
)
def test_wrong_options(options: dict, message: str):
    with pytest.raises(ArgumentError, match=f"Conv2d: {message}") as caught:
        nn.Conv2d(2, 4, 3, **options)
    assert caught.value.got and caught.value.expected and caught.value.fixes


@pytest.mark.parametrize("kernel_size", [0, (3,), (3, 0), "3", None])
def test_wrong_kernel(kernel_size):
    with pytest.raises(ArgumentError, match="Conv2d: kernel_size"):
        nn.Conv2d(2, 4, kernel_size)
