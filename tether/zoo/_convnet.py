# SPDX-License-Identifier: Apache-2.0
"""A small convolutional network, the one to begin with."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn import Lambda, Linear, MaxPool2d, Sequential
from tether.nn._inputs import integer, name_of
from tether.random import keys
from tether.zoo._parts import as_images, batchnorm, conv


class ConvNet(Module):
    """Classifies images: (convolution, BatchNorm, relu, pooling) a few times, the mean over space, a Linear.

    Each stage halves the size. The parts are ``features``, four for each stage, and ``classifier``.

    Args:
        channels: Of each stage, at least one.
        num_classes: Size of the output, at least 1.
        in_channels: Of the images, at least 1.
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
    Shapes:
        x: float[batch, in_channels, height, width] -> float[batch, num_classes]
    Raises:
        ShapeError: x are not images of in_channels channels, or smaller than 2 to the number of stages.
        ArgumentError: no channels, or a number out of its range.
    Example:
        >>> model = tether.zoo.ConvNet((8, 16), num_classes=10, in_channels=1)
        >>> model(jnp.ones((2, 1, 8, 8))).shape
        (2, 10)
    """

    def __init__(
        self,
        channels: Sequence[int] = (32, 64, 128),
        *,
        num_classes: int = 10,
        in_channels: int = 3,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        if not isinstance(channels, list | tuple) or not channels:
            raise ArgumentError(
                f"{name}: channels are no list.",
                got=f"channels={describe(channels)}",
                expected="the channels of each stage, one at least",
                fix="channels=(32, 64)",
            )
        sizes = [integer(name, "in_channels", in_channels), *(integer(name, "channels", size) for size in channels)]
        self.in_channels, self.stages = sizes[0], len(channels)
        head_key, *stage_keys = keys(key, len(sizes))
        layers: list[Module] = []
        for before, after, stage_key in zip(sizes[:-1], sizes[1:], stage_keys, strict=True):
            layers += [conv(before, after, 3, key=stage_key, dtype=dtype), batchnorm(after, dtype)]
            layers += [Lambda(jax.nn.relu), MaxPool2d(2)]
        self.features = Sequential(layers)
        self.classifier = Linear(sizes[-1], integer(name, "num_classes", num_classes), key=head_key, dtype=dtype)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_images(self, x, self.in_channels)
        if min(x.shape[-2:]) < 2**self.stages:
            raise ShapeError(
                f"{name_of(self)}: the images are too small for {self.stages} stages that each halve them.",
                got=describe(x),
                expected=f"height and width of {2**self.stages} or more",
                fix="fewer channels=(...), one for each stage",
            )
        return self.classifier(self.features(x).mean((-2, -1)))
