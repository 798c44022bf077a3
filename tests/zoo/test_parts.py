# SPDX-License-Identifier: Apache-2.0
"""What the models for images share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tether import errors, zoo
from tether.zoo import _parts


def test_convolution_keeps_the_size_but_for_the_stride(key):
    x = jnp.ones((2, 4, 9, 8))
    for size, stride, shape in ((1, 1, (9, 8)), (3, 1, (9, 8)), (3, 2, (5, 4)), (7, 2, (5, 4)), (1, 2, (5, 4))):
        layer = _parts.conv(4, 6, size, stride, key=key)
        assert layer(x).shape == (2, 6, *shape) and layer.bias is None


def test_batchnorm_is_that_of_pytorch(key):
    norm, x = _parts.batchnorm(3, jnp.float32), jax.random.normal(key, (4, 3, 5, 5)) * 2 + 1
    norm(x)
    np.testing.assert_allclose(norm.mean, 0.1 * np.asarray(x).mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(norm.var, 0.9 + 0.1 * np.asarray(x).var((0, 2, 3), ddof=1), rtol=1e-5)


def test_message_for_images_with_channels_last(key):
    model = zoo.ConvNet((2,), key=key)
    with pytest.raises(errors.ShapeError) as error:
        model(jnp.ones((4, 8, 8, 3)))
    assert str(error.value) == (
        "ConvNet: x are not images of 3 channels.\n"
        "  at:       the module itself  (ConvNet)\n"
        "  got:      float32[4, 8, 8, 3]\n"
        "  expected: [..., 3, height, width]\n"
        "  fix:      one of\n"
        "    1. x.transpose(0, 3, 1, 2), if the channels are last\n"
        "    2. in_channels as the images have them"
    )
    with pytest.raises(errors.DtypeError, match="the input is not an array of numbers"):
        model("images")
