# SPDX-License-Identifier: Apache-2.0
"""RotaryEmbedding beside complex numbers in NumPy, in both layouts, and at positions of one's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn._rotary import RotaryEmbedding

RNG = np.random.default_rng(0)


def oracle(x, positions, layout, base=10000.0):
    """Each pair as a complex number, times e^(i t)."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.asarray(positions)[..., None] * base ** (-np.arange(half) / half))
    y = np.empty(np.shape(x))
    first, second = (slice(0, half), slice(half, None)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    z = (x[..., first] + 1j * x[..., second]) * turn
    y[..., first], y[..., second] = z.real, z.imag
    return y


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("base", [10000.0, 500000])
@pytest.mark.parametrize("shape", [(7, 6), (3, 7, 6), (2, 3, 7, 2)])
def test_values(layout, base: float, shape: tuple[int, ...]):
    x = RNG.normal(size=shape)
    rotary = RotaryEmbedding(shape[-1], layout=layout, base=base)
    np.testing.assert_allclose(rotary(x), oracle(x, np.arange(7), layout, base), rtol=1e-5, atol=1e-5)
    with jax.enable_x64(True):
        y = rotary(x)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, oracle(x, np.arange(7), layout, base), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(4,), (1,), (3, 4), (3, 1), (1, 4), (2, 3, 4), (2, 1, 1), (2, 1, 4)], ids=str)
def test_positions(shape: tuple[int, ...]):
    x, positions = RNG.normal(size=(2, 3, 4, 6)), RNG.integers(0, 50, shape)
    np.testing.assert_allclose(RotaryEmbedding(6)(x, positions), oracle(x, positions, "half"), rtol=1e-4, atol=1e-4)


def test_product_depends_on_the_distance():
    q, k = RNG.normal(size=(2, 1, 8))
    rotary = RotaryEmbedding(8, layout="interleaved")
    at = lambda x, position: np.asarray(rotary(x, jnp.asarray([position])))[0]
    products = [at(q, n + 3) @ at(k, n) for n in (0, 1, 17, 400)]
    np.testing.assert_allclose(products, products[0], rtol=1e-4)
    assert abs(at(q, 4) @ at(k, 0) - products[0]) > 1e-2


def test_some_features_pass():
    x = RNG.normal(size=(5, 8)).astype(np.float32)
    y = np.asarray(RotaryEmbedding(8, rotated=4)(x))
    np.testing.assert_array_equal(y[:, 4:], x[:, 4:])
    np.testing.assert_allclose(y[:, :4], oracle(x[:, :4], np.arange(5), "half"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_far_positions_of_a_narrow_dtype(dtype):
    """In float16 the position 30011 would be 30016, and the angle wrong by 5."""
    x = jnp.asarray(RNG.normal(size=(1, 4)), dtype)
    y = RotaryEmbedding(4)(x, jnp.asarray([30011]))
    assert y.dtype == dtype
    right = oracle(np.asarray(x, np.float64), [30011], "half")
    np.testing.assert_allclose(np.asarray(y, np.float64), right, atol=3e-2)


def test_compute_dtype_and_no_variables():
    rotary = tether.view(RotaryEmbedding(4), compute_dtype=jnp.bfloat16)
    assert rotary(jnp.ones((3, 4))).dtype == jnp.bfloat16
    assert not tether.variables(rotary)


def test_gradient_turns_back():
    x, c = RNG.normal(size=(2, 5, 6)).astype(np.float32)
    grad = tether.grad(lambda x: (c * RotaryEmbedding(6)(x)).sum())(jnp.asarray(x))
    np.testing.assert_allclose(grad, oracle(c, -np.arange(5), "half"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 7}, "RotaryEmbedding: 7 of 7 features can't be turned in pairs."),
        ({"size": 8, "rotated": 3}, "RotaryEmbedding: 3 of 8 features can't be turned in pairs."),
        ({"size": 8, "rotated": 10}, "RotaryEmbedding: 10 of 8 features can't be turned in pairs."),
        ({"size": 0}, "RotaryEmbedding: size is not an integer of at least 2."),
        ({"size": 8, "layout": "neox"}, "RotaryEmbedding: layout is a word that means nothing here."),
        ({"size": 8, "layout": None}, "RotaryEmbedding: layout is a word that means nothing here."),
        ({"size": 8, "base": -1.0}, "RotaryEmbedding: base is not a positive number."),
        ({"size": 8, "base": True}, "RotaryEmbedding: base is not a positive number."),
    ],
)
def test_wrong_options(arguments, message: str):
    with pytest.raises(ArgumentError) as caught:
        RotaryEmbedding(**arguments)
    assert caught.value.what == message


def test_odd_size_says_what_to_do():
    with pytest.raises(ArgumentError) as caught:
        RotaryEmbedding(7)
    assert str(caught.value).splitlines()[1:] == [
        "  got:      size=7, rotated=7",
        "  expected: an even number of at most 7",
        "  fix:      rotated=6",
    ]


@pytest.mark.parametrize("shape", [(8,), (3, 6), (2, 3, 9), ()])
def test_wrong_input(shape: tuple[int, ...]):
    with pytest.raises(ShapeError) as caught:
        RotaryEmbedding(8)(jnp.ones(shape))
    assert caught.value.what == "RotaryEmbedding: x doesn't end in a length and the size, 8."
    assert caught.value.expected == "[..., length, 8]"


@pytest.mark.parametrize("shape", [(2,), (4, 3), (), (2, 2, 3, 4), (3, 2, 4)], ids=str)
def test_positions_that_do_not_fit(shape: tuple[int, ...]):
    with pytest.raises(ShapeError) as caught:
        RotaryEmbedding(6)(jnp.ones((2, 3, 4, 6)), jnp.ones(shape, jnp.int32))
    assert caught.value.what == "RotaryEmbedding: positions don't fit x."
    assert caught.value.expected == "[4], or [2, 3, 4] with axes of 1 for what is shared"


@pytest.mark.parametrize("dtype", [bool, jnp.complex64])
def test_positions_are_real_numbers(dtype):
    with pytest.raises(DtypeError, match="RotaryEmbedding: positions are not real numbers"):
        RotaryEmbedding(6)(jnp.ones((4, 6)), jnp.ones(4, dtype))


def test_complex_numbers_are_refused():
    with pytest.raises(DtypeError, match="RotaryEmbedding: complex numbers"):
        RotaryEmbedding(2)(jnp.ones((3, 2), jnp.complex64))
