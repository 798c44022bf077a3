# SPDX-License-Identifier: Apache-2.0
"""Spectral normalization of a weight of any layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tether._core import State
from tether._modules import Module
from tether._modules.overlay import called_with
from tether.errors import ShapeError, describe
from tether.nn._inputs import at_least_float32, integer, name_of, positive
from tether.nn._weight_norm import axis_of, param_of, real_weight
from tether.random import keys

_FIRST_ITERATIONS = 15  # as PyTorch and Equinox do, so that the first step begins near the singular vectors


class SpectralNorm(Module):
    """Calls a layer with a weight divided by its largest singular value.

    weight = W / sigma, sigma = u . M v, where M is W as a matrix: its axis ``axis`` by all others. In training, first,
    n_power_iterations times: u = M v / |M v|, then v = M^T u / |M^T u|

    The gradient goes through W and sigma, with u and v as constants. W stays in the layer, at its own path, and is what
    everybody else reads who holds the layer or a tied weight; the divided one exists only in this layer's calls.
    Whatever the layer takes, returns, writes and draws is as without this wrapper. Evaluation uses u and v as they are.

    Args:
        layer: The layer; any Module.
        name: Attribute of the layer that holds the weight, a Param of at least two axes; of a part of it with dots,
            such as "conv.weight".
        n_power_iterations: Steps of the power iteration in each call in training, at least 1.
        eps: Least norm that u and v are divided by; positive.
        axis: The axis of the weight that is M's first: that of the outputs. For transposed convolutions, whose kernels
            are [in, out, ...], it is 1.
        key: PRNG key of the first u and v; None draws from the default stream.
    Variables:
        u: State, float[size of axis]; written when training.
        v: State, float[product of the other sizes]; written when training.
    Shapes:
        As the layer.
    Raises:
        ArgumentError: the layer has no such Param, or an option is out of its range.
        ShapeError: a weight of fewer than two axes.
        DtypeError: a weight that isn't real.
    Example:
        >>> layer = nn.SpectralNorm(nn.Linear(3, 2, use_bias=False))
        >>> column = lambda i: layer(jnp.eye(3)[i])
        >>> for _ in range(20):
        ...     weight = jnp.stack([column(0), column(1), column(2)])
        >>> round(float(jnp.linalg.norm(weight, 2)), 3)
        1.0
    References:
        Miyato et al. 2018, arXiv:1802.05957, section 2.1 and algorithm 1.
        torch.nn.utils.parametrizations.spectral_norm, PyTorch 2.13, for the order of the steps.
    """

    def __init__(
        self,
        layer: Module,
        name: str = "weight",
        *,
        n_power_iterations: int = 1,
        eps: float = 1e-12,
        axis: int = 0,
        key: jax.Array | None = None,
    ):
        weight = real_weight(self, layer, name)
        if weight.ndim < 2:
            raise ShapeError(
                f"{name_of(self)}: {name} is no matrix, and has no singular values.",
                got=describe(weight),
                expected="a weight of at least 2 axes",
                fix="nn.WeightNorm(layer, name, axis=None) divides a vector by its length",
            )
        self.layer: Any = layer
        self.name = name
        self.n_power_iterations = integer(name_of(self), "n_power_iterations", n_power_iterations)
        self.eps = positive(name_of(self), "eps", eps, 1e-12)
        self.axis = axis_of(self, axis, weight)
        matrix = self._matrix(weight)
        u, v = (
            jax.random.normal(key, (size,), matrix.dtype) for key, size in zip(keys(key, 2), matrix.shape, strict=True)
        )
        u, v = _power_iterations(matrix, u, v, _FIRST_ITERATIONS, self.eps)
        self.u, self.v = State(u), State(v)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cell = param_of(self, self.layer, self.name)
        weight, u, v = cell.value, self.u, self.v
        matrix = self._matrix(weight)
        if self.training:
            u, v = _power_iterations(lax.stop_gradient(matrix), u, v, self.n_power_iterations, self.eps)
        sigma = jnp.dot(u, _times(matrix, v), precision=lax.Precision.HIGHEST)
        divided = weight.astype(matrix.dtype) / jnp.where(sigma == 0, 1, sigma)  # a weight of zeros stays one
        out = called_with({cell: divided.astype(weight.dtype)}, lambda: self.layer(*args, **kwargs))
        if self.training:  # last: a call that fails has moved nothing here
            self.u, self.v = u, v
        return out

    def _matrix(self, weight: jax.Array) -> jax.Array:
        rows = jnp.moveaxis(weight, self.axis, 0).reshape(weight.shape[self.axis], -1)
        return rows.astype(at_least_float32(weight.dtype))


def _power_iterations(matrix, u, v, steps, eps):
    for _ in range(steps):
        u = _unit(_times(matrix, v), eps)
        v = _unit(_times(matrix.T, u), eps)
    return u, v


def _times(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    # The default precision of some devices has three digits, and an error of sigma is one of the whole weight.
    return jnp.matmul(matrix, vector, precision=lax.Precision.HIGHEST)


def _unit(vector: jax.Array, eps: float) -> jax.Array:
    return vector / jnp.maximum(jnp.linalg.norm(vector), eps)
