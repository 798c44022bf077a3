# SPDX-License-Identifier: Apache-2.0
"""The keys and values that attention has seen, in a buffer of fixed length."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from tether._core import State
from tether._modules import Module
from tether._transforms import jit
from tether.errors import DtypeError, ShapeError, describe
from tether.nn._inputs import inexact_dtype, integer, name_of


class KVCache(Module):
    """Keeps keys and values of the tokens so far, each row of the batch with a length of its own.

    ``attention.init_cache`` makes one; ``attention(x, cache=cache)`` appends to it. Appending writes the new tokens
    only, whatever the position: where the buffer is donated, or carried by a loop, nothing is copied.

    A token past the end is an error where the lengths are known (an eager call). Where they are traced, nothing is
    written for it and its output is NaN; so is that of all later ones, until ``reset``.

    ``lengths`` may be written. Prompts of different lengths are padded on the right, run together, and then
    ``cache.lengths = lengths_of_prompts`` forgets the padding.

    Args:
        batch: Batch size, or sizes of the batch axes; () is one example.
        length: Room for so many tokens a row, at least 1.
        num_heads: Number of key and value heads.
        head_dim: Size of a head.
        dtype: Of keys and values.
    Variables:
        k, v: State, float[*batch, length, num_heads, head_dim]; written.
        lengths: State, int32[*batch], the tokens that each row has seen; written.
    Raises:
        ShapeError: keys of another batch, of other heads, or too many.
        DtypeError: keys of another dtype.
    Example:
        >>> attention = nn.MultiHeadAttention(8, 2, causal=True)
        >>> cache = attention.init_cache(batch=3, length=10)
        >>> y = attention(jnp.ones((3, 4, 8)), cache=cache)
        >>> print(cache.lengths)
        [4 4 4]
    """

    def __init__(
        self,
        batch: int | Sequence[int],
        length: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        sizes = batch if isinstance(batch, list | tuple) else (batch,)
        shape = tuple(integer(name, "batch", size) for size in sizes)
        self.length = integer(name, "length", length)
        self.num_heads = integer(name, "num_heads", num_heads)
        self.head_dim = integer(name, "head_dim", head_dim)
        dtype = inexact_dtype(name, "dtype", dtype)
        self.k = State(jnp.zeros((*shape, self.length, self.num_heads, self.head_dim), dtype))
        self.v = State(jnp.zeros((*shape, self.length, self.num_heads, self.head_dim), dtype))
        self.lengths = State(jnp.zeros(shape, jnp.int32))

    def positions(self, count: int) -> jax.Array:
        """The positions of the next ``count`` tokens of each row, int32[*batch, count]."""
        with jax.numpy_rank_promotion("allow"):
            return self.lengths[..., None] + jnp.arange(count, dtype=jnp.int32)

    def check(self, k: jax.Array) -> None:
        """Makes sure that keys, float[*batch, tokens, num_heads, head_dim], fit the cache and what room is left."""
        batch, heads = self.lengths.shape, (self.num_heads, self.head_dim)
        right = f"{self.k.dtype}[{', '.join([*map(str, batch), 'tokens', *map(str, heads)])}]"
        if k.shape[-2:] != heads or k.shape[:-3] != batch:
            whose = "another batch" if k.shape[-2:] == heads else "other heads"
            raise ShapeError(
                f"{name_of(self)}: the cache was made for {whose}.",
                got=f"keys {describe(k)}",
                expected=right,
                fix="cache = attention.init_cache(x.shape[:-2], length), of the same attention",
            )
        if k.dtype != self.k.dtype:
            raise DtypeError(
                f"{name_of(self)}: the cache holds another dtype than the keys have.",
                got=f"keys {describe(k)}",
                expected=right,
                fix=f"attention.init_cache(batch, length, dtype=jnp.{k.dtype})",
            )
        self._check_room(k.shape[-3])

    def append(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Writes the next tokens of every row and moves the lengths on.

        Args:
            k, v: float[*batch, tokens, num_heads, head_dim].
        Returns:
            All keys and all values, as in the buffer; those beyond the lengths are meaningless.
        """
        self.check(k)
        count = k.shape[-3]
        places = self.positions(count)
        self.k, self.v = (_written(old, new, places) for old, new in ((self.k, k), (self.v, v)))
        self.lengths = self.lengths + count
        return self.k, self.v

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Forgets all tokens, of all rows or of some.

        Keys and values are cleared too: a NaN that stayed in a buffer would reach every later output of that row,
        though its weight is 0.

        Args:
            rows: bool[*batch], True where a row begins anew; None is all rows.
        Raises:
            ShapeError: rows don't have the shape of the batch.
            DtypeError: rows are not bools.
        """
        chosen = self._checked_rows(rows)
        self.lengths = jnp.where(chosen, 0, self.lengths)
        cells = chosen[..., None, None, None]
        self.k, self.v = (jnp.where(cells, jnp.zeros((), old.dtype), old) for old in (self.k, self.v))

    def _checked_rows(self, rows: ArrayLike | None) -> jax.Array:
        batch = self.lengths.shape
        if rows is None:
            return jnp.ones(batch, bool)
        rows = jnp.asarray(rows)
        if rows.dtype != jnp.bool_:
            raise DtypeError(
                f"{name_of(self)}: rows to reset are not bools.",
                got=describe(rows),
                expected=f"bool{list(batch)}, True where a row begins anew",
                fix="jnp.zeros(batch, bool).at[numbers].set(True) for numbers of rows",
            )
        if rows.shape != batch:
            raise ShapeError(
                f"{name_of(self)}: rows to reset don't have the shape of the batch.",
                got=describe(rows),
                expected=f"bool{list(batch)}",
                fix="one bool for each row; cache.reset() for all",
            )
        return rows

    def _check_room(self, count: int) -> None:
        lengths = self.lengths
        known = not isinstance(lengths, Tracer) and lengths.is_fully_addressable
        used = int(np.asarray(lengths).max()) if known else 0
        if used + count > self.length:
            raise ShapeError(
                f"{name_of(self)}: there is no room for the tokens.",
                got=f"{count} tokens after {used}" if known else f"{count} tokens",
                expected=f"at most {self.length} in all",
                fix=["cache.reset(), or cache.reset(rows), where a new text begins", f"length={used + count} or more"],
            )


@jit
def _written(buffer, new, places):
    """Writes a row's new tokens into its places of the buffer; those that it doesn't have are dropped."""
    count = places.shape[-1]
    rows = np.arange(places.size // count, dtype=np.int32)[:, None]
    flat = buffer.reshape((rows.size, *buffer.shape[-3:]))
    flat = flat.at[rows, places.reshape(-1, count)].set(
        new.reshape((rows.size, *new.shape[-3:])),
        mode="drop",
        wrap_negative_indices=False,
        indices_are_sorted=True,
        unique_indices=True,
    )
    return flat.reshape(buffer.shape)
