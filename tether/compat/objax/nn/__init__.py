# SPDX-License-Identifier: Apache-2.0
"""Layers.

| Objax | here | what differs |
| --- | --- | --- |
| nn.* | layers.py | see there |
| nn.init.* | init.py | see there |
"""

from tether.compat.objax.nn import init
from tether.compat.objax.nn.layers import (
    BatchNorm,
    BatchNorm0D,
    BatchNorm1D,
    BatchNorm2D,
    Conv2D,
    ConvTranspose2D,
    Dropout,
    ExponentialMovingAverage,
    GroupNorm,
    GroupNorm0D,
    GroupNorm1D,
    GroupNorm2D,
    Linear,
    MovingAverage,
    Sequential,
    SyncedBatchNorm,
    SyncedBatchNorm0D,
    SyncedBatchNorm1D,
    SyncedBatchNorm2D,
)

__all__ = [
    "BatchNorm",
    "BatchNorm0D",
    "BatchNorm1D",
    "BatchNorm2D",
    "Conv2D",
    "ConvTranspose2D",
    "Dropout",
    "ExponentialMovingAverage",
    "GroupNorm",
    "GroupNorm0D",
    "GroupNorm1D",
    "GroupNorm2D",
    "Linear",
    "MovingAverage",
    "Sequential",
    "SyncedBatchNorm",
    "SyncedBatchNorm0D",
    "SyncedBatchNorm1D",
    "SyncedBatchNorm2D",
    "init",
]
