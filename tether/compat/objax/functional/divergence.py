# SPDX-License-Identifier: Apache-2.0
"""Divergences of distributions.

| Objax | here | what differs |
| --- | --- | --- |
| kl | the same | NumPy arrays, too |
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["kl"]


def kl(p: jax.Array, q: jax.Array, eps: float = 2**-17) -> jax.Array:
    """The Kullback-Leibler divergence p . log((p + eps) / (q + eps)).

    Args:
        p: Probabilities.
        q: Probabilities, of the same shape.
        eps: Keeps the logarithms finite.
    Example:
        >>> float(objax.functional.divergence.kl(jnp.array([0.5, 0.5]), jnp.array([0.5, 0.5])))
        0.0
    """
    return jnp.dot(p, jnp.log(p + eps) - jnp.log(q + eps))
