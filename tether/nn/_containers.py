# SPDX-License-Identifier: Apache-2.0
"""Layers without numbers of their own: those that hold other layers or functions, and those that only reshape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.typing import ArrayLike

from tether._modules import Module
from tether.errors import ArgumentError, ShapeError, describe
from tether.nn._inputs import as_array, name_of


class Sequential(Module):
    """Calls its layers one after another.

    ``model[0]`` is the first layer, ``model[1:3]`` a Sequential of the same layers (shared, not copied); ``len`` and
    ``for`` work. The layers have paths without a name in between: ``[0].weight``; with names of their own,
    ``['first'].weight``.

    Args:
        layers: At least one Module, in the order of the calls; or a dict of names and Modules.
    Shapes:
        x: what the first layer takes -> what the last layer gives
    Raises:
        ArgumentError: no layers, or something that is not a Module; a function wants ``nn.Lambda``.
    Example:
        >>> model = nn.Sequential([nn.Linear(3, 8), nn.Lambda(nn.relu), nn.Linear(8, 2)])
        >>> model(jnp.ones((5, 3))).shape, len(model), len(model[:2])
        ((5, 2), 3, 2)
        >>> named = nn.Sequential({"hidden": nn.Linear(3, 8), "relu": nn.Lambda(nn.relu)})
        >>> named["hidden"] is named[0]
        True
    """

    _transparent_ = ("layers",)

    def __init__(self, layers: Iterable[Module] | Mapping[str, Module]):
        self.layers = _checked(name_of(self), layers)
        self.names = tuple(layers) if isinstance(layers, Mapping) else None  # a module's dict is sorted by its keys

    def __call__(self, x: Any) -> Any:
        for layer in self:
            x = layer(x)
        return x

    def __getitem__(self, index: int | slice | str) -> Any:
        if self.names is None:
            return Sequential(self.layers[index]) if isinstance(index, slice) else self.layers[index]
        if isinstance(index, slice):
            return Sequential({name: self.layers[name] for name in self.names[index]})
        return self.layers[index if isinstance(index, str) else self.names[index]]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers if self.names is None else [self.layers[name] for name in self.names])


def _checked(name: str, layers: Iterable[Module] | Mapping[str, Module]) -> Any:
    if isinstance(layers, Module) or not isinstance(layers, Iterable):
        raise ArgumentError(
            f"{name}: layers is not a list.",
            got=describe(layers),
            expected="one list, or a dict of names",
            fix=f"nn.{name}([first, second])",
        )
    layers = layers if isinstance(layers, Mapping) else tuple(layers)
    for number, layer in layers.items() if isinstance(layers, Mapping) else enumerate(layers):
        if not isinstance(layer, Module):
            raise ArgumentError(
                f"{name}: layer {number} is not a Module.",
                got=describe(layer),
                expected="an instance of a Module",
                fix=_fix(layer),
            )
    if not layers:
        raise ArgumentError(
            f"{name}: there are no layers.", got="an empty list", expected="at least one Module", fix="nn.Identity()"
        )
    return layers


class Residual(Module):
    """Adds what its layer gives to the input.

    y = shortcut(x) + layer(x), in the dtype of layer(x)

    Args:
        layer: The branch, a Module.
        shortcut: What the input goes through on its way past the branch; None is the input itself.
    Shapes:
        x: what the layer takes -> the same shape, or the common one of layer and shortcut
    Raises:
        ShapeError: the two sides have different shapes; they are never broadcast.
        ArgumentError: a side is not a Module.
    Example:
        >>> nn.Residual(nn.Linear(3, 3))(jnp.ones((5, 3))).shape
        (5, 3)
    References:
        He et al. 2015, arXiv:1512.03385, equations 1 and 2.
    """

    def __init__(self, layer: Module, shortcut: Module | None = None):
        self.layer = _checked(name_of(self), [layer])[0]
        self.shortcut = None if shortcut is None else _checked(name_of(self), [shortcut])[0]

    def __call__(self, x: Any) -> Any:
        past, branch = x if self.shortcut is None else self.shortcut(x), self.layer(x)
        past, branch = as_array(self, past), as_array(self, branch)
        if past.shape != branch.shape:
            raise ShapeError(
                f"{name_of(self)}: the layer's result doesn't have the shape of the input.",
                got=f"{describe(branch)} from the layer, {describe(past)} past it",
                expected="the same shape",
                fix="a shortcut that changes the shape as the layer does: nn.Residual(layer, nn.Linear(n, m))",
            )
        return past.astype(branch.dtype) + branch


def _fix(layer: Any) -> str:
    if isinstance(layer, type) and issubclass(layer, Module):
        return f"make one: {layer.__name__}(...)"
    if isinstance(layer, list | tuple):
        return "nn.Sequential([...]) around the inner list"
    return f"nn.Lambda({getattr(layer, '__name__', 'f')}) around a function"


class Lambda(Module):
    """Makes a layer of a function.

    Two Lambdas of equal code and captured values count as equal, so a rebuilt model doesn't compile anew.

    Args:
        fn: Function of one argument. It should hold no parameters: those belong in a Module.
    Shapes:
        x: whatever fn takes -> whatever fn gives
    Raises:
        ArgumentError: fn is not a function.
    Example:
        >>> nn.Lambda(lambda h: h.mean((-2, -1)))(jnp.ones((2, 3, 4, 4))).shape
        (2, 3)
    """

    def __init__(self, fn: Callable[[Any], Any]):
        is_class_of_module = isinstance(fn, type) and issubclass(fn, Module)
        if not callable(fn) or isinstance(fn, Module) or is_class_of_module:
            raise ArgumentError(
                f"{name_of(self)}: fn is not a plain function.",
                got=describe(fn),
                expected="a function of one argument",
                fix="put a Module itself where the Lambda would stand" if callable(fn) else "nn.Lambda(jax.nn.relu)",
            )
        self.fn = fn

    def __call__(self, x: Any) -> Any:
        return self.fn(x)


class Identity(Module):
    """Gives back its input: a layer for a place that must have one.

    Shapes:
        x: anything -> the same
    Example:
        >>> nn.Identity()(3)
        3
    """

    def __call__(self, x: Any) -> Any:
        return x


class Flatten(Module):
    """Joins the axes from start_dim to end_dim into one.

    There is no default: PyTorch's, 1, takes the first axis for the batch, and is wrong for one example or for two
    batch axes. Numbers from the end are right for all: -3 joins channels, height and width.

    Args:
        start_dim, end_dim: First and last axis to join; negative numbers count from the end.
    Shapes:
        x: any[..., a, b, c] -> any[..., a * b * c], for start_dim=-3
    Raises:
        ArgumentError: no start_dim, or one that isn't an axis number.
        ShapeError: x has no such axes, or end_dim lies before start_dim.
    Example:
        >>> nn.Flatten(-3)(jnp.ones((8, 3, 4, 4))).shape
        (8, 48)
    """

    def __init__(self, start_dim: int | None = None, end_dim: int = -1):
        self.start_dim = _axis(name_of(self), "start_dim", start_dim)
        self.end_dim = _axis(name_of(self), "end_dim", end_dim)

    def __call__(self, x: ArrayLike) -> jax.Array:
        x = as_array(self, x)
        start, end = (axis + x.ndim if axis < 0 else axis for axis in (self.start_dim, self.end_dim))
        if not 0 <= start <= end < x.ndim:
            raise ShapeError(
                f"{name_of(self)}: x has no axes {self.start_dim} to {self.end_dim}.",
                got=describe(x),
                expected=f"an array with axis {self.start_dim} at or before axis {self.end_dim}",
                fix="count the axes from the end: nn.Flatten(-2) joins the last two",
            )
        return x.reshape((*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


def _axis(name: str, argument: str, value: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(
            f"{name}: {argument} is not an axis number.",
            got=f"{argument}={describe(value)}",
            expected="an int, negative from the end",
            fix=["nn.Flatten(-3) joins channels, height and width of each example", "nn.Flatten(1) as PyTorch"],
        )
    return value
