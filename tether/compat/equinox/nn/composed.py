# SPDX-License-Identifier: Apache-2.0
"""Layers made of layers, and a function as a layer.

| Equinox | here | what differs |
| --- | --- | --- |
| MLP, Sequential, Lambda | the same fields and draws | |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from tether.compat.equinox.module import Module, static_field
from tether.compat.equinox.nn.linear import Linear
from tether.errors import ArgumentError, describe

__all__ = ["MLP", "Lambda", "Sequential"]


def _identity(x: Any) -> Any:
    return x


class MLP(Module):
    """A multi-layer perceptron: Linears with an activation in between.

    Args:
        in_size: Size of x.
        out_size: Size of y.
        width_size: Size of the hidden layers.
        depth: Number of hidden layers; 0 is one Linear.
        activation: Follows each hidden layer; a leaf.
        final_activation: Follows the last layer; a leaf.
        key: PRNG key of the first values, one part of it for each Linear.
    Shapes:
        x: float[in_size] -> float[out_size]
    Example:
        >>> mlp = eqx.nn.MLP(2, 3, width_size=8, depth=2, key=jax.random.PRNGKey(0))
        >>> len(mlp.layers), mlp(jnp.ones(2)).shape
        (3, (3,))
    """

    layers: list[Linear]
    activation: Callable[..., Any]
    final_activation: Callable[..., Any]
    in_size: int = static_field()
    out_size: int = static_field()
    width_size: int = static_field()
    depth: int = static_field()

    def __init__(
        self,
        in_size: int,
        out_size: int,
        width_size: int,
        depth: int,
        activation: Callable[..., Any] = jax.nn.relu,
        final_activation: Callable[..., Any] = _identity,
        *,
        key: Any,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        sizes = [in_size, *[width_size] * depth, out_size]
        keys = jax.random.split(key, depth + 1)
        self.layers = [Linear(n, m, key=k) for n, m, k in zip(sizes[:-1], sizes[1:], keys, strict=True)]
        self.in_size = in_size
        self.out_size = out_size
        self.width_size = width_size
        self.depth = depth
        self.activation = activation
        self.final_activation = final_activation

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The output of the last layer; the key is ignored."""
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.final_activation(self.layers[-1](x))


class Sequential(Module):
    """Layers one after the other; a number gives one of them, a slice a Sequential of several.

    Args:
        layers: The layers, each called as ``layer(x, key=key)``.
    Raises:
        TypeError: an index that is neither a number nor a slice.
    Example:
        >>> net = eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=jax.random.PRNGKey(0)), eqx.nn.Lambda(jax.nn.relu)])
        >>> net(jnp.ones(2)).shape, len(net[1:])
        ((3,), 1)
    """

    layers: tuple[Any, ...]

    def __init__(self, layers: Sequence[Any]):
        self.layers = tuple(layers)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        """The output of the last layer; each layer has a part of the key."""
        keys = [None] * len(self.layers) if key is None else jax.random.split(key, len(self.layers))
        for layer, k in zip(self.layers, keys, strict=True):
            x = layer(x, key=k)
        return x

    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return Sequential(self.layers[i])
        if isinstance(i, int):
            return self.layers[i]
        raise ArgumentError(
            "Sequential: an index is neither a number nor a slice.",
            got=describe(i),
            expected="net[0], or net[1:]",
            fix="Sequential([net[i] for i in indices])" if isinstance(i, list | tuple) else None,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


class Lambda(Module):
    """A function as a layer, which is called with a key.

    Args:
        fn: The function; a leaf.
    Example:
        >>> eqx.nn.Lambda(jax.nn.relu)(jnp.array([-1.0, 1.0]), key=None).tolist()
        [0.0, 1.0]
    """

    fn: Callable[..., Any]

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        """What the function gives; the key is ignored."""
        return self.fn(x)
