# SPDX-License-Identifier: Apache-2.0
"""A table of vectors, looked up by integer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module
from tether.errors import ArgumentError, DtypeError, ShapeError, describe
from tether.nn import init
from tether.nn._inputs import as_array, cast, inexact_dtype, initial, integer, name_of
from tether.random import keys


class Embedding(Module):
    """Looks up the row of a table for each id.

    An id outside [0, num_embeddings) is an error where its value is known (an eager call). Where it is traced, its row
    is NaN and carries no gradient; JAX's own indexing would clamp it, or count a negative one from the end.

    ``embedding.attend(h)`` is the way back with the same table: a logit for each row.

    Args:
        num_embeddings: Number of rows, at least 1.
        features: Size of a row, at least 1.
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the table.
        weight_init: Function (key, shape, dtype) -> array as in ``nn.init``; None is the standard normal distribution.
    Variables:
        weight: Param, float[num_embeddings, features].
    Shapes:
        ids: int[...] -> float[..., features]
    Raises:
        DtypeError: ids are not integers.
        ShapeError: the last axis of what attends is not features.
        ArgumentError: an id out of range in an eager call, or a size below 1.
    Example:
        >>> embedding = nn.Embedding(10, 4, key=jax.random.key(0))
        >>> embedding(jnp.asarray([[1, 2, 3]])).shape
        (1, 3, 4)
    References:
        torch.nn.Embedding, PyTorch 2.13, for the first values.
        Press and Wolf 2017, arXiv:1608.05859, for one table at both ends.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
        weight_init: init.Initializer | None = None,
    ):
        name = name_of(self)
        self.num_embeddings = integer(name, "num_embeddings", num_embeddings)
        self.features = integer(name, "features", features)
        self.compute_dtype = None
        dtype = inexact_dtype(name, "dtype", dtype)
        shape = (self.num_embeddings, self.features)
        self.weight = Param(initial(name, "weight", weight_init, init.normal(1.0), keys(key, 1)[0], shape, dtype))

    def __call__(self, ids: ArrayLike) -> jax.Array:
        array = as_array(self, ids)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise DtypeError(
                f"{name_of(self)}: ids are not integers.",
                got=describe(array),
                expected="an integer array",
                fix=["ids.astype(jnp.int32)", "jnp.argmax(x, -1), or x @ embedding.weight, for one-hot rows"],
            )
        # NumPy ids are looked at as given: JAX would have cut 64 bits to 32, and with them the number that is wrong.
        self._check_range(ids if isinstance(ids, np.ndarray) else array)
        rows = self.weight.at[array].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows if self.compute_dtype is None else rows.astype(self.compute_dtype)

    def attend(self, h: ArrayLike) -> jax.Array:
        """Multiplies with each row of the table: the logits of a model whose output layer is tied to its embedding.

        Args:
            h: float[..., features].
        Returns:
            h weight^T, float[..., num_embeddings].
        Example:
            >>> embedding = nn.Embedding(10, 4, key=jax.random.key(0))
            >>> int(embedding.attend(embedding(jnp.asarray(3))).argmax())
            3
        """
        array = as_array(self, h)
        if array.shape[-1:] != (self.features,):
            raise ShapeError(
                f"{name_of(self)}: the last axis of what attends is not features, {self.features}.",
                got=describe(array),
                expected=f"[..., {self.features}]",
                fix=f"nn.Linear(h.shape[-1], {self.features}) before it",
            )
        array, weight = cast(self, array, self.weight)
        return lax.dot_general(array, weight, (((array.ndim - 1,), (1,)), ((), ())))

    def _check_range(self, ids: jax.Array | np.ndarray) -> None:
        known = not isinstance(ids, Tracer) and getattr(ids, "is_fully_addressable", True)
        if not known or ids.size == 0:
            return
        known_ids = np.asarray(ids)  # first: inside a trace jnp's min of ids that it closes over is traced
        least, most = int(known_ids.min()), int(known_ids.max())
        if least < 0 or most >= self.num_embeddings:
            raise ArgumentError(
                f"{name_of(self)}: an id is outside the table.",
                got=f"ids {describe(ids)} from {least} to {most}",
                expected=f"ids from 0 to {self.num_embeddings - 1}",
                fix=[f"num_embeddings={max(most, 0) + 1} or more", "map unknown or padding ids to a row of their own"],
            )
