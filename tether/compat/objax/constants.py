# SPDX-License-Identifier: Apache-2.0
"""Names of paddings and of interpolations.

| Objax | here | what differs |
| --- | --- | --- |
| ConvPadding, Interpolate | the same enumerations | nothing |
"""

from __future__ import annotations

import enum

__all__ = ["ConvPadding", "Interpolate"]


class ConvPadding(enum.Enum):
    """How a convolution or a pooling is padded: as much as keeps the size, or not at all."""

    SAME = "SAME"
    VALID = "VALID"


class Interpolate(enum.Enum):
    """How ``functional.interpolate`` finds values between pixels."""

    NEAREST = "nearest"
    LINEAR = "linear"
    BILINEAR = "bilinear"
    TRILINEAR = "trilinear"
    TRIANGLE = "triangle"
    CUBIC = "cubic"
    BICUBIC = "bicubic"
    TRICUBIC = "tricubic"
    LANCZOS3 = "lanczos3"
    LANCZOS5 = "lanczos5"
