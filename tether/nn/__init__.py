# SPDX-License-Identifier: Apache-2.0
"""Layers: one family a file, channels first, any number of leading batch axes.

Arguments are spelled as PyTorch and Equinox spell them. ``key=`` is optional everywhere: without it a layer draws its
first values from the default stream. A layer computes in the dtype of its input; ``tether.view(model,
compute_dtype=...)`` changes that.
"""

from tether.nn import init
from tether.nn._activations import (
    PReLU,
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_tanh,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    mish,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    squareplus,
    swish,
    tanh,
)
from tether.nn._adaptive_pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    GlobalAvgPool,
    GlobalMaxPool,
)
from tether.nn._attention import MultiHeadAttention
from tether.nn._batchnorm import BatchNorm
from tether.nn._bilinear import Bilinear
from tether.nn._cells import GRUCell, LSTMCarry, LSTMCell, SimpleCell
from tether.nn._containers import Flatten, Identity, Lambda, Residual, Sequential
from tether.nn._conv import Conv1d, Conv2d, Conv3d
from tether.nn._conv_transpose import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from tether.nn._dropout import AlphaDropout, Dropout, DropPath
from tether.nn._embedding import Embedding
from tether.nn._group_norm import GroupNorm, InstanceNorm
from tether.nn._linear import Linear
from tether.nn._lora import LoRA
from tether.nn._mlp import MLP
from tether.nn._norm import LayerNorm, RMSNorm
from tether.nn._pool import (
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    MinPool1d,
    MinPool2d,
    MinPool3d,
)
from tether.nn._rnn import RNN, Bidirectional
from tether.nn._rotary import RotaryEmbedding
from tether.nn._spectral_norm import SpectralNorm
from tether.nn._weight_norm import WeightNorm

__all__ = [
    "MLP",
    "RNN",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AlphaDropout",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm",
    "Bidirectional",
    "Bilinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "DropPath",
    "Dropout",
    "Embedding",
    "Flatten",
    "GRUCell",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GroupNorm",
    "Identity",
    "InstanceNorm",
    "LSTMCarry",
    "LSTMCell",
    "Lambda",
    "LayerNorm",
    "Linear",
    "LoRA",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MinPool1d",
    "MinPool2d",
    "MinPool3d",
    "MultiHeadAttention",
    "PReLU",
    "RMSNorm",
    "Residual",
    "RotaryEmbedding",
    "Sequential",
    "SimpleCell",
    "SpectralNorm",
    "WeightNorm",
    "celu",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "init",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "squareplus",
    "swish",
    "tanh",
]
