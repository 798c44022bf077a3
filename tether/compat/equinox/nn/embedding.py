# SPDX-License-Identifier: Apache-2.0
"""A table of vectors.

| Equinox | here | what differs |
| --- | --- | --- |
| Embedding | the same fields and draws | |
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.equinox.module import Module, static_field
from tether.errors import ShapeError, describe

__all__ = ["Embedding"]


class Embedding(Module):
    """Looks rows up in a table.

    Args:
        num_embeddings: Number of rows.
        embedding_size: Size of a row.
        weight: The table; None draws it from the standard normal distribution.
        key: PRNG key of the first values.
    Shapes:
        x: int[...] -> float[..., embedding_size]
    Raises:
        ShapeError: weight is of another shape.
    Example:
        >>> eqx.nn.Embedding(10, 4, key=jax.random.PRNGKey(0))(jnp.array(3)).shape
        (4,)
    """

    num_embeddings: int = static_field()
    embedding_size: int = static_field()
    weight: jax.Array

    def __init__(self, num_embeddings: int, embedding_size: int, weight: Any = None, *, key: Any, **kwargs: Any):
        super().__init__(**kwargs)
        shape = (num_embeddings, embedding_size)
        if weight is not None and weight.shape != shape:
            raise ShapeError(
                "Embedding: weight isn't of shape (num_embeddings, embedding_size).",
                got=describe(weight),
                expected=f"[{num_embeddings}, {embedding_size}]",
                fix="Embedding(*weight.shape, weight, key=key)" if weight.ndim == 2 else None,
            )
        self.weight = jax.random.normal(key, shape) if weight is None else weight
        self.num_embeddings = num_embeddings
        self.embedding_size = embedding_size

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        """The rows of these numbers; the key is ignored."""
        return jnp.asarray(self.weight)[x]
