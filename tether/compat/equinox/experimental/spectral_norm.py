# SPDX-License-Identifier: Apache-2.0
"""A weight that is divided by its largest singular value.

| Equinox | here | what differs |
| --- | --- | --- |
| SpectralNorm | the same numbers | layers of ``nn`` ask it for its array; JAX no longer does by itself |

For new code: ``tether.nn.SpectralNorm(layer)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.equinox._errors import SpecError
from tether.compat.equinox.experimental.stateful import StateIndex, get_state, set_state
from tether.compat.equinox.module import Module, static_field
from tether.errors import describe

__all__ = ["SpectralNorm"]

_WARM_UP = 15  # power iterations


def _normalized(x: jax.Array, eps: float) -> jax.Array:
    return x / jnp.maximum(jnp.linalg.norm(x), eps)


def _power_iteration(weight: jax.Array, u: jax.Array, v: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    u = _normalized(weight @ v, eps)
    return u, _normalized(weight.T @ u, eps)


class SpectralNorm(Module):
    """Stands for a weight, divided by an estimate of its largest singular value.

    Each time it is taken as an array it refines the estimate, unless in inference.

    Args:
        weight: The weight, of two dimensions or more; all but the first are taken as one.
        num_power_iterations: Steps of each refinement, 0 or more.
        eps: Least norm that is divided by, above 0.
        inference: Whether the estimate stays as it is.
        key: For the vectors that it starts from.
    Raises:
        ValueError: The weight has less than two dimensions.
    Example:
        >>> weight = eqx.experimental.SpectralNorm(jnp.diag(jnp.array([4.0, 1.0])), key=jax.random.PRNGKey(0))
        >>> jnp.asarray(weight).round(3).tolist()
        [[1.0, 0.0], [0.0, 0.25]]
    References:
        Miyato et al. 2018, arXiv:1802.05957, algorithm 1.
    """

    weight_shape: tuple[int, ...] = static_field()
    weight: jax.Array
    uv_index: StateIndex
    num_power_iterations: int = static_field()
    eps: float = static_field()
    inference: bool

    def __init__(
        self,
        weight: jax.Array,
        num_power_iterations: int = 1,
        eps: float = 1e-12,
        inference: bool = False,
        *,
        key: jax.Array,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if weight.ndim < 2:
            raise SpecError(
                "SpectralNorm: the weight has less than two dimensions.",
                got=describe(weight),
                expected="two or more",
                fix="normalize matrices and kernels, not biases",
            )
        self.weight_shape = weight.shape
        self.weight = weight.reshape(weight.shape[0], -1)
        self.uv_index = StateIndex(inference=inference)
        self.num_power_iterations, self.eps, self.inference = num_power_iterations, eps, inference
        of_u, of_v = jax.random.split(key)
        u, v = (jax.random.normal(k, (n,)) for k, n in zip((of_u, of_v), self.weight.shape, strict=True))
        for _ in range(_WARM_UP):
            u, v = _power_iteration(self.weight, u, v, eps)
        set_state(self.uv_index, (u, v))

    def __jax_array__(self) -> jax.Array:
        u, v = get_state(self.uv_index, (self.weight[:, -1], self.weight[-1]))
        if not self.inference:
            weight = jax.lax.stop_gradient(self.weight)
            for _ in range(self.num_power_iterations):
                u, v = _power_iteration(weight, u, v, self.eps)
            set_state(self.uv_index, (u, v))
        return (self.weight / jnp.einsum("i,ij,j->", u, self.weight, v)).reshape(self.weight_shape)

    @classmethod
    def withkey(cls, key: jax.Array) -> Callable[..., SpectralNorm]:
        """The class with a key already given, for ``eqx.tree_at(..., replace_fn=SpectralNorm.withkey(key))``."""
        return lambda *args, **kwargs: cls(*args, key=key, **kwargs)
