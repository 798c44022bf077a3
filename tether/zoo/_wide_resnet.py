# SPDX-License-Identifier: Apache-2.0
"""Wide residual networks for images of 32 pixels, normalized before each convolution."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether.errors import ArgumentError
from tether.nn import Dropout, Linear, Sequential
from tether.nn._inputs import integer, name_of
from tether.random import keys
from tether.zoo._parts import as_images, batchnorm, conv


class WideBlock(Module):
    """Two convolutions of 3x3, each after its normalization, beside a shortcut that nothing follows.

    h = relu(bn1(x)); y = shortcut + conv2(dropout(relu(bn2(conv1(h)))))

    The shortcut is x, or a convolution of 1x1 of h where the number of channels changes.

    Args:
        in_channels, channels: Of x and y.
        stride: Of the first convolution, and of the shortcut.
        dropout: Probability, in [0, 1).
        key, dtype: As in WideResNet.
    Shapes:
        x: float[..., in_channels, height, width] -> float[..., channels, height', width']
    Raises:
        ArgumentError: a stride other than 1 without a change of the channels, for which the shortcut has nothing.
    Example:
        >>> tether.zoo.WideBlock(4, 8, stride=2)(jnp.ones((2, 4, 6, 6))).shape
        (2, 8, 3, 3)
    References:
        Zagoruyko and Komodakis 2016, arXiv:1605.07146, figure 1 (d).
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int = 1,
        *,
        dropout: float = 0.0,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        if stride != 1 and in_channels == channels:
            raise ArgumentError(
                f"{name_of(self)}: a stride without a change of channels leaves the shortcut at another size.",
                got=f"stride={stride}, in_channels={in_channels}, channels={channels}",
                expected="stride=1, or other channels",
                fix="stride=1",
            )
        key1, key2, key3 = keys(key, 3)
        self.bn1 = batchnorm(in_channels, dtype)
        self.conv1 = conv(in_channels, channels, 3, stride, key=key1, dtype=dtype)
        self.bn2 = batchnorm(channels, dtype)
        self.dropout = Dropout(dropout)
        self.conv2 = conv(channels, channels, 3, key=key2, dtype=dtype)
        self.convShortcut = None
        if in_channels != channels:
            self.convShortcut = conv(in_channels, channels, 1, stride, key=key3, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.nn.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(h)
        return shortcut + self.conv2(self.dropout(jax.nn.relu(self.bn2(self.conv1(h)))))


class _Stage(Module):
    """Blocks one after another, under the name that published weights give them."""

    def __init__(self, blocks: list[WideBlock]):
        self.layer = Sequential(blocks)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


class WideResNet(Module):
    """Classifies images of 32 pixels: WRN-depth-width.

    A convolution of 3x3, three stages of (depth - 4) / 6 blocks with 16, 32 and 64 times width channels, the mean over
    space, a Linear. Parts are named as in the PyTorch code whose weights are the most published: ``conv1``,
    ``block1.layer.0.bn1``, ``convShortcut``, ``bn1``, ``fc``.

    Args:
        depth: Number of convolutions that are not shortcuts, and 1 for the Linear: 6 n + 4, at least 10.
        width: How many times as wide as the thin network, at least 1; k in the paper.
        num_classes: Size of the output, at least 1.
        in_channels: Of the images, at least 1.
        base_width: Channels of the stem, 16 in the paper.
        dropout: Probability between the convolutions of a block, in [0, 1).
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
    Shapes:
        x: float[batch, in_channels, height, width] -> float[batch, num_classes]
    Raises:
        ShapeError: x are not images of in_channels channels.
        ArgumentError: a depth that is not 6 n + 4, or a number out of its range.
    Example:
        >>> model = tether.zoo.WideResNet(10, 2)
        >>> model(jnp.ones((2, 3, 32, 32))).shape
        (2, 10)
    References:
        Zagoruyko and Komodakis 2016, arXiv:1605.07146, table 1.
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        base_width: int = 16,
        dropout: float = 0.0,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        blocks, width = _blocks(name, depth), integer(name, "width", width)
        self.in_channels = integer(name, "in_channels", in_channels)
        channels = integer(name, "base_width", base_width)
        stem_key, head_key, *stage_keys = keys(key, 5)
        self.conv1 = conv(self.in_channels, channels, 3, key=stem_key, dtype=dtype)
        make = functools.partial(WideBlock, dropout=dropout, dtype=dtype)
        stages = []
        for number, stage_key in enumerate(stage_keys):
            wide, stride = base_width * width * 2**number, 1 if number == 0 else 2
            first, *others = keys(stage_key, blocks)
            parts = [make(channels, wide, stride, key=first), *(make(wide, wide, key=k) for k in others)]
            stages.append(_Stage(parts))
            channels = wide
        self.block1, self.block2, self.block3 = stages
        self.bn1 = batchnorm(channels, dtype)
        self.fc = Linear(channels, integer(name, "num_classes", num_classes), key=head_key, dtype=dtype)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = self.block3(self.block2(self.block1(self.conv1(as_images(self, x, self.in_channels)))))
        return self.fc(jax.nn.relu(self.bn1(x)).mean((-2, -1)))


def _blocks(name: str, depth: int) -> int:
    """The number of blocks in a stage."""
    depth = integer(name, "depth", depth, least=10)
    if depth % 6 != 4:
        raise ArgumentError(
            f"{name}: depth is not 6 n + 4.",
            got=f"depth={depth}",
            expected="10, 16, 22, 28, 34, 40, ...",
            fix=f"depth={depth - (depth - 4) % 6}",
        )
    return (depth - 4) // 6
