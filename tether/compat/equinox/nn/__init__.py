# SPDX-License-Identifier: Apache-2.0
"""Layers, which are called with one example; ``jax.vmap`` makes a batch of it.

| Equinox | here | what differs |
| --- | --- | --- |
| nn.* | the modules of the same names | see there |
"""

from tether.compat.equinox.nn.attention import MultiheadAttention
from tether.compat.equinox.nn.composed import MLP, Lambda, Sequential
from tether.compat.equinox.nn.conv import (
    Conv,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from tether.compat.equinox.nn.dropout import Dropout
from tether.compat.equinox.nn.embedding import Embedding
from tether.compat.equinox.nn.linear import Identity, Linear
from tether.compat.equinox.nn.normalisation import GroupNorm, LayerNorm
from tether.compat.equinox.nn.pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AdaptivePool,
    AvgPool1D,
    AvgPool1d,
    AvgPool2D,
    AvgPool2d,
    AvgPool3D,
    AvgPool3d,
    MaxPool1D,
    MaxPool1d,
    MaxPool2D,
    MaxPool2d,
    MaxPool3D,
    MaxPool3d,
    Pool,
)
from tether.compat.equinox.nn.rnn import GRUCell, LSTMCell

__all__ = [
    "MLP",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AdaptivePool",
    "AvgPool1D",
    "AvgPool1d",
    "AvgPool2D",
    "AvgPool2d",
    "AvgPool3D",
    "AvgPool3d",
    "Conv",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "Embedding",
    "GRUCell",
    "GroupNorm",
    "Identity",
    "LSTMCell",
    "Lambda",
    "LayerNorm",
    "Linear",
    "MaxPool1D",
    "MaxPool1d",
    "MaxPool2D",
    "MaxPool2d",
    "MaxPool3D",
    "MaxPool3d",
    "MultiheadAttention",
    "Pool",
    "Sequential",
]
