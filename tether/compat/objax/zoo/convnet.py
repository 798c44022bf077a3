# SPDX-License-Identifier: Apache-2.0
"""A plain convolutional network.

| Objax | here | what differs |
| --- | --- | --- |
| ConvNet | the same layers | nothing |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tether.compat.objax.functional import leaky_relu, max_pool_2d
from tether.compat.objax.nn import Conv2D, Sequential
from tether.compat.objax.typing import JaxArray


class ConvNet(Sequential):
    """Convolutions, twice for each scale, then a pooling; at the end one of the classes, averaged over the image.

    Args:
        nin: Number of channels of the images.
        nclass: Number of classes.
        scales: How often the images are halved.
        filters: Number of channels at the first scale; each scale has twice as many.
        filters_max: Their greatest number.
        pooling: Halves images, called with ``size=2, strides=2``.
        **kwargs: Ignored.
    Example:
        >>> from tether.compat.objax.zoo.convnet import ConvNet
        >>> ConvNet(3, 10, scales=2, filters=4, filters_max=8)(jnp.ones((1, 3, 8, 8))).shape
        (1, 10)
    """

    def __init__(
        self,
        nin: int,
        nclass: int,
        scales: int,
        filters: int,
        filters_max: int,
        pooling: Callable[..., JaxArray] = max_pool_2d,
        **kwargs: Any,
    ):
        def width(scale: int) -> int:
            return min(filters_max, filters << scale)

        layers = [Conv2D(nin, width(0), 3), leaky_relu]
        for scale in range(scales):
            layers += [Conv2D(width(scale), width(scale), 3), leaky_relu]
            layers += [Conv2D(width(scale), width(scale + 1), 3), leaky_relu]
            layers += [functools.partial(pooling, size=2, strides=2)]
        super().__init__([*layers, Conv2D(width(scales), nclass, 3), self._mean_reduce])

    @staticmethod
    def _mean_reduce(x: JaxArray) -> JaxArray:
        return x.mean((2, 3))
