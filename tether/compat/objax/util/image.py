# SPDX-License-Identifier: Apache-2.0
"""Images: layouts, ranges of numbers, files.

| Objax | here | what differs |
| --- | --- | --- |
| from_file, to_png | Pillow, imported when one is called | to_png takes bfloat16, too |
| image_grid, nchw, nhwc | transpositions | nothing |
| normalize_to_uint8, normalize_to_unit_float | 256 levels as the middles of 256 parts of [-1, 1] | nothing |
"""

from __future__ import annotations

import importlib
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether.compat.objax._errors import ConflictError
from tether.compat.objax.typing import FileOrStr
from tether.errors import ArgumentError, describe

__all__ = ["from_file", "image_grid", "nchw", "nhwc", "normalize_to_uint8", "normalize_to_unit_float", "to_png"]


def from_file(file: FileOrStr) -> np.ndarray:
    """Reads an image as RGB, float[3, height, width] in [1/256 - 1, 1 - 1/256].

    Args:
        file: A name, or an open binary file.
    Raises:
        ArgumentError: Pillow isn't installed.
    """
    pixels = np.asarray(_pillow("from_file").open(file).convert("RGB"))
    return normalize_to_unit_float(pixels.transpose(2, 0, 1))


def image_grid(image: Any) -> Any:
    """Puts a table of images into one: [rows, columns, c, h, w] -> [c, rows * h, columns * w].

    Example:
        >>> objax.util.image.image_grid(jnp.zeros((2, 3, 1, 8, 9))).shape
        (1, 16, 27)
    """
    rows, columns, channels, height, width = image.shape
    return image.transpose(2, 0, 3, 1, 4).reshape(channels, rows * height, columns * width)


def nchw(x: Any) -> Any:
    """[..., H, W, C] -> [..., C, H, W]."""
    *batch, height, width, channels = range(x.ndim)
    return x.transpose(*batch, channels, height, width)


def nhwc(x: Any) -> Any:
    """[..., C, H, W] -> [..., H, W, C]."""
    *batch, channels, height, width = range(x.ndim)
    return x.transpose(*batch, height, width, channels)


def normalize_to_uint8(x: Any) -> Any:
    """Floats in [1/256 - 1, 1 - 1/256] to 0, 1, ..., 255; those outside go to the ends.

    Example:
        >>> objax.util.image.normalize_to_uint8(jnp.array([-1.0, 1 / 256, 1.0])).tolist()
        [0, 128, 255]
    """
    return (128 * (x + (1 - 1 / 256))).clip(0, 255).round().astype("uint8")


def normalize_to_unit_float(x: Any) -> Any:
    """0, 1, ..., 255 to floats in [1/256 - 1, 1 - 1/256]."""
    if isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(float)
    return x * (1 / 128) + (1 / 256 - 1)


def to_png(x: Any) -> bytes:
    """An image as the contents of a PNG file.

    Args:
        x: float[channels, height, width] in [-1, 1], or uint8[height, width, channels]; 1, 3 or 4 channels.
    Raises:
        ConflictError: neither of them.
        ArgumentError: Pillow isn't installed.
    """
    x = np.asarray(x)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if x.ndim != 3 or not (is_float or x.dtype == np.uint8):
        raise ConflictError(
            "to_png: Unsupported array type, expecting float or uint8 of three axes.",
            got=describe(x),
            expected="float[channels, height, width] in [-1, 1], or uint8[height, width, channels]",
            fix="x[0], for one image of a batch" if x.ndim == 4 else None,
        )
    if is_float:
        x = normalize_to_uint8(x.astype(np.float32) if x.dtype.kind == "V" else x).transpose(1, 2, 0)
    if x.shape[2] == 1:
        x = np.broadcast_to(x, (*x.shape[:2], 3))
    with io.BytesIO() as file:
        _pillow("to_png").fromarray(x).save(file, "png")
        return file.getvalue()


def _pillow(user: str) -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"objax.util.image.{user}: the package Pillow is not installed.",
            got=f"no module {error.name!r}",
            expected="Pillow, which Tether itself doesn't need",
            fix="pip install pillow",
        ) from error
