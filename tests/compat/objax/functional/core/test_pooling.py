# SPDX-License-Identifier: Apache-2.0
"""Pooling and exchanges of space against loops over windows."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax._errors import MisuseError

RNG = np.random.default_rng(9)
F = objax.functional


def pooled(x, size, strides, pads, fill, reduce):
    x = np.pad(np.asarray(x, np.float64), ((0, 0), (0, 0), *pads), constant_values=fill)
    counts = [(x.shape[2 + i] - size[i]) // strides[i] + 1 for i in range(2)]
    y = np.zeros((*x.shape[:2], *counts))
    for i, j in itertools.product(*map(range, counts)):
        row, column = i * strides[0], j * strides[1]
        y[:, :, i, j] = reduce(x[:, :, row : row + size[0], column : column + size[1]], axis=(2, 3))
    return y


@pytest.mark.parametrize(
    ("arguments", "size", "strides", "pads"),
    [
        ({}, (2, 2), (2, 2), ((0, 0), (0, 0))),
        ({"size": 3, "strides": 1}, (3, 3), (1, 1), ((0, 0), (0, 0))),
        ({"size": (2, 3), "strides": (1, 2), "padding": "SAME"}, (2, 3), (1, 2), ((0, 1), (1, 1))),
        ({"size": (2, 3), "padding": 1}, (2, 3), (2, 3), ((1, 1), (1, 1))),
        ({"size": 2, "padding": ((1, 0), (0, 1))}, (2, 2), (2, 2), ((1, 0), (0, 1))),
    ],
)
def test_each_window(arguments, size, strides, pads):
    x = jnp.asarray(RNG.normal(size=(2, 3, 5, 7)) - 3, jnp.float32)  # below 0: a maximum with a padded 0 would show
    mean = pooled(x, size, strides, pads, 0, np.mean)
    np.testing.assert_allclose(F.average_pool_2d(x, **arguments), mean, rtol=1e-5)
    most = pooled(x, size, strides, pads, -np.inf, np.max)
    np.testing.assert_array_equal(F.max_pool_2d(x, **arguments), most.astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8])
def test_maximum_keeps_the_dtype(dtype):
    x = jnp.arange(16).reshape(1, 1, 4, 4).astype(dtype)
    y = F.max_pool_2d(x)
    assert y.dtype == dtype and y.ravel().tolist() == [5, 7, 13, 15]


def test_gradients():
    x = jnp.arange(16.0).reshape(1, 1, 4, 4)
    (most,) = objax.Grad(lambda x: F.max_pool_2d(x).sum(), None, (0,))(x)
    assert np.flatnonzero(most).tolist() == [5, 7, 13, 15]
    (mean,) = objax.Jit(objax.Grad(lambda x: F.average_pool_2d(x).sum(), None, (0,)))(x)
    assert np.unique(mean).tolist() == [0.25]


@pytest.mark.parametrize("size", [1, 2, (3, 2)])
def test_space_goes_to_batch_or_channels_pixel_by_pixel(size):
    x = RNG.normal(size=(2, 3, 6, 4)).astype(np.float32)
    high, wide = size if isinstance(size, tuple) else (size, size)
    batch = np.concatenate(
        [x[n : n + 1, :, p::high, q::wide] for n in range(2) for p in range(high) for q in range(wide)]
    )
    np.testing.assert_array_equal(F.space_to_batch2d(jnp.asarray(x), size), batch)
    np.testing.assert_array_equal(F.batch_to_space2d(jnp.asarray(batch), size), x)
    parts = [x[:, c : c + 1, p::high, q::wide] for c in range(3) for p in range(high) for q in range(wide)]
    channels = np.concatenate(parts, axis=1)
    np.testing.assert_array_equal(F.space_to_channel2d(jnp.asarray(x), size), channels)
    np.testing.assert_array_equal(F.channel_to_space2d(jnp.asarray(channels), size), x)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda x: F.max_pool_2d(x[0]), "max_pool_2d: x is no batch of images, which has 4 dimensions."),
        (lambda x: F.average_pool_2d(x, 0), "average_pool_2d: size is neither a number above 0 nor two of them."),
        (lambda x: F.max_pool_2d(x, (1, 2, 3)), "max_pool_2d: size is neither a number above 0 nor two of them."),
        (lambda x: F.max_pool_2d(x, 2, -1), "max_pool_2d: strides is neither a number above 0 nor two of them."),
        (lambda x: F.batch_to_space2d(x), "batch_to_space2d: the batch, 3, is no multiple of 4."),
        (lambda x: F.channel_to_space2d(x), "channel_to_space2d: the number of channels, 5, is no multiple of 4."),
        (lambda x: F.space_to_batch2d(x), "space_to_batch2d: the height, 7, is no multiple of 2."),
        (lambda x: F.space_to_channel2d(x, (7, 2)), "space_to_channel2d: the width, 9, is no multiple of 2."),
    ],
)
def test_misuse(call, what):
    with pytest.raises(MisuseError) as error:
        call(jnp.ones((3, 5, 7, 9)))
    assert error.value.what == what


def test_misuse_says_what_was_given():
    with pytest.raises(MisuseError) as error:
        F.max_pool_2d(jnp.ones((3, 8, 8)))
    assert str(error.value) == (
        "max_pool_2d: x is no batch of images, which has 4 dimensions.\n"
        "  got:      float32[3, 8, 8]\n"
        "  expected: [batch, channels, height, width]\n"
        "  fix:      x[None], for one image"
    )
