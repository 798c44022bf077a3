# SPDX-License-Identifier: Apache-2.0
"""Operations: what they compute, and what they say to a wrong argument."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax._errors import MisuseError

RNG = np.random.default_rng(5)
F = objax.functional


def test_flatten_keeps_the_batch():
    x = jnp.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(F.flatten(x), np.arange(24).reshape(2, 12))
    assert F.flatten(jnp.zeros((0, 3, 4))).shape == (0, 12)
    assert F.flatten(jnp.zeros(5)).shape == (5, 1)
    with pytest.raises(MisuseError) as error:
        F.flatten(jnp.array(1.0))
    assert str(error.value) == "flatten: x has no axis of a batch.\n  got:      float32[]\n  expected: [batch, ...]"


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ({"size": 7}, (2, 3, 4, 7)),
        ({"size": (6, 7)}, (2, 3, 6, 7)),
        ({"size": [5, 6, 7]}, (2, 5, 6, 7)),
        ({"scale_factor": 2}, (2, 6, 8, 10)),  # the channels, too, as in Objax
        ({"scale_factor": (2, 3)}, (2, 3, 8, 15)),
        ({"scale_factor": [3]}, (2, 3, 4, 15)),
    ],
)
def test_which_axes_are_resized(arguments, shape):
    assert F.interpolate(jnp.ones((2, 3, 4, 5)), **arguments).shape == shape


def test_linear_interpolation_of_a_row():
    x = jnp.array([[0.0, 4.0]])
    # Pixels are cells: the centers of four new ones lie at -1/4, 1/4, 3/4 and 5/4 of the old ones.
    np.testing.assert_allclose(F.interpolate(x, size=4, mode="linear"), [[0, 1, 3, 4]], atol=1e-6)
    np.testing.assert_allclose(F.interpolate(x, size=4, mode=objax.Interpolate.NEAREST), [[0, 0, 4, 4]])


@pytest.mark.parametrize("scale", [2, (3, 2)])
def test_upsample_is_separable_linear_interpolation(scale):
    x = RNG.normal(size=(2, 3, 4, 5))
    factors = scale if isinstance(scale, tuple) else (scale, scale)

    def along(x, axis, factor):
        old = x.shape[axis]
        centers = np.clip((np.arange(old * factor) + 0.5) / factor - 0.5, 0, old - 1)
        return np.apply_along_axis(lambda row: np.interp(centers, np.arange(old), row), axis, x)

    expected = along(along(x, 2, factors[0]), 3, factors[1])
    got = F.upsample_2d(jnp.asarray(x, jnp.float32), scale)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_upscale_repeats_pixels():
    x = RNG.normal(size=(2, 3, 4, 5)).astype(np.float32)
    np.testing.assert_array_equal(F.upscale_nn(jnp.asarray(x), 3), np.kron(x, np.ones((3, 3), np.float32)))
    np.testing.assert_array_equal(F.upscale_nn(jnp.asarray(x)), F.upsample_2d(jnp.asarray(x), 2, method="nearest"))


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda x: F.interpolate(x), "interpolate: neither of size and scale_factor are given."),
        (lambda x: F.interpolate(x, 2, 3), "interpolate: both of size and scale_factor are given."),
        (lambda x: F.interpolate(x, (1, 2, 3, 4, 5)), "interpolate: size doesn't fit the axes of the input."),
        (lambda x: F.interpolate(x, -3), "interpolate: size doesn't fit the axes of the input."),
        (lambda x: F.interpolate(x, scale_factor=1.5), "interpolate: scale_factor doesn't fit the axes of the input."),
        (lambda x: F.upsample_2d(x[0], 2), "upsample_2d: x is no batch of images, which has 4 dimensions."),
        (lambda x: F.upsample_2d(x, (2, 2, 2)), "upsample_2d: scale is neither a number above 0 nor two of them."),
        (lambda x: F.upscale_nn(x[0]), "upscale_nn: x is no batch of images, which has 4 dimensions."),
    ],
)
def test_misuse(call, what):
    with pytest.raises(AssertionError) as error:
        call(jnp.ones((2, 3, 4, 5)))
    assert isinstance(error.value, MisuseError) and error.value.what == what


def test_misuse_says_what_was_given():
    with pytest.raises(MisuseError) as error:
        F.interpolate(jnp.ones((2, 3)), scale_factor=(2, 2, 2))
    assert str(error.value) == (
        "interpolate: scale_factor doesn't fit the axes of the input.\n"
        "  got:      scale_factor=(2, 2, 2), for float32[2, 3]\n"
        "  expected: at most 2 whole numbers above 0"
    )


def test_pad_has_names_for_its_arguments():
    names = ["array", "pad_width", "mode", "stat_length", "constant_values", "end_values", "reflect_type"]
    assert list(inspect.signature(F.pad).parameters) == names
    assert inspect.signature(F.pad).parameters["constant_values"].default == 0
    kept = objax.util.local_kwargs({"training": True, "constant_values": 3}, functools.partial(F.pad, pad_width=1))
    assert kept == {"constant_values": 3}


def test_pad_pads():
    x = np.array([1.0, 2.0, 3.0], np.float32)
    assert F.pad(x, 1).tolist() == [0, 1, 2, 3, 0]
    assert F.pad(x, (1, 2), constant_values=9).tolist() == [9, 1, 2, 3, 9, 9]
    assert F.pad(x, 2, "reflect").tolist() == [3, 2, 1, 2, 3, 2, 1]
    assert F.pad(x, 1, mode="linear_ramp", end_values=5).tolist() == [5, 1, 2, 3, 5]
    assert F.pad(x, 1, mode="mean", stat_length=2).tolist() == [1.5, 1, 2, 3, 2.5]


def test_scan_threads_variables():
    count = objax.StateVar(jnp.zeros(()))

    def body(carry, x):
        count.value += 1
        return carry + x, carry * x

    carry, products = F.scan(body, jnp.array(1.0), jnp.array([2.0, 3.0, 4.0]))
    assert float(carry) == 10 and products.tolist() == [2, 9, 24] and float(count.value) == 3


def test_scan_finds_the_default_generator():
    def draw(n):
        return F.scan(lambda total, _: (total + objax.random.normal(()), None), jnp.zeros(()), None, n)[0]

    objax.random.DEFAULT_GENERATOR.seed(0)
    wanted = sum(float(objax.random.normal(())) for _ in range(3))
    for call in (draw, objax.Jit(draw, static_argnums=(0,))):
        objax.random.DEFAULT_GENERATOR.seed(0)
        np.testing.assert_allclose(call(3), wanted, rtol=1e-5)
    assert list(inspect.signature(F.scan).parameters)[:4] == ["f", "init", "xs", "length"]


@pytest.mark.parametrize("kind", [lambda x: x, objax.TrainVar])
def test_functions_of_lax_take_variables(kind):
    x = kind(jnp.array([[1.0, 4.0, 16.0], [25.0, 9.0, 0.25]]))
    np.testing.assert_allclose(F.rsqrt(x), [[1, 0.5, 0.25], [0.2, 1 / 3, 2]], rtol=1e-6)
    values, places = F.top_k(x, 2)
    assert values.tolist() == [[16, 4], [25, 9]] and places.tolist() == [[2, 1], [0, 1]]
    assert F.dynamic_slice(x, (1, jnp.array(1)), (1, 2)).tolist() == [[9, 0.25]]
    assert isinstance(F.stop_gradient(x), type(jnp.zeros(1)))


def test_stop_gradient_stops_it():
    v = objax.TrainVar(jnp.array(3.0))
    (gradient,) = objax.Grad(lambda: v.value * F.stop_gradient(v) + F.stop_gradient({"a": v})["a"], v_of(v))()
    assert float(gradient) == 3


def v_of(v):
    return objax.VarCollection(v=v)


def test_one_hot():
    assert F.one_hot(jnp.array([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]
