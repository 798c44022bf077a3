# SPDX-License-Identifier: Apache-2.0
"""The multilayer perceptron, built of Linear."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether.nn._inputs import function_of_array, integer, name_of
from tether.nn._linear import Linear
from tether.random import keys


def identity(x: jax.Array) -> jax.Array:
    """Gives back its input; named, so that a repr can say it."""
    return x


class MLP(Module):
    """Maps the last axis through depth hidden layers and an output layer.

    h = activation(W h + b), depth times; y = final_activation(W h + b)

    ``mlp.layers`` are depth + 1 layers of ``nn.Linear``; ``mlp.layers[0].weight`` is the first W.

    Args:
        in_size, out_size: Sizes of the last axis of x and y, at least 1.
        width_size: Size of each hidden layer, at least 1.
        depth: Number of hidden layers, at least 0; 0 leaves one Linear and the final activation.
        activation, final_activation: Functions of an array, or Modules.
        use_bias, use_final_bias: Whether the hidden layers, and the output layer, have a bias.
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
    Shapes:
        x: float[..., in_size] -> float[..., out_size]
    Raises:
        ShapeError: the last axis of x is not in_size.
        ArgumentError: a number out of its range, or an activation that can't be called.
    Example:
        >>> mlp = nn.MLP(2, 1, width_size=16, depth=2, key=jax.random.key(0))
        >>> mlp(jnp.ones((8, 2))).shape
        (8, 1)
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        width_size: int,
        depth: int,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.relu,
        final_activation: Callable[[jax.Array], jax.Array] = identity,
        *,
        use_bias: bool = True,
        use_final_bias: bool = True,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        self.depth = integer(name, "depth", depth, least=0)
        self.in_size = integer(name, "in_size", in_size)
        self.out_size = integer(name, "out_size", out_size)
        self.width_size = integer(name, "width_size", width_size)
        self.activation = function_of_array(name, "activation", activation)
        self.final_activation = function_of_array(name, "final_activation", final_activation)
        sizes = [self.in_size, *[self.width_size] * self.depth, self.out_size]
        biases = [use_bias] * self.depth + [use_final_bias]
        self.layers = [
            Linear(a, b, use_bias=bias, key=k, dtype=dtype)
            for (a, b), bias, k in zip(pairwise(sizes), biases, keys(key, self.depth + 1), strict=True)
        ]

    def __call__(self, x: ArrayLike) -> jax.Array:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.final_activation(self.layers[-1](x))
