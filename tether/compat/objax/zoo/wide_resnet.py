# SPDX-License-Identifier: Apache-2.0
"""Wide residual networks.

| Objax | here | what differs |
| --- | --- | --- |
| WRNBlock, WideResNetGeneral, WideResNet | the same layers and names of variables | nothing |
| conv_args | the same | stddev is a Python float |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tether.compat.objax import random
from tether.compat.objax._errors import MisuseError
from tether.compat.objax.constants import ConvPadding
from tether.compat.objax.functional import relu
from tether.compat.objax.module import Module
from tether.compat.objax.nn import BatchNorm2D, Conv2D, Linear, Sequential
from tether.compat.objax.nn.init import xavier_truncated_normal
from tether.compat.objax.typing import JaxArray

__all__ = ["WRNBlock", "WideResNet", "WideResNetGeneral"]

BN_MOM = 0.9
BN_EPS = 1e-5

_FIRST_WIDTH = 16
_batch_norm = functools.partial(BatchNorm2D, momentum=BN_MOM, eps=BN_EPS)


def conv_args(kernel_size: int, nout: int) -> dict[str, Any]:
    """Arguments of a convolution: normal weights, no bias, the same size of images.

    Args:
        kernel_size: Height and width of the kernel.
        nout: Number of channels of the output.
    """
    stddev = 1 / math.sqrt(0.5 * kernel_size * kernel_size * nout)
    return {
        "w_init": functools.partial(random.normal, stddev=stddev),
        "use_bias": False,
        "padding": ConvPadding.SAME,
    }


class WRNBlock(Module):
    """Two convolutions, and the input added to what they make.

    Args:
        nin: Number of channels of the input.
        nout: Number of channels of the output.
        stride: Step of the first convolution.
        bn: Makes a normalization for a number of channels.
    """

    def __init__(self, nin: int, nout: int, stride: int = 1, bn: Callable[..., Any] = _batch_norm):
        keeps_shape = nin == nout and stride == 1
        self.proj_conv = None if keeps_shape else Conv2D(nin, nout, 1, strides=stride, **conv_args(1, nout))
        self.norm_1 = bn(nin)
        self.conv_1 = Conv2D(nin, nout, 3, strides=stride, **conv_args(3, nout))
        self.norm_2 = bn(nout)
        self.conv_2 = Conv2D(nout, nout, 3, strides=1, **conv_args(3, nout))

    def __call__(self, x: Any, training: bool) -> JaxArray:
        """The images of the block."""
        first = relu(self.norm_1(x, training))
        second = relu(self.norm_2(self.conv_1(first), training))
        return self.conv_2(second) + (x if self.proj_conv is None else self.proj_conv(first))


class WideResNetGeneral(Sequential):
    """A wide residual network of any number of groups; each has twice the channels of the one before, at half the size.

    Args:
        nin: Number of channels of the images.
        nclass: Number of classes.
        blocks_per_group: Number of blocks of each group.
        width: How often the channels of the first group have 16.
        bn: Makes a normalization for a number of channels.
    """

    def __init__(
        self,
        nin: int,
        nclass: int,
        blocks_per_group: Sequence[int],
        width: float,
        bn: Callable[..., Any] = _batch_norm,
    ):
        n = _FIRST_WIDTH
        layers: list[Any] = [Conv2D(nin, n, 3, **conv_args(3, n))]
        for group, blocks in enumerate(blocks_per_group):
            nout = int(_FIRST_WIDTH * 2**group * width)
            layers.append(WRNBlock(n, nout, 2 if group else 1, bn))
            layers += [WRNBlock(nout, nout, 1, bn) for _ in range(1, blocks)]
            n = nout
        head = [bn(n), relu, self.mean_reduce, Linear(n, nclass, w_init=xavier_truncated_normal)]
        super().__init__([*layers, *head])

    @staticmethod
    def mean_reduce(x: JaxArray) -> JaxArray:
        """The mean over each image."""
        return x.mean((2, 3))


class WideResNet(WideResNetGeneral):
    """A wide residual network of three groups, for small images.

    Args:
        nin: Number of channels of the images.
        nclass: Number of classes.
        depth: Number of layers, 6 n + 4.
        width: How often the channels of the first group have 16.
        bn: Makes a normalization for a number of channels.
    Raises:
        MisuseError: depth isn't 6 n + 4.
    Example:
        >>> from tether.compat.objax.zoo.wide_resnet import WideResNet
        >>> WideResNet(nin=3, nclass=10, depth=10, width=1)(jnp.ones((1, 3, 8, 8)), training=False).shape
        (1, 10)
    References:
        Zagoruyko and Komodakis 2016, arXiv:1605.07146.
    """

    def __init__(self, nin: int, nclass: int, depth: int = 28, width: float = 2, bn: Callable[..., Any] = _batch_norm):
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            raise MisuseError(
                "WideResNet: depth should be 6n+4.",
                got=f"depth={depth}",
                expected="10, 16, 22, 28 ...: two convolutions in each of n blocks in each of three groups",
                fix=f"depth={6 * max(1, blocks) + 4}",
            )
        super().__init__(nin, nclass, [blocks] * 3, width, bn)
