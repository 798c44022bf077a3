# SPDX-License-Identifier: Apache-2.0
"""Residual networks, version 2: normalization and activation come before each convolution.

| Objax | here | what differs |
| --- | --- | --- |
| ResNetV2 and ResNet18 to ResNet200 | the same layers and names of variables | strides may be pairs |
| conv_args | the same | stddev is a Python float |
| convert_keras_model and its parts | variables are assigned | they stay the same variables; shapes are checked |
| load_pretrained_weights_from_keras | the same | TensorFlow is imported when it is called |
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tether.compat.objax import random
from tether.compat.objax._errors import MisuseError
from tether.compat.objax.constants import ConvPadding
from tether.compat.objax.functional import max_pool_2d, pad, relu
from tether.compat.objax.module import Module
from tether.compat.objax.nn import BatchNorm2D, Conv2D, Linear, Sequential
from tether.compat.objax.nn.init import xavier_normal
from tether.compat.objax.typing import JaxArray
from tether.compat.objax.util import to_tuple
from tether.compat.objax.variable import TrainVar

__all__ = [
    "ResNet18",
    "ResNet34",
    "ResNet50",
    "ResNet101",
    "ResNet152",
    "ResNet200",
    "ResNetV2",
    "load_pretrained_weights_from_keras",
]

_FIRST_WIDTH = 64
_PLAIN = {
    "bottleneck": False,
    "channels_per_group": (64, 128, 256, 512),
    "group_use_projection": (False, True, True, True),
}
_BOTTLENECK = {"bottleneck": True, "group_strides": (2, 2, 2, 1)}
# Where each part begins in the list of layers; between them are the groups.
_FIRST_GROUP, _NORM, _HEAD = 3, 7, 10
_KERAS_BLOCKS = {"ResNet50": [3, 4, 6, 3], "ResNet101": [3, 4, 23, 3], "ResNet152": [3, 8, 36, 3]}


def conv_args(kernel_size: int, nout: int, padding: Any = ConvPadding.VALID) -> dict[str, Any]:
    """Arguments of a convolution: normal weights, no bias.

    Args:
        kernel_size: Height and width of the kernel.
        nout: Number of channels of the output.
        padding: As in Conv2D.
    """
    stddev = 1 / math.sqrt(0.5 * kernel_size * kernel_size * nout)
    return {"w_init": functools.partial(random.normal, stddev=stddev), "use_bias": False, "padding": padding}


class ResNetV2Block(Module):
    """Three convolutions, the middle one of a quarter of the channels; or two. What came in is added.

    Args:
        nin: Number of channels of the input.
        nout: Number of channels of the output.
        stride: Step of the last 3x3 convolution: a number, or two.
        use_projection: Whether a convolution makes nout channels of what is added.
        bottleneck: Three convolutions, else two.
        normalization_fn: Makes a normalization for a number of channels.
        activation_fn: The activation.
    """

    def __init__(
        self,
        nin: int,
        nout: int,
        stride: int | Sequence[int],
        use_projection: bool,
        bottleneck: bool,
        normalization_fn: Callable[..., Any] = BatchNorm2D,
        activation_fn: Callable[..., Any] = relu,
    ):
        self.norm_0: Any
        self.norm_1: Any
        self.conv_0: Any
        self.conv_1: Any
        self.use_projection = use_projection
        self.activation_fn = activation_fn
        self.stride = stride
        if use_projection:
            self.proj_conv = Conv2D(nin, nout, 1, strides=stride, **conv_args(1, nout))
        inner, one = nout // 4, (1, 1)
        if bottleneck:
            convs = [(nin, inner, 1, 1, ConvPadding.VALID), (inner, inner, 3, stride, one)]
            convs += [(inner, nout, 1, 1, ConvPadding.VALID)]
        else:
            convs = [(nin, nout, 3, 1, one), (nout, nout, 3, stride, one)]
        for number, (ninput, noutput, size, step, padding) in enumerate(convs):
            setattr(self, f"norm_{number}", normalization_fn(ninput))
            conv = Conv2D(ninput, noutput, size, strides=step, **conv_args(size, noutput, padding))
            setattr(self, f"conv_{number}", conv)

    @property
    def layers(self) -> tuple[tuple[Any, Any], ...]:
        """Normalization and convolution, in order."""
        numbers = (number for number in range(3) if hasattr(self, f"conv_{number}"))
        return tuple((getattr(self, f"norm_{number}"), getattr(self, f"conv_{number}")) for number in numbers)

    def __call__(self, x: Any, training: bool) -> JaxArray:
        """The images of the block."""
        shortcut = max_pool_2d(x, size=1, strides=self.stride) if max(to_tuple(self.stride, 2)) > 1 else x
        for number, (norm, conv) in enumerate(self.layers):
            x = self.activation_fn(norm(x, training))
            if number == 0 and self.use_projection:
                shortcut = self.proj_conv(x)
            x = conv(x)
        return x + shortcut


class ResNetV2BlockGroup(Sequential):
    """Blocks of the same number of channels; the first has the projection, the last the stride.

    Args:
        nin: Number of channels of the input.
        nout: Number of channels of the output.
        num_blocks: Number of blocks.
        stride: Of the last block.
        use_projection: Of the first block.
        bottleneck: Of all blocks; see ResNetV2Block, also for the others.
        normalization_fn: Makes a normalization for a number of channels.
        activation_fn: The activation.
    """

    def __init__(
        self,
        nin: int,
        nout: int,
        num_blocks: int,
        stride: int | Sequence[int],
        use_projection: bool,
        bottleneck: bool,
        normalization_fn: Callable[..., Any] = BatchNorm2D,
        activation_fn: Callable[..., Any] = relu,
    ):
        super().__init__(
            ResNetV2Block(
                nout if number else nin,
                nout,
                stride if number == num_blocks - 1 else 1,
                use_projection and number == 0,
                bottleneck,
                normalization_fn,
                activation_fn,
            )
            for number in range(num_blocks)
        )


def _mean(x: JaxArray) -> JaxArray:
    return x.mean((2, 3))


class ResNetV2(Sequential):
    """A residual network of any groups.

    Args:
        in_channels: Number of channels of the images.
        num_classes: Number of classes.
        blocks_per_group: Number of blocks of each group.
        bottleneck: Whether blocks have three convolutions, else two.
        channels_per_group: Number of channels of each group.
        group_strides: Stride of the last block of each group.
        group_use_projection: Whether the first block of each group has a projection.
        normalization_fn: Makes a normalization for a number of channels.
        activation_fn: The activation.
    Raises:
        MisuseError: not the same number of groups everywhere.
    References:
        He et al. 2016, arXiv:1603.05027.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        blocks_per_group: Sequence[int],
        bottleneck: bool = True,
        channels_per_group: Sequence[int] = (256, 512, 1024, 2048),
        group_strides: Sequence[int] = (1, 2, 2, 2),
        group_use_projection: Sequence[bool] = (True, True, True, True),
        normalization_fn: Callable[..., Any] = BatchNorm2D,
        activation_fn: Callable[..., Any] = relu,
    ):
        groups = {
            "channels_per_group": channels_per_group,
            "group_strides": group_strides,
            "group_use_projection": group_use_projection,
        }
        for name, values in groups.items():
            if len(values) != len(blocks_per_group):
                raise MisuseError(
                    f"ResNetV2: {name} has not one entry for each group.",
                    got=f"{name}={tuple(values)}, blocks_per_group={tuple(blocks_per_group)}",
                    expected=f"{len(blocks_per_group)} entries",
                )
        nout = _FIRST_WIDTH
        layers: list[Any] = [
            Conv2D(in_channels, nout, k=7, strides=2, **conv_args(7, nout, (3, 3))),
            functools.partial(pad, pad_width=((0, 0), (0, 0), (1, 1), (1, 1))),
            functools.partial(max_pool_2d, size=3, strides=2, padding=ConvPadding.VALID),
        ]
        for blocks, channels, stride, use_projection in zip(blocks_per_group, *groups.values(), strict=True):
            made = (normalization_fn, activation_fn)
            layers.append(ResNetV2BlockGroup(nout, channels, blocks, stride, use_projection, bottleneck, *made))
            nout = channels
        head = [normalization_fn(nout), activation_fn, _mean, Linear(nout, num_classes, w_init=xavier_normal)]
        super().__init__([*layers, *head])


class _Known(ResNetV2):
    """A network whose groups are known."""

    _groups: dict[str, Any]

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        normalization_fn: Callable[..., Any] = BatchNorm2D,
        activation_fn: Callable[..., Any] = relu,
    ):
        super().__init__(
            in_channels,
            num_classes,
            **self._groups,
            normalization_fn=normalization_fn,
            activation_fn=activation_fn,
        )


class ResNet18(_Known):
    """ResNetV2 of 18 layers; arguments as there.

    Example:
        >>> from tether.compat.objax.zoo.resnet_v2 import ResNet18
        >>> ResNet18(in_channels=3, num_classes=10)(jnp.ones((1, 3, 32, 32)), training=False).shape
        (1, 10)
    """

    _groups = {"blocks_per_group": (2, 2, 2, 2), **_PLAIN}


class ResNet34(_Known):
    """ResNetV2 of 34 layers; arguments as there."""

    _groups = {"blocks_per_group": (3, 4, 6, 3), **_PLAIN}


class ResNet50(_Known):
    """ResNetV2 of 50 layers; arguments as there."""

    _groups = {"blocks_per_group": (3, 4, 6, 3), **_BOTTLENECK}


class ResNet101(_Known):
    """ResNetV2 of 101 layers; arguments as there."""

    _groups = {"blocks_per_group": (3, 4, 23, 3), **_BOTTLENECK}


class ResNet152(_Known):
    """ResNetV2 of 152 layers; arguments as there."""

    _groups = {"blocks_per_group": (3, 8, 36, 3), **_BOTTLENECK}


class ResNet200(_Known):
    """ResNetV2 of 200 layers; arguments as there."""

    _groups = {"blocks_per_group": (3, 24, 36, 3), **_BOTTLENECK}


def convert_bn_layer(keras_layer: Any, objax_layer: Any) -> None:
    """Copies what a BatchNormalization of Keras has to a BatchNorm2D."""
    names = {"gamma": "gamma", "beta": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}
    for name, keras_name in names.items():
        variable = getattr(objax_layer, name)
        variable.assign(_array(keras_layer, keras_name).reshape(variable.shape))


def convert_conv_or_linear_layer(keras_layer: Any, objax_layer: Any) -> None:
    """Copies what a Conv2D or Dense layer of Keras has to a Conv2D or Linear; afterwards both have a bias, or none."""
    objax_layer.w.assign(_array(keras_layer, "kernel"))
    if getattr(keras_layer, "bias", None) is None:
        objax_layer.b = None
        return
    w = objax_layer.w
    bias = _array(keras_layer, "bias").reshape((w.shape[-1], 1, 1) if w.ndim == 4 else (w.shape[-1],))
    if objax_layer.b is None:
        objax_layer.b = TrainVar(bias)
    else:
        objax_layer.b.assign(bias)


def convert_resblock(keras_block: Sequence[Any], objax_block: ResNetV2Block) -> None:
    """Copies what the layers of a block of Keras have to a block of three convolutions.

    Args:
        keras_block: The layers, which are known by the ends of their names.
        objax_block: The block.
    """
    if objax_block.use_projection:
        convert_conv_or_linear_layer(_ending(keras_block, "0_conv"), objax_block.proj_conv)
    names = ("preact_bn", "1_conv"), ("1_bn", "2_conv"), ("2_bn", "3_conv")
    for (norm, conv), (norm_name, conv_name) in zip(objax_block.layers, names, strict=True):
        convert_bn_layer(_ending(keras_block, norm_name), norm)
        convert_conv_or_linear_layer(_ending(keras_block, conv_name), conv)


def convert_keras_model(
    model_keras: Any, model_objax: ResNetV2, num_blocks: Sequence[int], include_top: bool = True
) -> None:
    """Copies what a ResNetV2 of ``keras.applications`` has to one of the same blocks.

    Args:
        model_keras: Anything with ``layers`` and ``get_layer(name)``, whose layers have Keras's names and variables.
        model_objax: The network.
        num_blocks: Number of blocks of each group.
        include_top: Whether the linear layer at the end is copied, too.
    Raises:
        MisuseError: the network has other blocks, or a layer isn't there, or has another shape.
    """
    blocks = [len(group) for group in model_objax[_FIRST_GROUP:_NORM]]
    if blocks != list(num_blocks):
        raise MisuseError(
            "convert_keras_model: num_blocks are not those of the network.",
            got=f"num_blocks={list(num_blocks)}",
            expected=f"{blocks}",
        )
    convert_conv_or_linear_layer(model_keras.get_layer("conv1_conv"), model_objax[0])
    for group, count in enumerate(num_blocks):
        for number in range(count):
            # With what follows: conv4_block1 begins the name of conv4_block10, too.
            begin = f"conv{group + 2}_block{number + 1}_"
            layers = [layer for layer in model_keras.layers if layer.name.startswith(begin)]
            convert_resblock(layers, model_objax[_FIRST_GROUP + group][number])
    convert_bn_layer(model_keras.get_layer("post_bn"), model_objax[_NORM])
    if include_top:
        convert_conv_or_linear_layer(model_keras.get_layer("predictions"), model_objax[_HEAD])


def _ending(layers: Sequence[Any], end: str) -> Any:
    found: Iterator[Any] = (layer for layer in layers if layer.name.endswith(f"_{end}"))
    layer = next(found, None)
    if layer is None:
        raise MisuseError(
            f"convert_resblock: no layer of Keras's block has a name that ends in {end}.",
            got=", ".join(layer.name for layer in layers) or "no layers",
            fix="num_blocks, and an architecture, that are those of the Keras model",
        )
    return layer


def _array(keras_layer: Any, name: str) -> JaxArray:
    variable = getattr(keras_layer, name)
    return jnp.asarray(np.asarray(variable.numpy() if hasattr(variable, "numpy") else variable))


def load_pretrained_weights_from_keras(arch: str, include_top: bool = True, num_classes: int = 1000) -> ResNetV2:
    """A network with the weights that Keras has for ImageNet, which TensorFlow fetches.

    Args:
        arch: ``"ResNet50"``, ``"ResNet101"`` or ``"ResNet152"``.
        include_top: Whether the linear layer at the end has Keras's weights, too.
        num_classes: Number of classes; 1000 with include_top.
    Raises:
        MisuseError: no weights for that network or number of classes, or TensorFlow is not installed.
    """
    if arch not in _KERAS_BLOCKS:
        raise MisuseError(
            f"Model weights does not exist for {arch}.", got=repr(arch), expected=" or ".join(map(repr, _KERAS_BLOCKS))
        )
    if include_top and num_classes != 1000:
        raise MisuseError(
            "Number of classes should be 1000 when including top layer.",
            got=f"num_classes={num_classes}",
            expected="1000, those of ImageNet",
            fix="include_top=False",
        )
    keras = _tensorflow().keras
    model_keras = getattr(keras.applications, f"{arch}V2")(
        include_top=include_top, weights="imagenet", classes=1000, classifier_activation="linear"
    )
    norm = functools.partial(BatchNorm2D, momentum=0.99, eps=1.001e-05)
    model = globals()[arch](in_channels=3, num_classes=num_classes, normalization_fn=norm)
    convert_keras_model(model_keras, model, _KERAS_BLOCKS[arch], include_top)
    return model


def _tensorflow() -> Any:
    try:
        tensorflow = importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        raise MisuseError(
            "Please install tensorflow dependency to be able to load keras weights.",
            got=f"no module {error.name!r}",
            expected="tensorflow, which nothing else here needs",
            fix="pip install tensorflow",
        ) from error
    tensorflow.config.experimental.set_visible_devices([], "GPU")  # those are JAX's
    return tensorflow
