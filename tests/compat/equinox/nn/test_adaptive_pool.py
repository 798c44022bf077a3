# SPDX-License-Identifier: Apache-2.0
"""Adaptive pooling: windows listed one by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx

RNG = np.random.default_rng(8)
WINDOWS = {  # (n, m): where the m windows of n elements end
    (5, 1): [5],
    (5, 2): [3, 5],
    (5, 3): [2, 4, 5],
    (5, 4): [2, 3, 4, 5],
    (5, 5): [1, 2, 3, 4, 5],
    (6, 3): [2, 4, 6],
    (6, 4): [2, 4, 5, 6],
    (4, 1): [4],
    (4, 3): [2, 3, 4],
    (4, 4): [1, 2, 3, 4],
}


def pooled(x, target, reduce):
    ends = [WINDOWS[n, m] for n, m in zip(x.shape[1:], target, strict=True)]
    windows = [[slice(a, b) for a, b in itertools.pairwise([0, *each])] for each in ends]
    y = np.zeros((len(x), *target))
    for place in np.ndindex(*target):
        own = tuple(window[p] for window, p in zip(windows, place, strict=True))
        y[(slice(None), *place)] = reduce(x[(slice(None), *own)], axis=tuple(range(1, x.ndim)))
    return y


@pytest.mark.parametrize("kind", ["Avg", "Max"])
@pytest.mark.parametrize(
    ("shape", "target"),
    [
        *(((5,), (m,)) for m in range(1, 6)),
        ((6,), (3,)),
        ((5, 6), (3, 4)),
        ((6, 5), (3, 1)),
        ((5, 6, 4), (2, 3, 3)),
        ((4, 4, 4), (1, 4, 3)),
    ],
)
def test_windows(kind, shape, target):
    x = RNG.normal(size=(2, *shape))
    layer = getattr(eqx.nn, f"Adaptive{kind}Pool{len(shape)}d")(target)
    expected = pooled(x, target, np.mean if kind == "Avg" else np.max)
    got = jax.jit(lambda x: layer(x))(jnp.float32(x))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert isinstance(layer, eqx.nn.AdaptivePool)


def test_one_number_for_all_axes():
    assert eqx.nn.AdaptiveAvgPool3d(2).target_shape == (2, 2, 2)
    assert eqx.nn.AdaptiveMaxPool2d([2, 3]).target_shape == (2, 3)


def test_whole_numbers():
    x = jnp.arange(5)[None]
    most = eqx.nn.AdaptiveMaxPool1d(2)(x)
    assert most.dtype == x.dtype and most.tolist() == [[2, 4]]
    mean = eqx.nn.AdaptiveAvgPool1d(2)(x)
    assert mean.dtype == jnp.float32 and mean.tolist() == [[1.0, 3.5]]


@pytest.mark.parametrize("n", [5, 6])
def test_any_operation_once_a_window(n):
    x = RNG.normal(size=(2, n))
    layer = eqx.nn.AdaptivePool(3, 1, lambda window: jnp.sum(window**2))
    np.testing.assert_allclose(layer(jnp.float32(x)), pooled(x**2, (3,), np.sum), rtol=1e-5)


def test_an_axis_that_is_too_short():
    with pytest.raises(ValueError) as error:
        eqx.nn.AdaptiveAvgPool2d((2, 4))(jnp.ones((1, 5, 3)))
    assert str(error.value) == (
        "AdaptiveAvgPool2d: x has an axis that is shorter than it should become.\n"
        "  got:      float32[1, 5, 3]\n"
        "  expected: space axes of at least (2, 4)\n"
        "  fix:      a smaller target_shape"
    )
