# SPDX-License-Identifier: Apache-2.0
"""Weight normalization of a weight of any layer, and how a wrapper finds that weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tether._core import Param
from tether._core.variable import Variable
from tether._modules import Module
from tether._modules.overlay import called_with
from tether.errors import ArgumentError, DtypeError, ShapeError, describe
from tether.nn._inputs import at_least_float32, name_of


class WeightNorm(Module):
    """Calls a layer with a weight whose length is a parameter of its own.

    weight = scale * v / |v|, |v| the Euclidean norm over all axes but ``axis``

    v is the layer's own parameter and stays in it, at its own path. scale is |v| at first, so that the wrapper changes
    nothing. Whoever else holds the layer or a tied weight reads v; the product exists only in this layer's calls.
    Whatever the layer takes, returns, writes and draws is as without this wrapper. The norm is computed in float32 or
    wider; a v of zeros gives a weight of zeros.

    Args:
        layer: The layer; any Module.
        name: Attribute of the layer that holds the weight, a Param; of a part of it with dots, such as "conv.weight".
        axis: Axis or axes of the weight along which each element has a length of its own, 0 for those of the outputs;
            None is one length for all of the weight.
    Variables:
        scale: Param, float[sizes of the weight, 1 but for axis]; in the dtype of the weight.
    Shapes:
        As the layer.
    Raises:
        ArgumentError: the layer has no such Param.
        ShapeError: the weight has no such axis.
        DtypeError: a weight that isn't real.
    Example:
        >>> layer = nn.WeightNorm(nn.Linear(3, 2))
        >>> layer.scale.shape, list(tether.variables(layer))
        ((2, 1), ['layer.weight', 'layer.bias', 'scale'])
    References:
        Salimans and Kingma 2016, arXiv:1602.07868, equation 2.
        torch.nn.utils.parametrizations.weight_norm, PyTorch 2.13, where axis is dim, and dim=-1 our None.
    """

    def __init__(self, layer: Module, name: str = "weight", *, axis: int | Sequence[int] | None = 0):
        weight = real_weight(self, layer, name)
        self.layer: Any = layer
        self.name = name
        axes = () if axis is None else tuple(axis) if isinstance(axis, list | tuple) else (axis,)
        self.axes = tuple(axis_of(self, each, weight) for each in axes)
        self.scale = Param(jnp.sqrt(self._square(weight)).astype(weight.dtype))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cell = param_of(self, self.layer, self.name)
        v = cell.value
        square = self._square(v)
        factor = self.scale.astype(square.dtype) * lax.rsqrt(jnp.where(square == 0, 1, square))
        weight = v.astype(square.dtype) * jnp.broadcast_to(factor, v.shape)
        return called_with({cell: weight.astype(v.dtype)}, lambda: self.layer(*args, **kwargs))

    def _square(self, v: jax.Array) -> jax.Array:
        others = tuple(axis for axis in range(v.ndim) if axis not in self.axes)
        return jnp.square(v.astype(at_least_float32(v.dtype))).sum(others, keepdims=True)


def param_of(wrapper: Module, layer: Module, path: str) -> Variable:
    """Finds the Param of a layer that a wrapper computes anew, by attribute names joined with dots.

    By attributes, and so also in a layer that is still part of a constructor.
    """
    found: Any = layer
    for attribute in path.split(".") if isinstance(path, str) else [path]:
        found = vars(found).get(attribute) if isinstance(found, Module) else None
    if isinstance(found, Param):
        return found
    if not isinstance(layer, Module):
        raise ArgumentError(
            f"{name_of(wrapper)}: what is to be wrapped is no layer.",
            got=f"layer={describe(layer)}",
            expected="a Module",
            fix=f"nn.{name_of(wrapper)}(nn.Linear(4, 4)); a function may be wrapped as nn.Lambda, but has no weight",
        )
    known = list(_params(layer, ""))
    raise ArgumentError(
        f"{name_of(wrapper)}: the layer has no Param of this name.",
        got=f"name={describe(path)}, and a {type(layer).__name__} with {', '.join(known) or 'no Param'}",
        expected="the name of a Param, that of a part with dots: 'part.weight'",
        fix=[f"name={known[0]!r}"] if known else "wrap a layer inside it: one in a list or dict can't be named here",
    )


def _params(part: Module, path: str) -> Iterator[str]:
    for attribute, stored in vars(part).items():
        if isinstance(stored, Param):
            yield path + attribute
        elif isinstance(stored, Module):
            yield from _params(stored, f"{path}{attribute}.")


def real_weight(wrapper: Module, layer: Module, path: str) -> jax.Array:
    """Reads the Param that a wrapper is to compute anew; it must be real."""
    weight = param_of(wrapper, layer, path).value
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise DtypeError(
            f"{name_of(wrapper)}: {path} is not real.",
            got=describe(weight),
            expected="float16, bfloat16, float32 or float64",
            fix="two real weights, for the real and the imaginary part",
        )
    return weight


def axis_of(wrapper: Module, axis: Any, weight: jax.Array) -> int:
    """Reads an axis of the weight, counted from the front."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -weight.ndim <= axis < weight.ndim:
        raise ShapeError(
            f"{name_of(wrapper)}: the weight has no such axis.",
            got=f"axis={describe(axis)}, {describe(weight)}",
            expected=f"an int in [{-weight.ndim}, {weight.ndim})",
            fix="axis=0, that of the outputs",
        )
    return axis % weight.ndim
