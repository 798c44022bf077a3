# SPDX-License-Identifier: Apache-2.0
"""Residual networks for images of about 224 pixels, and the wide ones of the same plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether.errors import ArgumentError, describe
from tether.nn import Linear, MaxPool2d, Sequential
from tether.nn._inputs import integer, name_of
from tether.random import keys
from tether.zoo._parts import as_images, batchnorm, conv


class _Block(Module):
    """Holds what the two kinds of blocks share: y = relu(shortcut(x) + residual(x))."""

    expansion: ClassVar[int]

    def _shortcut(self, in_channels: int, out_channels: int, stride: int, key: Any, dtype: DTypeLike) -> None:
        """Declares the projection that the shortcut needs where the shape changes; else None."""
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            projection = conv(in_channels, out_channels, 1, stride, key=key, dtype=dtype)
            self.downsample = Sequential([projection, batchnorm(out_channels, dtype)])

    def _residual(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = x if self.downsample is None else self.downsample(x)
        return jax.nn.relu(shortcut + self._residual(x))


class BasicBlock(_Block):
    """Two convolutions of 3x3 beside a shortcut.

    y = relu(shortcut(x) + bn2(conv2(relu(bn1(conv1(x))))))

    Args:
        in_channels, channels: Of x and y.
        stride: Of the first convolution, and of the shortcut.
        groups, base_width: 1 and 64, the only ones there are for this block.
        key, dtype: As in ResNet.
    Shapes:
        x: float[..., in_channels, height, width] -> float[..., channels, height', width']
    Raises:
        ArgumentError: other groups or another base_width.
    Example:
        >>> tether.zoo.BasicBlock(4, 8, stride=2)(jnp.ones((2, 4, 6, 6))).shape
        (2, 8, 3, 3)
    References:
        He et al. 2015, arXiv:1512.03385, figure 5, left.
    """

    expansion = 1

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int = 1,
        *,
        groups: int = 1,
        base_width: int = 64,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        if (groups, base_width) != (1, 64):
            raise ArgumentError(
                f"{name_of(self)}: this block has neither groups nor a width of its own.",
                got=f"groups={groups}, base_width={base_width}",
                expected="groups=1, base_width=64",
                fix='block="bottleneck"',
            )
        key1, key2, key3 = keys(key, 3)
        self.conv1 = conv(in_channels, channels, 3, stride, key=key1, dtype=dtype)
        self.bn1 = batchnorm(channels, dtype)
        self.conv2 = conv(channels, channels, 3, key=key2, dtype=dtype)
        self.bn2 = batchnorm(channels, dtype)
        self._shortcut(in_channels, channels, stride, key3, dtype)

    def last_norm(self):
        """The normalization whose weight scales the residual branch."""
        return self.bn2

    def _residual(self, x: jax.Array) -> jax.Array:
        return self.bn2(self.conv2(jax.nn.relu(self.bn1(self.conv1(x)))))


class Bottleneck(_Block):
    """Convolutions of 1x1, 3x3 and 1x1, the middle one narrow, beside a shortcut.

    y = relu(shortcut(x) + bn3(conv3(relu(bn2(conv2(relu(bn1(conv1(x)))))))))

    The stride is that of the 3x3 convolution, as in all published weights of PyTorch; the paper has it in the first.

    Args:
        in_channels: Of x.
        channels: A quarter of the channels of y. The middle has channels * base_width / 64 * groups.
        stride: Of the 3x3 convolution, and of the shortcut.
        groups: Of the 3x3 convolution.
        base_width: Width of a group in the first stage of a ResNet, 64 being that of the paper.
        key, dtype: As in ResNet.
    Shapes:
        x: float[..., in_channels, height, width] -> float[..., 4 * channels, height', width']
    Raises:
        ArgumentError: base_width * channels below 64, or a number out of its range.
    Example:
        >>> tether.zoo.Bottleneck(8, 4, stride=2)(jnp.ones((2, 8, 6, 6))).shape
        (2, 16, 3, 3)
    References:
        He et al. 2015, arXiv:1512.03385, figure 5, right.
    """

    expansion = 4

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int = 1,
        *,
        groups: int = 1,
        base_width: int = 64,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        middle, out_channels = _middle(name_of(self), channels, groups, base_width), channels * self.expansion
        key1, key2, key3, key4 = keys(key, 4)
        self.conv1 = conv(in_channels, middle, 1, key=key1, dtype=dtype)
        self.bn1 = batchnorm(middle, dtype)
        self.conv2 = conv(middle, middle, 3, stride, groups=groups, key=key2, dtype=dtype)
        self.bn2 = batchnorm(middle, dtype)
        self.conv3 = conv(middle, out_channels, 1, key=key3, dtype=dtype)
        self.bn3 = batchnorm(out_channels, dtype)
        self._shortcut(in_channels, out_channels, stride, key4, dtype)

    def last_norm(self):
        """The normalization whose weight scales the residual branch."""
        return self.bn3

    def _residual(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.bn1(self.conv1(x)))
        return self.bn3(self.conv3(jax.nn.relu(self.bn2(self.conv2(x)))))


def _middle(name: str, channels: int, groups: int, base_width: int) -> int:
    """Channels of the 3x3 convolution."""
    of_group = channels * integer(name, "base_width", base_width) // 64
    if of_group == 0:
        raise ArgumentError(
            f"{name}: base_width is too small for so few channels.",
            got=f"base_width={base_width}, channels={channels}",
            expected="base_width * channels of 64 or more",
            fix=f"base_width={-(-64 // channels)} or more",
        )
    return of_group * integer(name, "groups", groups)


_BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck}


class ResNet(Module):
    """Classifies images: a stem, four stages of residual blocks, the mean over space, a Linear.

    Names of parts, arithmetic (stride on the 3x3, running variance unbiased, eps 1e-5, decay 0.9) and first values are
    torchvision's, so that its weights load without rules. ``resnet50`` and the like are the known depths.

    Args:
        depths: Number of blocks in each of the four stages, at least 1.
        block: "basic" or "bottleneck".
        num_classes: Size of the output, at least 1.
        in_channels: Of the images, at least 1.
        width: Channels of the stem and of the first stage, which double from stage to stage; at least 1.
        groups, base_width: Of the bottlenecks.
        zero_init_residual: Whether each block is the identity at first, but for its shortcut and relu.
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
    Shapes:
        x: float[batch, in_channels, height, width] -> float[batch, num_classes]
    Raises:
        ShapeError: x are not images of in_channels channels.
        ArgumentError: an option out of its range.
    Example:
        >>> model = tether.zoo.ResNet((1, 1, 1, 1), num_classes=10, width=4)
        >>> model(jnp.ones((2, 3, 32, 32))).shape
        (2, 10)
    References:
        He et al. 2015, arXiv:1512.03385. torchvision.models.resnet for names and numbers.
        Goyal et al. 2017, arXiv:1706.02677, section 5.1, for zero_init_residual.
    """

    def __init__(
        self,
        depths: Sequence[int] = (2, 2, 2, 2),
        block: str = "basic",
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        groups: int = 1,
        base_width: int = 64,
        zero_init_residual: bool = False,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        self.in_channels = integer(name, "in_channels", in_channels)
        width, depths = integer(name, "width", width), _depths(name, depths)
        stem_key, head_key, *stage_keys = keys(key, 6)
        self.conv1 = conv(self.in_channels, width, 7, 2, key=stem_key, dtype=dtype)
        self.bn1 = batchnorm(width, dtype)
        self.maxpool = MaxPool2d(3, 2, 1)
        kind = _block(name, block)
        make = functools.partial(kind, groups=groups, base_width=base_width, dtype=dtype)
        stages, channels = [], width
        for number, (depth, stage_key) in enumerate(zip(depths, stage_keys, strict=True)):
            stride = 1 if number == 0 else 2
            narrow, wide = width * 2**number, width * 2**number * kind.expansion
            first, *others = keys(stage_key, depth)
            blocks = [make(channels, narrow, stride, key=first), *(make(wide, narrow, key=k) for k in others)]
            stages.append(Sequential(blocks))
            channels = wide
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = Linear(channels, integer(name, "num_classes", num_classes), key=head_key, dtype=dtype)
        if zero_init_residual:
            for norm in (part.last_norm() for stage in stages for part in stage):
                norm.weight = jnp.zeros_like(norm.weight)

    def __call__(self, x: ArrayLike) -> jax.Array:
        h = self.maxpool(jax.nn.relu(self.bn1(self.conv1(as_images(self, x, self.in_channels)))))
        h = self.layer4(self.layer3(self.layer2(self.layer1(h))))
        return self.fc(h.mean((-2, -1)))


def _depths(name: str, depths: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(depths, list | tuple) or len(depths) != 4:
        raise ArgumentError(
            f"{name}: depths are not four numbers.",
            got=f"depths={describe(depths)}",
            expected="the number of blocks in each of four stages",
            fix="depths=(2, 2, 2, 2)",
        )
    return tuple(integer(name, "depths", depth) for depth in depths)


def _block(name: str, block: str) -> type[BasicBlock] | type[Bottleneck]:
    if block not in _BLOCKS:
        raise ArgumentError(
            f"{name}: no such block.",
            got=f"block={describe(block)}",
            expected=" or ".join(map(repr, _BLOCKS)),
            fix='block="basic"',
        )
    return _BLOCKS[block]


def resnet18(**options: Any) -> ResNet:
    """The ResNet of 18 layers, of basic blocks.

    Args:
        options: Arguments of ResNet.
    Example:
        >>> model = tether.eval_shape(tether.zoo.resnet18)  # shapes alone: nothing is drawn
        >>> sum(v.value.size for v in tether.variables(model, tether.Param).values())
        11689512
    """
    return ResNet((2, 2, 2, 2), "basic", **options)


def resnet34(**options: Any) -> ResNet:
    """The ResNet of 34 layers, of basic blocks; ``options`` are arguments of ResNet."""
    return ResNet((3, 4, 6, 3), "basic", **options)


def resnet50(**options: Any) -> ResNet:
    """The ResNet of 50 layers, of bottlenecks; ``options`` are arguments of ResNet."""
    return ResNet((3, 4, 6, 3), "bottleneck", **options)


def resnet101(**options: Any) -> ResNet:
    """The ResNet of 101 layers, of bottlenecks; ``options`` are arguments of ResNet."""
    return ResNet((3, 4, 23, 3), "bottleneck", **options)


def resnet152(**options: Any) -> ResNet:
    """The ResNet of 152 layers, of bottlenecks; ``options`` are arguments of ResNet."""
    return ResNet((3, 8, 36, 3), "bottleneck", **options)


def wide_resnet50_2(**options: Any) -> ResNet:
    """A resnet50 whose bottlenecks are twice as wide inside; ``options`` are arguments of ResNet.

    References:
        Zagoruyko and Komodakis 2016, arXiv:1605.07146, section 3.4.
    """
    return ResNet((3, 4, 6, 3), "bottleneck", **{"base_width": 128, **options})


def wide_resnet101_2(**options: Any) -> ResNet:
    """A resnet101 whose bottlenecks are twice as wide inside; ``options`` are arguments of ResNet.

    References:
        Zagoruyko and Komodakis 2016, arXiv:1605.07146, section 3.4.
    """
    return ResNet((3, 4, 23, 3), "bottleneck", **{"base_width": 128, **options})
