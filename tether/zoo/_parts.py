# SPDX-License-Identifier: Apache-2.0
"""What the models for images share: their convolution, their normalization, the check of their input."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether.errors import ShapeError, describe
from tether.nn import BatchNorm, Conv2d, init
from tether.nn._inputs import as_array, name_of


def conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, *, groups: int = 1, **options: Any):
    """A convolution that keeps the size but for the stride, without bias: a normalization follows.

    Its first values are He's, with the fan of the output.
    """
    he = init.variance_scaling(2.0, "fan_out", "normal")
    padding = kernel_size // 2
    return Conv2d(
        in_channels, out_channels, kernel_size, stride, padding, 1, groups, use_bias=False, weight_init=he, **options
    )


def batchnorm(size: int, dtype: DTypeLike) -> BatchNorm:
    """PyTorch's BatchNorm2d, which published statistics are of: the running variance is unbiased."""
    return BatchNorm.preset("torch", size, channel_axis=-3, dtype=dtype)


def as_images(model: Module, x: ArrayLike, channels: int) -> jax.Array:
    """Takes images with the channels that the model was made for."""
    x = as_array(model, x)
    if x.ndim < 3 or x.shape[-3] != channels:
        raise ShapeError(
            f"{name_of(model)}: x are not images of {channels} channels.",
            got=describe(x),
            expected=f"[..., {channels}, height, width]",
            fix=["x.transpose(0, 3, 1, 2), if the channels are last", "in_channels as the images have them"],
        )
    return x
