# SPDX-License-Identifier: Apache-2.0
"""VGG-19.

| Objax | here | what differs |
| --- | --- | --- |
| VGG19(pretrained) | the same layers | without pretrained, no file is needed |
| vgg19.npy | read from the same place | a pickle of more than arrays is refused; shapes are checked |
| synset.txt | no download | |
| preprocess, max_pool_2d | the same | preprocess is still not among the layers |
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tether.compat.objax import functional
from tether.compat.objax.constants import ConvPadding
from tether.compat.objax.functional import flatten, relu
from tether.compat.objax.nn import Conv2D, Linear, Sequential
from tether.compat.objax.typing import JaxArray

_VGG19_URL = "https://github.com/machrisaa/tensorflow-vgg"
_VGG19_NPY = "./objax/zoo/pretrained/vgg19.npy"
_BGR_MEAN = (103.939, 116.779, 123.68)  # of ImageNet, in [0, 255]
_WIDTHS = (64, 128, 256, 512, 512)
_CONVS = (2, 2, 4, 4, 4)
_LINEAR = {"fc6": 4096, "fc7": 4096, "fc8": 1000}
_SIDE = 7  # of what is left of an image of 224 pixels


def preprocess(x: JaxArray) -> JaxArray:
    """Red, green and blue in [0, 255], as the weights have it: blue, green, red, less their means."""
    means = jnp.asarray(_BGR_MEAN, x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32)
    return x[:, ::-1].astype(means.dtype) - jnp.broadcast_to(means[None, :, None, None], x.shape)


def max_pool_2d(x: JaxArray) -> JaxArray:
    """Images of half the size."""
    return functional.max_pool_2d(x, size=2, strides=2, padding=ConvPadding.VALID)


class VGG19(Sequential):
    """VGG-19: sixteen convolutions, five poolings, three linear layers.

    Its layers are attributes, too: conv1_1 to conv5_4, fc6 to fc8.

    Args:
        pretrained: Whether the weights are those of ``./objax/zoo/pretrained/vgg19.npy``.
    Shapes:
        x: float[batch, 3, 224, 224], of ``preprocess`` -> float[batch, 1000]
    Raises:
        FileNotFoundError: there is no such file.
    References:
        Simonyan and Zisserman 2014, arXiv:1409.1556, table 1, column E.
    """

    def __init__(self, pretrained: bool = False):
        self.pretrained = pretrained
        self.data_dict: dict[str, Any] = _pretrained() if pretrained else {}
        super().__init__(self.build())

    def build(self) -> list[Any]:
        """The layers, with the weights of ``data_dict`` where it has them."""
        layers = list(self._layers())
        for name, (kernel, bias) in self.data_dict.items():
            layer = getattr(self, name)
            if name == "fc6":  # rows in the order of height, width, channel there; of channel, height, width here
                kernel = kernel.reshape(_SIDE, _SIDE, _WIDTHS[-1], -1).transpose(2, 0, 1, 3)
                kernel = kernel.reshape(-1, kernel.shape[-1])
            layer.w.assign(jnp.asarray(kernel))
            layer.b.assign(jnp.asarray(bias).reshape(-1, *(1,) * (layer.b.ndim - 1)))
        return layers

    def _layers(self) -> Iterator[Any]:
        nin = 3
        for group, (width, convs) in enumerate(zip(_WIDTHS, _CONVS, strict=True), 1):
            for number in range(1, convs + 1):
                yield self._named(f"conv{group}_{number}", Conv2D(nin, width, k=3))
                yield relu
                nin = width
            yield max_pool_2d
        yield flatten
        nin *= _SIDE * _SIDE
        for name, nout in _LINEAR.items():
            yield self._named(name, Linear(nin, nout))
            if name != "fc8":
                yield relu
            nin = nout

    def _named(self, name: str, layer: Any) -> Any:
        setattr(self, name, layer)
        return layer


def _pretrained() -> dict[str, Any]:
    path = Path(_VGG19_NPY)
    if not path.exists():
        raise FileNotFoundError(
            f"VGG19: there are no weights at {_VGG19_NPY} (that is {path.resolve()}). "
            f"Download vgg19.npy from {_VGG19_URL} and save it there, or make a VGG19(pretrained=False)."
        )
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        read_header(file)
        return _Arrays(file, encoding="latin1").load().item()


class _Arrays(pickle.Unpickler):
    """Reads arrays, in dicts and lists, and calls nothing else that a file may name."""

    _names = {"ndarray": np.ndarray, "dtype": np.dtype, "_reconstruct": np.zeros(0).__reduce__()[0]}

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in self._names:
            return self._names[name]
        raise pickle.UnpicklingError(f"VGG19: {_VGG19_NPY} has more than arrays in it: {module}.{name}.")
