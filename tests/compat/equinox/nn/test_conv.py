# SPDX-License-Identifier: Apache-2.0
"""Convolutions window by window in float64, and their draws written out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx

RNG = np.random.default_rng(6)


def correlated(x, w, stride, dilation, groups):
    """The definition, one output at a time: the products of a window with a kernel, summed."""
    out, inside, *kernel = w.shape
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [(n - r) // s + 1 for n, r, s in zip(x.shape[1:], reach, stride, strict=True)]
    y = np.zeros((out, *size))
    for o, place in itertools.product(range(out), np.ndindex(*size)):
        first = o // (out // groups) * inside
        window = tuple(slice(p * s, p * s + r, d) for p, s, r, d in zip(place, stride, reach, dilation, strict=True))
        y[(o, *place)] = (x[(slice(first, first + inside), *window)] * w[o]).sum()
    return y


def wide(array):
    return np.asarray(array, np.float64)


CASES = [
    (1, {"kernel_size": 3}, ((0, 0),)),
    (1, {"kernel_size": (2,), "stride": 2, "padding": 1, "dilation": 2, "groups": 2}, ((1, 1),)),
    (2, {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 2), "dilation": (2, 1)}, ((1, 1), (2, 2))),
    (2, {"kernel_size": 2, "padding": ((1, 0), (0, 2)), "groups": 4, "use_bias": False}, ((1, 0), (0, 2))),
    (3, {"kernel_size": (1, 2, 3), "stride": 2, "padding": 1}, ((1, 1),) * 3),
]


@pytest.mark.parametrize(("axes", "options", "pads"), CASES)
def test_conv(key, axes, options, pads):
    conv = getattr(eqx.nn, f"Conv{axes}d")(4, 8, **options, key=key)
    x = RNG.normal(size=(4, 7, 6, 5)[: axes + 1])
    padded = np.pad(x, ((0, 0), *pads))
    expected = correlated(padded, wide(conv.weight), conv.stride, conv.dilation, conv.groups)
    if conv.use_bias:
        expected += wide(conv.bias)
    np.testing.assert_allclose(conv(jnp.float32(x)), expected, rtol=1e-4, atol=1e-5)
    general = eqx.nn.Conv(axes, 4, 8, **options, key=key)
    np.testing.assert_array_equal(general(jnp.float32(x)), conv(jnp.float32(x)))


def test_negative_padding_takes_off(key):
    conv = eqx.nn.Conv1d(2, 3, 2, padding=-1, key=key)
    x = jnp.asarray(RNG.normal(size=(2, 6)), jnp.float32)
    whole = eqx.nn.Conv1d(2, 3, 2, key=key)
    np.testing.assert_allclose(conv(x), whole(x[:, 1:-1]), rtol=1e-5, atol=1e-6)


TRANSPOSED = [
    (1, {"kernel_size": 3}),
    (1, {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1, "dilation": 2, "groups": 2}),
    (2, {"kernel_size": (3, 2), "stride": (2, 3), "output_padding": (1, 2), "padding": ((1, 0), (0, 1))}),
    (2, {"kernel_size": 2, "stride": 3, "groups": 4, "use_bias": False}),
    (3, {"kernel_size": (1, 2, 3), "stride": 2, "padding": (0, 1, 2), "dilation": (1, 1, 2)}),
]


@pytest.mark.parametrize(("axes", "options"), TRANSPOSED)
def test_transposed_conv_goes_over_a_spread_input(key, axes, options):
    conv = getattr(eqx.nn, f"ConvTranspose{axes}d")(4, 8, **options, key=key)
    x = RNG.normal(size=(4, 4, 3, 2)[: axes + 1])
    spread = np.zeros((4, *((n - 1) * s + 1 for n, s in zip(x.shape[1:], conv.stride, strict=True))))
    spread[(slice(None), *(slice(None, None, s) for s in conv.stride))] = x
    for axis in range(axes):
        reach = (conv.kernel_size[axis] - 1) * conv.dilation[axis]
        before, after = (reach - side for side in conv.padding[axis])
        after += conv.output_padding[axis]
        zeros = [(0, 0)] * (axes + 1)
        zeros[axis + 1] = (max(before, 0), max(after, 0))
        spread = np.pad(spread, zeros)
        cut = slice(max(-before, 0), spread.shape[axis + 1] - max(-after, 0))
        spread = spread[(slice(None),) * (axis + 1) + (cut,)]
    expected = correlated(spread, wide(conv.weight), (1,) * axes, conv.dilation, conv.groups)
    if conv.use_bias:
        expected += wide(conv.bias)
    np.testing.assert_allclose(conv(jnp.float32(x)), expected, rtol=1e-4, atol=1e-5)
    general = eqx.nn.ConvTranspose(axes, 4, 8, **options, key=key)
    np.testing.assert_array_equal(general(jnp.float32(x)), conv(jnp.float32(x)))


def test_transposed_conv_is_the_adjoint_of_the_conv(key):
    options = {"kernel_size": 3, "stride": 2, "padding": 1, "use_bias": False, "key": key}
    conv = eqx.nn.Conv2d(2, 3, **options)
    back = eqx.nn.ConvTranspose2d(3, 2, output_padding=1, **options)
    turned = jnp.flip(conv.weight, (2, 3)).swapaxes(0, 1)  # the kernel lies the other way round in Equinox
    back = eqx.tree_at(lambda layer: layer.weight, back, turned)
    x, y = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((2, 6, 8), (3, 3, 4)))
    np.testing.assert_allclose(np.vdot(wide(conv(x)), wide(y)), np.vdot(wide(x), wide(back(y))), rtol=1e-4)


@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_draws(key, name):
    conv = getattr(eqx.nn, f"{name}2d")(6, 4, (3, 2), groups=2, key=key)
    weight_key, bias_key = jax.random.split(key)
    limit = (3 * 3 * 2) ** -0.5
    expected = jax.random.uniform(weight_key, (4, 3, 3, 2), minval=-limit, maxval=limit)
    np.testing.assert_array_equal(conv.weight, expected)
    np.testing.assert_array_equal(conv.bias, jax.random.uniform(bias_key, (4, 1, 1), minval=-limit, maxval=limit))
    bare = getattr(eqx.nn, f"{name}2d")(6, 4, (3, 2), groups=2, use_bias=False, key=key)
    np.testing.assert_array_equal(bare.weight, conv.weight)
    assert bare.bias is None


def test_numbers_are_kept_for_each_axis(key):
    conv = eqx.nn.Conv2d(1, 2, [3, 2], 2, 1, key=key)
    assert (conv.kernel_size, conv.stride, conv.dilation) == ((3, 2), (2, 2), (1, 1))
    assert conv.padding == ((1, 1), (1, 1))
    assert isinstance(conv, eqx.nn.Conv) and not isinstance(conv, eqx.nn.ConvTranspose)
    back = eqx.nn.ConvTranspose1d(1, 2, 3, 3, 2, 1, key=key)
    assert (back.output_padding, back.padding) == ((2,), ((1, 1),))
    assert isinstance(back, eqx.nn.ConvTranspose) and not isinstance(back, eqx.nn.Conv)


def test_groups_that_do_not_divide(key):
    with pytest.raises(ValueError) as error:
        eqx.nn.Conv1d(4, 6, 3, groups=6, key=key)
    assert str(error.value) == (
        "Conv1d: groups doesn't divide in_channels.\n"
        "  got:      in_channels=4, groups=6\n"
        "  expected: in_channels a multiple of groups\n"
        "  fix:      groups=2"
    )


def test_output_padding_is_below_stride(key):
    with pytest.raises(ValueError) as error:
        eqx.nn.ConvTranspose2d(1, 1, 3, 2, 2, key=key)
    assert str(error.value) == (
        "ConvTranspose2d: output_padding is not below stride.\n"
        "  got:      output_padding=(2, 2), stride=(2, 2)\n"
        "  expected: output_padding < stride, on each axis\n"
        "  fix:      less padding makes the output larger too"
    )
    # 0.9.2 looked at the first axis where they differ alone.
    assert eqx.nn.ConvTranspose2d(1, 1, 1, 2, (0, 3), key=key)(jnp.ones((1, 2, 2))).shape == (1, 3, 6)
