# SPDX-License-Identifier: Apache-2.0
"""Layers against written-out sums in float64 NumPy."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax._errors import MisuseError

RNG = np.random.default_rng(7)


def drawn(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def close(got, expected, **tolerance):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **({"rtol": 2e-5, "atol": 2e-5} | tolerance))


def test_all_19_layers_and_init_are_there_under_objax_names():
    names = set(objax.nn.layers.__all__)
    assert len(names) == 19 and names | {"init"} == set(objax.nn.__all__)
    for name in names:
        assert getattr(objax.nn, name) is getattr(objax.nn.layers, name)
    assert repr(objax.nn.Dropout(0.25)) == "objax.nn.Dropout(keep=0.25)"


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)])
def test_linear_is_the_sum_over_the_last_axis(shape):
    layer = objax.nn.Linear(3, 5)
    layer.b.assign(drawn(5))
    x = drawn(*shape)
    w, b = np.asarray(layer.w.value, np.float64), np.asarray(layer.b.value, np.float64)
    close(layer(x), np.einsum("...i,ij->...j", np.asarray(x, np.float64), w) + b)
    close(layer(np.asarray(x)), layer(x))


def test_the_bias_comes_before_the_weight():
    assert list(objax.nn.Linear(2, 3).vars().keys()) == ["(Linear).b", "(Linear).w"]
    assert list(objax.nn.Conv2D(2, 3, 1).vars().keys()) == ["(Conv2D).b", "(Conv2D).w"]
    assert list(objax.nn.ConvTranspose2D(2, 3, 1).vars().keys()) == ["(ConvTranspose2D).b", "(ConvTranspose2D).w"]
    assert list(objax.nn.Linear(2, 3, use_bias=False).vars().keys()) == ["(Linear).w"]


def test_shapes_of_variables():
    conv = objax.nn.Conv2D(4, 6, (3, 5), groups=2)
    assert (conv.w.shape, conv.b.shape) == ((3, 5, 2, 6), (6, 1, 1))
    transposed = objax.nn.ConvTranspose2D(4, 6, (3, 5))
    assert (transposed.w.shape, transposed.b.shape) == ((3, 5, 6, 4), (6, 1, 1))
    assert objax.nn.Linear(2, 7).w.shape == (2, 7)


def test_linear_says_which_axis_is_wrong():
    with pytest.raises(MisuseError) as error:
        objax.nn.Linear(3, 2)(jnp.ones((2, 3, 4)))
    assert str(error.value) == (
        "Linear: the last axis of x is not nin, 3.\n"
        "  got:      float32[2, 3, 4]\n"
        "  expected: [..., 3]\n"
        "  fix:      objax.functional.flatten(x), for images"
    )
    with pytest.raises(TypeError, match="not nin"):
        objax.nn.Linear(3, 2)(2.0)


def convolved(x, w, strides, dilations, pads, groups):
    """The definition, pixel by pixel."""
    x = np.pad(np.asarray(x, np.float64), ((0, 0), (0, 0), *pads))
    w = np.asarray(w, np.float64)
    k, nin, nout = w.shape[:2], w.shape[2], w.shape[3]
    size = [(x.shape[2 + i] - (k[i] - 1) * dilations[i] - 1) // strides[i] + 1 for i in range(2)]
    y = np.zeros((x.shape[0], nout, *size))
    for o, i, j in itertools.product(range(nout), *map(range, size)):
        first = o // (nout // groups) * nin
        for p, q in itertools.product(*map(range, k)):
            row, column = i * strides[0] + p * dilations[0], j * strides[1] + q * dilations[1]
            y[:, o, i, j] += x[:, first : first + nin, row, column] @ w[p, q, :, o]
    return y


@pytest.mark.parametrize(
    ("options", "pads"),
    [
        ({"padding": objax.ConvPadding.VALID}, ((0, 0), (0, 0))),
        ({"padding": "same"}, ((1, 1), (0, 1))),
        ({"padding": 2, "strides": (2, 1)}, ((2, 2), (2, 2))),
        ({"padding": (0, 3), "dilations": 2}, ((0, 3), (0, 3))),
        ({"padding": ((1, 0), (2, 1)), "groups": 2}, ((1, 0), (2, 1))),
    ],
)
def test_conv_is_the_sum_over_the_window(options, pads):
    conv = objax.nn.Conv2D(4, 6, (3, 2), **options)
    conv.b.assign(drawn(6, 1, 1))
    x = drawn(2, 4, 7, 6)
    expected = convolved(x, conv.w.value, conv.strides, conv.dilations, pads, conv.groups)
    close(conv(x), expected + np.asarray(conv.b.value, np.float64))


def transposed(x, w, strides, before, size):
    """Each pixel puts a kernel down; what lies outside is cut off."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y = np.zeros((x.shape[0], w.shape[2], *size))
    for i, j, p, q in itertools.product(*map(range, (*x.shape[2:], *w.shape[:2]))):
        row, column = i * strides[0] + p - before[0], j * strides[1] + q - before[1]
        if 0 <= row < size[0] and 0 <= column < size[1]:
            y[:, :, row, column] += x[:, :, i, j] @ w[p, q].T
    return y


@pytest.mark.parametrize(("k", "strides"), [*itertools.product([(1, 2), (3, 4), (5, 2)], [(1, 1), (2, 3)])])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_transposed_conv_puts_kernels_down_as_keras_does(k, strides, padding):
    conv = objax.nn.ConvTranspose2D(3, 2, k, strides, padding=padding)
    conv.b.assign(drawn(2, 1, 1))
    x = drawn(2, 3, 4, 3)
    if padding == "SAME":
        before = [max(extent - step, 0) // 2 for extent, step in zip(k, strides, strict=True)]
        size = [length * step for length, step in zip(x.shape[2:], strides, strict=True)]
    else:
        before = [0, 0]
        size = [(n - 1) * step + max(extent, step) for n, extent, step in zip(x.shape[2:], k, strides, strict=True)]
    expected = transposed(x, conv.w.value, strides, before, size) + np.asarray(conv.b.value, np.float64)
    close(conv(x), expected)


def test_transposed_conv_with_numbers_as_padding_and_holes_in_the_kernel():
    conv = objax.nn.ConvTranspose2D(1, 1, (3, 2), 2, padding=((1, 0), (2, 1)), use_bias=False)
    x = drawn(1, 1, 3, 4)
    size = [(3 - 1) * 2 + 1 + 1 + 0 - 3 + 1, (4 - 1) * 2 + 1 + 2 + 1 - 2 + 1]
    close(conv(x), transposed(x, conv.w.value, (2, 2), (3 - 1 - 1, 2 - 1 - 2), size))
    holed = objax.nn.ConvTranspose2D(1, 1, 2, dilations=2, padding="VALID", use_bias=False)
    spread = np.zeros((3, 3, 1, 1))
    spread[::2, ::2] = holed.w.value
    close(holed(x), transposed(x, spread, (1, 1), (0, 0), (5, 6)))


def test_transposed_conv_is_the_transpose_of_the_conv():
    conv = objax.nn.Conv2D(2, 3, 3, strides=2, padding="SAME", use_bias=False)
    back = objax.nn.ConvTranspose2D(3, 2, 3, strides=2, padding="SAME", use_bias=False)
    back.w.assign(conv.w.value)
    x, y = drawn(1, 2, 8, 8), drawn(1, 3, 4, 4)
    left, right = np.vdot(conv(x), y), np.vdot(x, back(y))
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (lambda: objax.nn.Conv2D(4, 6, 3, groups=3), "Conv2D: nin should be divisible by groups."),
        (lambda: objax.nn.Conv2D(6, 4, 3, groups=3), "Conv2D: nout should be divisible by groups."),
        (lambda: objax.nn.Conv2D(6, 4, 3, groups=0), "Conv2D: nin should be divisible by groups."),
        (lambda: objax.nn.Conv2D(1, 1, (3, 3, 3)), "Conv2D: k is neither a number above 0 nor two of them."),
        (lambda: objax.nn.Conv2D(1, 1, 3, strides=0), "Conv2D: strides is neither a number above 0 nor two of them."),
        (
            lambda: objax.nn.ConvTranspose2D(1, 1, 3, dilations=(1, -1)),
            "ConvTranspose2D: dilations is neither a number above 0 nor two of them.",
        ),
        (
            lambda: objax.nn.Conv2D(3, 4, 1)(jnp.ones((3, 8, 8))),
            "Conv2D: x is no batch of images, which has 4 dimensions.",
        ),
        (
            lambda: objax.nn.Conv2D(3, 4, 1)(jnp.ones((1, 8, 8, 3))),
            "Conv2D: Attempting to convolve an input with 8 input channels when the convolution expects 3 channels.",
        ),
        (
            lambda: objax.nn.ConvTranspose2D(3, 4, 1)(jnp.ones((1, 4, 8, 8))),
            "ConvTranspose2D: Attempting to convolve an input with 4 input channels when the convolution expects "
            "3 channels.",
        ),
        (
            lambda: objax.nn.Conv2D(3, 4, 1)(jnp.ones((1, 3, 8, 8), jnp.bfloat16)),
            "Conv2D: the input and the kernel differ in dtype.",
        ),
        (lambda: objax.nn.Dropout(50), "Dropout: keep is no probability."),
        (lambda: objax.nn.Dropout(-0.1), "Dropout: keep is no probability."),
        (lambda: objax.nn.Dropout(math.nan), "Dropout: keep is no probability."),
        (lambda: objax.nn.Dropout(0.5)(jnp.ones(2), True, 1.5), "Dropout: dropout_keep is no probability."),
        (lambda: objax.nn.MovingAverage((2,), 0), "MovingAverage: buffer_size is below 1."),
        (
            lambda: objax.nn.MovingAverage((2,), 3)(jnp.ones(3)),
            "MovingAverage: the input isn't of the shape that is averaged.",
        ),
        (
            lambda: objax.nn.ExponentialMovingAverage((1,))(jnp.ones(3)),
            "ExponentialMovingAverage: the input isn't of the shape that is averaged.",
        ),
    ],
)
def test_misuse(make, first):
    with pytest.raises(AssertionError) as error:
        make()
    assert isinstance(error.value, MisuseError)
    assert str(error.value).splitlines()[0] == first


def test_errors_say_how_to_mend():
    with pytest.raises(MisuseError) as error:
        objax.nn.Conv2D(3, 4, 1)(jnp.ones((1, 8, 8, 3)))
    assert error.value.got == "float32[1, 8, 8, 3]"
    assert error.value.expected == "[batch, 3, height, width]"
    assert error.value.fixes == ["objax.util.image.nchw(x)"]
    with pytest.raises(MisuseError) as error:
        objax.nn.Dropout(50)
    assert error.value.fixes == ["keep=0.5, for percent"]
    with pytest.raises(MisuseError) as error:
        objax.nn.ExponentialMovingAverage((1,))(jnp.ones(3))
    assert (error.value.got, error.value.expected) == ("float32[3]", "[1]")


def test_dropout_keeps_the_mean_and_a_share():
    layer = objax.nn.Dropout(0.8, objax.random.Generator(1))
    y = np.asarray(layer(jnp.ones((100, 100)), training=True), np.float64)
    assert set(np.unique(y)) == {0.0, float(np.float32(1) / np.float32(0.8))}
    assert abs((y > 0).mean() - 0.8) < 4 * math.sqrt(0.8 * 0.2 / 1e4)


def test_dropout_draws_as_objax_did():
    layer = objax.nn.Dropout(0.5, objax.random.Generator(3))
    key = jax.random.split(jax.random.PRNGKey(3), 2)[1]
    x = drawn(4, 5)
    expected = np.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * np.asarray(x), 0)
    np.testing.assert_array_equal(layer(x, True), expected)


def test_dropout_takes_no_key_unless_it_drops():
    keys = objax.random.Generator(0)
    before = np.asarray(keys.key.value)
    x = drawn(3)
    for y in (
        objax.nn.Dropout(0.5, keys)(x, training=False),
        objax.nn.Dropout(1, keys)(x, training=True),
        objax.nn.Dropout(0.5, keys)(x, True, dropout_keep=1.0),
    ):
        np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(keys.key.value, before)
    assert list(objax.nn.Dropout(0.5, keys).vars().keys()) == ["(Dropout).keygen(Generator)._key"]


def test_dropout_of_everything_has_a_gradient():
    layer = objax.nn.Dropout(0.0, objax.random.Generator(0))
    gradients, values = objax.GradValues(lambda x: layer(x, training=True).sum(), None, (0,))(jnp.ones(3))
    assert float(values[0]) == 0.0 and gradients[0].tolist() == [0.0, 0.0, 0.0]


def test_dropout_keep_of_a_call():
    layer = objax.nn.Dropout(0.1, objax.random.Generator(5))
    y = np.asarray(layer(jnp.ones(4000), True, dropout_keep=0.5))
    assert set(np.unique(y)) == {0.0, 2.0} and abs((y > 0).mean() - 0.5) < 0.04
    ignored = np.asarray(layer(jnp.ones(4000), True, dropout_keep=0))  # 0 is no value, as in Objax
    assert abs((ignored > 0).mean() - 0.1) < 0.03


def test_exponential_moving_average_is_a_weighted_sum():
    average = objax.nn.ExponentialMovingAverage((2,), momentum=0.9, init_value=3)
    xs = RNG.normal(size=(6, 2))
    for x in xs:
        got = average(jnp.asarray(x, jnp.float32))
    weights = 0.1 * 0.9 ** np.arange(5, -1, -1)
    close(got, 0.9**6 * 3 + weights @ xs)
    assert repr(average) == "objax.nn.ExponentialMovingAverage(shape=(2,), momentum=0.9, init_value=3)"


def test_moving_average_counts_what_was_there_first():
    average = objax.nn.MovingAverage((2,), buffer_size=4, init_value=10)
    xs = RNG.normal(size=(6, 2))
    got = [average(jnp.asarray(x, jnp.float32)) for x in xs]
    history = np.concatenate([np.full((4, 2), 10.0), xs])
    close(np.stack(got), [history[i + 1 : i + 5].mean(0) for i in range(6)])
    assert repr(average) == "objax.nn.MovingAverage(shape=(2,), buffer_size=4, init_value=10)"


def test_moving_averages_go_on_in_a_compiled_function():
    average = objax.nn.ExponentialMovingAverage((), momentum=0.5)
    step = objax.Jit(average)
    assert [float(step(jnp.array(8.0))) for _ in range(3)] == [4.0, 6.0, 7.0]
    assert float(average.avg.value) == 7.0


def test_gradients_of_a_convolution_are_those_of_the_sum():
    conv = objax.nn.Conv2D(2, 3, 2, padding="VALID")
    x = drawn(2, 2, 3, 3)
    gradients, _ = objax.GradValues(lambda: conv(x).sum(), conv.vars())()
    by_bias, by_weight = gradients
    assert by_bias.shape == (3, 1, 1) and by_bias.ravel().tolist() == [8.0, 8.0, 8.0]
    exact = np.asarray(x, np.float64)
    windows = np.stack([exact[:, :, p : p + 2, q : q + 2].sum((0, 2, 3)) for p in (0, 1) for q in (0, 1)])
    close(by_weight, np.repeat(windows.reshape(2, 2, 2, 1), 3, axis=3))


@pytest.mark.mixed_dtypes
def test_linear_of_bfloat16_gives_float32_as_its_matrix_is():
    layer = objax.nn.Linear(2, 3)
    x = drawn(4, 2).astype(jnp.bfloat16)
    assert layer(x).dtype == jnp.float32
    close(layer(x), np.asarray(x, np.float64) @ np.asarray(layer.w.value, np.float64), rtol=1e-2, atol=1e-2)


def test_reprs_show_all_settings():
    conv = objax.nn.ConvTranspose2D(2, 3, (1, 2), strides=2, padding=1, use_bias=False)
    assert repr(conv) == (
        "objax.nn.ConvTranspose2D(nin=2, nout=3, k=(1, 2), strides=(2, 2), dilations=(1, 1), "
        "padding=((1, 1), (1, 1)), use_bias=False, w_init=kaiming_normal(*, gain=1))"
    )
    assert repr(objax.nn.Conv2D(4, 6, 1, groups=2)) == (
        "objax.nn.Conv2D(nin=4, nout=6, k=(1, 1), strides=(1, 1), dilations=(1, 1), groups=2, padding='SAME', "
        "use_bias=True, w_init=kaiming_normal(*, gain=1))"
    )
