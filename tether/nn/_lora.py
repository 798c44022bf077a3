# SPDX-License-Identifier: Apache-2.0
"""Low-rank adaptation of a Linear layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module, freeze, view
from tether.errors import ArgumentError, describe
from tether.nn import init
from tether.nn._inputs import cast, inexact_dtype, initial, integer, name_of
from tether.nn._linear import Linear
from tether.random import keys


class LoRA(Module):
    """Adapts a Linear layer, which is frozen, by a product of two small matrices.

    y = layer(x) + alpha / rank * B A x

    B begins at zero, so the layer computes at first what it did before. A whole model is adapted by
    ``tether.map_modules``, and trained as any other: the frozen Params get no gradients and no optimizer state.

    Args:
        layer: The Linear; its Variables are shared, and frozen as seen through this module.
        rank: Rows of A, at least 1.
        alpha: Scale of the update, times rank; None is rank, a scale of 1.
        key: PRNG key of A; None draws from the default stream.
        dtype: Of A and B; None is that of the layer.
        a_init, b_init: Functions (key, shape, dtype) -> array as in ``nn.init``; the defaults are He's uniform and 0.
    Variables:
        a: Param, float[rank, in_features].
        b: Param, float[out_features, rank].
    Shapes:
        x: float[..., in_features] -> float[..., out_features]
    Raises:
        ShapeError: the last axis of x is not in_features.
        ArgumentError: layer is not a Linear, or a number out of its range.
    Example:
        >>> model = nn.MLP(4, 2, 8, 1)
        >>> adapted = tether.map_modules(lambda linear: nn.LoRA(linear, 2), model, nn.Linear)
        >>> list(tether.variables(adapted, tether.Param))
        ['layers[0].a', 'layers[0].b', 'layers[1].a', 'layers[1].b']
    References:
        Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    def __init__(
        self,
        layer: Linear,
        rank: int,
        *,
        alpha: float | None = None,
        key: jax.Array | None = None,
        dtype: DTypeLike | None = None,
        a_init: init.Initializer | None = None,
        b_init: init.Initializer | None = None,
    ):
        name = name_of(self)
        if not isinstance(layer, Linear):
            raise ArgumentError(
                f"{name}: this is no Linear layer.",
                got=describe(layer),
                expected="an nn.Linear",
                fix="tether.map_modules(lambda linear: nn.LoRA(linear, rank), model, nn.Linear), for those inside",
            )
        self.rank = integer(name, "rank", rank)
        if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float)):
            raise ArgumentError(
                f"{name}: alpha is not a number.", got=f"alpha={describe(alpha)}", expected="a float", fix="alpha=16"
            )
        self.alpha = float(self.rank if alpha is None else alpha)
        self.compute_dtype = None
        self.layer: Any = freeze(layer)
        dtype = layer.weight.dtype if dtype is None else inexact_dtype(name, "dtype", dtype)
        a_key, b_key = keys(key, 2)
        shapes = (self.rank, layer.in_features), (layer.out_features, self.rank)
        self.a = Param(initial(name, "a", a_init, init.he_uniform(), a_key, shapes[0], dtype))
        self.b = Param(initial(name, "b", b_init, init.zeros, b_key, shapes[1], dtype))

    def __call__(self, x: ArrayLike) -> jax.Array:
        y = self.layer(x)
        x, a, b = cast(self, jnp.asarray(x), self.a, self.b)
        update = (x @ a.T) @ b.T
        return y + (self.alpha / self.rank) * update.astype(y.dtype)

    def merged(self) -> Linear:
        """A Linear of its own that computes the same: weight + alpha / rank * B A."""
        old, scale = self.layer, self.alpha / self.rank
        new = Linear(
            old.in_features,
            old.out_features,
            use_bias=old.bias is not None,
            key=jax.random.key(0),  # no draw from the default stream: all values are replaced
            dtype=old.weight.dtype,
        )
        new.weight = old.weight + (scale * self.b @ self.a).astype(old.weight.dtype)
        new.bias = old.bias
        changed: Any = view(new, compute_dtype=old.compute_dtype)
        return new if old.compute_dtype is None else changed
