# SPDX-License-Identifier: Apache-2.0
"""Pooling, and exchanges of space for batch or channels.

| Objax | here | what differs |
| --- | --- | --- |
| average_pool_2d, max_pool_2d | ``lax.reduce_window`` | whole numbers, too; the error of a bad input is in words |
| space_to_batch2d, space_to_channel2d, batch_to_space2d, channel_to_space2d | reshapes | the same errors |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tether.compat.objax.constants import ConvPadding
from tether.compat.objax.functional.core._inputs import divided, images, pair
from tether.compat.objax.util import to_padding

__all__ = [
    "average_pool_2d",
    "batch_to_space2d",
    "channel_to_space2d",
    "max_pool_2d",
    "space_to_batch2d",
    "space_to_channel2d",
]


def average_pool_2d(x: Any, size: Any = 2, strides: Any = None, padding: Any = ConvPadding.VALID) -> jax.Array:
    """The mean of each window; padding counts, as zeros.

    Args:
        x: Images, [batch, channels, height, width].
        size: Of a window: a number, or height and width.
        strides: From window to window: a number, or two; None for the size.
        padding: A ConvPadding or its name, a number, a pair for both axes, or a pair for each.
    Raises:
        MisuseError: x isn't of rank 4, or size or strides aren't positive.
    Example:
        >>> objax.functional.average_pool_2d(jnp.arange(4.0).reshape(1, 1, 2, 2)).tolist()
        [[[[1.5]]]]
    """
    size = pair("average_pool_2d", "size", size)
    return _pooled("average_pool_2d", x, 0, lax.add, size, strides, padding) / math.prod(size)


def max_pool_2d(x: Any, size: Any = 2, strides: Any = None, padding: Any = ConvPadding.VALID) -> jax.Array:
    """The maximum of each window; padding never is it.

    Args:
        x: Images, [batch, channels, height, width].
        size: Of a window: a number, or height and width.
        strides: From window to window: a number, or two; None for the size.
        padding: A ConvPadding or its name, a number, a pair for both axes, or a pair for each.
    Raises:
        MisuseError: x isn't of rank 4, or size or strides aren't positive.
    """
    size = pair("max_pool_2d", "size", size)
    dtype = jnp.asarray(x).dtype
    least = jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else -math.inf
    return _pooled("max_pool_2d", x, least, lax.max, size, strides, padding)


def batch_to_space2d(x: Any, size: Any = 2) -> jax.Array:
    """Makes one image of several of the batch, interleaved.

    Args:
        x: Images, [batch, channels, height, width].
        size: How many in height and in width: a number, or two.
    Returns:
        [batch / (size[0] * size[1]), channels, height * size[0], width * size[1]]
    Raises:
        MisuseError: x isn't of rank 4, or the batch isn't a multiple of what goes into one image.
    """
    x, (high, wide) = images("batch_to_space2d", x), pair("batch_to_space2d", "size", size)
    batch, channels, height, width = x.shape
    count = divided("batch_to_space2d", "the batch", x, batch, high * wide)
    y = x.reshape(count, high, wide, channels, height, width).transpose(0, 3, 4, 1, 5, 2)
    return y.reshape(count, channels, height * high, width * wide)


def space_to_batch2d(x: Any, size: Any = 2) -> jax.Array:
    """Makes several images of one, each of every ``size``-th pixel; the inverse of ``batch_to_space2d``.

    Args:
        x: Images, [batch, channels, height, width].
        size: How many in height and in width: a number, or two.
    Returns:
        [batch * size[0] * size[1], channels, height / size[0], width / size[1]]
    Raises:
        MisuseError: x isn't of rank 4, or height or width isn't a multiple of size.
    Example:
        >>> objax.functional.space_to_batch2d(jnp.arange(4).reshape(1, 1, 2, 2)).ravel().tolist()
        [0, 1, 2, 3]
    """
    y = _split("space_to_batch2d", x, size)
    batch, channels, height, high, width, wide = y.shape
    return y.transpose(0, 3, 5, 1, 2, 4).reshape(batch * high * wide, channels, height, width)


def channel_to_space2d(x: Any, size: Any = 2) -> jax.Array:
    """Makes one channel of several, interleaved.

    Args:
        x: Images, [batch, channels, height, width].
        size: How many in height and in width: a number, or two.
    Returns:
        [batch, channels / (size[0] * size[1]), height * size[0], width * size[1]]
    Raises:
        MisuseError: x isn't of rank 4, or the channels aren't a multiple of what goes into one.
    """
    x, (high, wide) = images("channel_to_space2d", x), pair("channel_to_space2d", "size", size)
    batch, channels, height, width = x.shape
    count = divided("channel_to_space2d", "the number of channels", x, channels, high * wide)
    y = x.reshape(batch, count, high, wide, height, width).transpose(0, 1, 4, 2, 5, 3)
    return y.reshape(batch, count, height * high, width * wide)


def space_to_channel2d(x: Any, size: Any = 2) -> jax.Array:
    """Makes several channels of one, each of every ``size``-th pixel; the inverse of ``channel_to_space2d``.

    Args:
        x: Images, [batch, channels, height, width].
        size: How many in height and in width: a number, or two.
    Returns:
        [batch, channels * size[0] * size[1], height / size[0], width / size[1]]
    Raises:
        MisuseError: x isn't of rank 4, or height or width isn't a multiple of size.
    """
    y = _split("space_to_channel2d", x, size)
    batch, channels, height, high, width, wide = y.shape
    return y.transpose(0, 1, 3, 5, 2, 4).reshape(batch, channels * high * wide, height, width)


def _pooled(
    name: str, x: Any, start: float, operation: Callable[..., Any], size: tuple[int, ...], strides: Any, padding: Any
) -> jax.Array:
    x = images(name, x)
    strides = pair(name, "strides", strides) if strides else size
    padding = to_padding(padding, 2)
    if isinstance(padding, tuple):
        padding = ((0, 0), (0, 0), *padding)
    # A NumPy scalar stays concrete in a trace: that is how JAX knows max and sum, which it can differentiate.
    return lax.reduce_window(x, np.asarray(start, x.dtype), operation, (1, 1, *size), (1, 1, *strides), padding)


def _split(name: str, x: Any, size: Any) -> jax.Array:
    """The pixels in blocks: [batch, channels, height / high, high, width / wide, wide]."""
    x, (high, wide) = images(name, x), pair(name, "size", size)
    batch, channels, height, width = x.shape
    rows, columns = divided(name, "the height", x, height, high), divided(name, "the width", x, width, wide)
    return x.reshape(batch, channels, rows, high, columns, wide)
