# SPDX-License-Identifier: Apache-2.0
"""A small convolutional network for 8×8 gray images of digits."""

import jax

import tether
from tether import nn


class DigitNet(tether.Module):
    """Two convolutions with batch normalization, one pooling, two linear layers with dropout.

    Variables:
        22 thousand Params; the running statistics of the two BatchNorms are State.
    Shapes:
        x: float[batch, 1, 8, 8] -> float[batch, 10], the logits of the ten digits
    """

    def __init__(self, *, width: int = 16, dropout: float = 0.3):
        # Without key= each layer draws its first weights from the default stream, which tether.seed starts.
        self.conv1 = nn.Conv2d(1, width, 3, padding="SAME", use_bias=False)  # the norm has a bias of its own
        self.norm1 = nn.BatchNorm(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding="SAME", use_bias=False)
        self.norm2 = nn.BatchNorm(2 * width)
        self.pool = nn.MaxPool2d(2)
        self.flatten = nn.Flatten(-3)
        self.hidden = nn.Linear(2 * width * 4 * 4, 2 * width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, 10)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.norm1(self.conv1(x)))  # [batch, 16, 8, 8]
        x = jax.nn.relu(self.norm2(self.conv2(x)))  # [batch, 32, 8, 8]
        x = self.dropout(self.flatten(self.pool(x)))  # [batch, 512]
        x = self.dropout(jax.nn.relu(self.hidden(x)))  # [batch, 32]
        return self.head(x)
