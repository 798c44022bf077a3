# SPDX-License-Identifier: Apache-2.0
"""Attention: the layer, and the arithmetic that it shares with the models of the zoo.

Heads are an axis of their own here: queries are [..., targets, heads, size], keys and values [..., sources, kv heads,
size], masks [..., heads or 1, targets, sources].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether._transforms import jit
from tether.errors import ArgumentError, DtypeError, ShapeError, describe
from tether.nn import init
from tether.nn._cache import KVCache
from tether.nn._dropout import Dropout
from tether.nn._inputs import as_array, at_least_float32, integer, name_of, real_only
from tether.nn._linear import Linear
from tether.nn._rotary import RotaryEmbedding
from tether.nn._window import join_leading, part_leading
from tether.random import keys

_PROJECTIONS = ("query", "key", "value", "out")


class MultiHeadAttention(Module):
    """Attends: each target takes an average of the sources, weighted by how well its query meets their keys.

    y = concat over heads of softmax(q k^T / sqrt(head_dim)) v, through a last affine map

    ``attention(x)`` is self attention, ``attention(x, memory)`` cross attention, ``attention(x, keys, values)`` takes
    keys and values from different arrays. A target that sees no source takes zeros, so its output is the bias of
    ``out_proj``; it has no gradient. The softmax is computed in float32, of float64 in float64.

    ``attention(x, cache=cache)`` lets x follow the tokens that the cache has seen, and appends them: a prompt at once,
    then token by token. It gives what the whole text at once would have given. See ``init_cache``.

    Args:
        embed_dim: Size of the last axis of x and y, at least 1.
        num_heads: Number of query heads; divides embed_dim unless head_dim is given.
        num_kv_heads: Number of key and value heads, a divisor of num_heads; each serves num_heads / num_kv_heads
            neighboring query heads. None is num_heads.
        head_dim: Size of a head; None is embed_dim / num_heads.
        key_size, value_size: Sizes of the last axes of keys and values; None is embed_dim, and key_size.
        causal: Whether targets see no source behind their own position.
        dropout: Probability to drop a weight in training, in [0, 1).
        rotary: What turns queries and keys by their position, such as ``nn.RotaryEmbedding(head_dim)``.
        query_norm, key_norm: Modules that each query and key head goes through before that, such as
            ``nn.LayerNorm(head_dim)``.
        use_bias: Whether the projections have a bias; or the names of those that have: "query", "key", "value", "out".
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
        weight_init, bias_init: Functions (key, shape, dtype) -> array as in ``nn.init``; None is as in ``nn.Linear``.
    Shapes:
        x: float[..., targets, embed_dim] -> float[..., targets, embed_dim]
        key_value: float[..., sources, key_size], the batch axes as in x
        value: float[..., sources, value_size]
        mask: bool[targets, sources], bool[..., targets, sources] or bool[..., num_heads, targets, sources], the batch
            axes as in x; True where a source is seen. Any axis may be 1. With a cache, sources are its places.
    Raises:
        ShapeError: an input, a mask or a cache doesn't fit.
        DtypeError: an input is not of real numbers, a mask not of bools, or a cache of another dtype.
        ArgumentError: sizes that don't divide, or an option out of its range; a cache for cross attention, or without
            causal.
    Example:
        >>> attention = nn.MultiHeadAttention(8, num_heads=4, num_kv_heads=2, causal=True, key=jax.random.key(0))
        >>> x = jax.random.normal(jax.random.key(1), (3, 5, 8))
        >>> cache = attention.init_cache(batch=3, length=5)
        >>> steps = [attention(x[:, i : i + 1], cache=cache) for i in range(5)]
        >>> bool(jnp.allclose(jnp.concatenate(steps, 1), attention(x), atol=1e-5))
        True
    References:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
        Ainslie et al. 2023, arXiv:2305.13245, for num_kv_heads.
        Dehghani et al. 2023, arXiv:2302.05442, section 2, for query_norm and key_norm.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        rotary: RotaryEmbedding | None = None,
        query_norm: Callable[[jax.Array], jax.Array] | None = None,
        key_norm: Callable[[jax.Array], jax.Array] | None = None,
        use_bias: bool | Sequence[str] = True,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
        weight_init: init.Initializer | None = None,
        bias_init: init.Initializer | None = None,
    ):
        name = name_of(self)
        self.embed_dim = integer(name, "embed_dim", embed_dim)
        self.num_heads = integer(name, "num_heads", num_heads)
        self.num_kv_heads = _kv_heads(name, num_kv_heads, self.num_heads)
        self.head_dim = _head_dim(name, head_dim, self.embed_dim, self.num_heads)
        self.key_size = self.embed_dim if key_size is None else integer(name, "key_size", key_size)
        self.value_size = self.key_size if value_size is None else integer(name, "value_size", value_size)
        self.causal = bool(causal)
        self.dropout = Dropout(dropout)
        self.rotary = _rotary(name, rotary, self.head_dim)
        self.query_norm, self.key_norm = query_norm, key_norm
        biased = _biased(name, use_bias)
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = [
            (self.embed_dim, width),
            (self.key_size, kv_width),
            (self.value_size, kv_width),
            (width, self.embed_dim),
        ]
        self.query_proj, self.key_proj, self.value_proj, self.out_proj = (
            Linear(*pair, use_bias=bias, key=k, dtype=dtype, weight_init=weight_init, bias_init=bias_init)
            for pair, bias, k in zip(sizes, biased, keys(key, 4), strict=True)
        )

    def __call__(
        self,
        x: ArrayLike,
        key_value: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *,
        mask: ArrayLike | None = None,
        cache: KVCache | None = None,
    ) -> jax.Array:
        self._check_cache(cache, key_value is None and value is None)
        x, source, value = self._inputs(x, key_value, value)
        sources = source.shape[-2] if cache is None else cache.length
        seen = None if mask is None else checked_mask(self, mask, x.shape[:-1], self.num_heads, sources)
        q = self._heads(self.query_proj(x), self.num_heads, self.query_norm)
        k = self._heads(self.key_proj(source), self.num_kv_heads, self.key_norm)
        v = self._heads(self.value_proj(value), self.num_kv_heads)
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        if cache is not None:
            cache.check(k)
        if self.rotary is not None:
            places = [jnp.arange(h.shape[-3]) if cache is None else cache.positions(h.shape[-3]) for h in (q, k)]
            q, k = (self.rotary(h, place[..., None]) for h, place in zip((q, k), places, strict=True))
        dropout = active(self.dropout)
        if cache is None:
            y = attend(q, k, v, seen, causal=self.causal, dropout=dropout)
        else:
            y = attend_cached(q, k, v, cache, seen, dropout=dropout)
        return self.out_proj(y.reshape((*y.shape[:-2], self.num_heads * self.head_dim)))

    def init_cache(self, batch: int | Sequence[int], length: int, *, dtype: DTypeLike | None = None) -> KVCache:
        """Makes an empty cache, to be passed at the call.

        Args:
            batch: Batch size, or sizes of all batch axes; () for one example.
            length: Room for so many tokens a row.
            dtype: Of keys and values, that of the computation; None is that of the parameters.
        Example:
            >>> nn.MultiHeadAttention(8, 2, causal=True).init_cache((), 16).k.shape
            (16, 2, 4)
        """
        dtype = dtype or self.key_proj.compute_dtype or self.key_proj.weight.dtype
        return KVCache(batch, length, self.num_kv_heads, self.head_dim, dtype=dtype)

    def _heads(self, h: jax.Array, count: int, norm: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
        h = h.reshape((*h.shape[:-1], count, self.head_dim))
        return h if norm is None else norm(h)

    def _inputs(
        self, x: ArrayLike, key_value: ArrayLike | None, value: ArrayLike | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Checks the inputs against the sizes and each other; absent ones are filled in."""
        x = self._checked("x", x, self.embed_dim)
        source = self._checked("key_value", x if key_value is None else key_value, self.key_size)
        value = self._checked("value", source if value is None else value, self.value_size)
        if x.shape[:-2] != source.shape[:-2] or source.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                f"{name_of(self)}: the inputs differ in their batch axes, or keys and values in their number.",
                got=f"x {describe(x)}, key_value {describe(source)}, value {describe(value)}",
                expected="the batch axes of x in all, and a value for each key",
                fix="jnp.broadcast_to(memory, (*x.shape[:-2], *memory.shape[-2:])), where one serves all",
            )
        if self.causal and source.shape[-2] != x.shape[-2]:
            raise ShapeError(
                f"{name_of(self)}: causal attention needs as many sources as targets.",
                got=f"x {describe(x)}, key_value {describe(source)}",
                expected=f"{x.shape[-2]} sources: which of them lie behind a target is not said otherwise",
                fix=["causal=False, for cross attention", "causal=False and mask=, which says which target sees what"],
            )
        return x, source, value

    def _checked(self, argument: str, x: ArrayLike, size: int) -> jax.Array:
        x = as_array(self, x)
        real_only(self, x)
        if x.ndim < 2 or x.shape[-1] != size:
            raise ShapeError(
                f"{name_of(self)}: {argument} doesn't end in a length and {size} features.",
                got=describe(x),
                expected=f"[..., length, {size}]",
                fix=["embed_dim, key_size and value_size as the inputs have them", "x[None] for a single token"],
            )
        return x

    def _check_cache(self, cache: KVCache | None, alone: bool) -> None:
        if cache is None:
            return
        if not isinstance(cache, KVCache):
            raise ArgumentError(
                f"{name_of(self)}: cache is not a cache.",
                got=describe(cache),
                expected="what init_cache gives",
                fix="cache = attention.init_cache(batch, length)",
            )
        if not (alone and self.causal):
            raise ArgumentError(
                f"{name_of(self)}: a cache is for causal self attention.",
                got=f"causal={self.causal}, x{'' if alone else ' and other inputs'}",
                expected="causal=True and x alone: what is appended later must not change what was given before",
                fix=["MultiHeadAttention(..., causal=True)", "leave out cache= in cross attention"],
            )


def active(dropout: Dropout) -> Dropout | None:
    """The dropout, if it drops anything now."""
    return dropout if dropout.training and dropout.p > 0 else None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    causal: bool = False,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Averages the values by softmax(q k^T / sqrt(size)); gives zeros where the mask hides every source.

    Args:
        q: float[..., targets, heads, size].
        k, v: float[..., sources, kv heads, size].
        mask: bool[..., heads or 1, targets, sources], with all axes of the batch; True where a source is seen.
        causal: Whether target i sees sources 0 to i only.
        dropout: What the weights go through.
    """
    (q, leading), (k, _), (v, _) = (join_leading(h, 3) for h in (q, k, v))
    mask = None if mask is None else join_leading(mask, 3)[0]
    # JAX's own takes no dropout, computes the softmax of float64 in float32, and has no float16 on a CPU.
    if dropout is None and q.dtype in (jnp.float32, jnp.bfloat16):
        return part_leading(_attended(q, k, v, mask, causal=causal), leading)
    weights = _weights(q, k, mask, causal=causal)
    return part_leading(_averages(weights if dropout is None else dropout(weights), v), leading)


def attend_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVCache,
    mask: jax.Array | None = None,
    *,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Appends keys and values to a cache; each query then sees all that the cache holds up to its own position.

    Positions past the end of the cache give NaN.
    """
    positions = cache.positions(q.shape[-3])
    k, v = cache.append(k, v)
    y = attend(q, k, v, _up_to(positions, mask, length=cache.length), dropout=dropout)
    return _poisoned(y, positions, length=cache.length)


# Functions of arrays alone, jitted as jnp's own are: in an eager call each is one dispatch.


@jit(static_argnames="causal")
def _attended(q, k, v, mask, *, causal):
    with jax.numpy_dtype_promotion("standard"):  # it promotes bfloat16 by itself, and means float32
        y = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal)
    if mask is None:
        return y
    seen = (_visible(mask, q, k) if causal else mask).any(-1)
    return jnp.where(seen.swapaxes(-1, -2)[..., None], y, jnp.zeros((), y.dtype))


@jit(static_argnames="causal")
def _weights(q, k, mask, *, causal):
    """Gives the weights, [batch, heads, targets, sources]; zeros where the mask hides every source."""
    batch, targets, heads, size = q.shape
    groups, wide = k.shape[-2], at_least_float32(q.dtype)
    q = q.reshape(batch, targets, groups, heads // groups, size)
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=wide) / math.sqrt(size)
    logits = logits.reshape(batch, heads, targets, -1)
    mask = _visible(mask, q, k) if causal else mask
    if mask is None:
        return jax.nn.softmax(logits, -1).astype(q.dtype)
    # Not -inf: of a row of nothing else softmax is NaN, and so is its gradient, whatever is put in its place later.
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.asarray(jnp.finfo(wide).min / 2, wide)), -1)
    return jnp.where(mask, weights, jnp.zeros((), wide)).astype(q.dtype)


@jit
def _averages(weights, v):
    """Gives the averages of the values, [batch, targets, heads, size]."""
    batch, heads, targets, sources = weights.shape
    weights = weights.reshape(batch, v.shape[-2], -1, targets, sources)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(batch, targets, heads, -1)


def _visible(mask: jax.Array | None, q: jax.Array, k: jax.Array) -> jax.Array:
    """The mask in which target i sees no source behind i, [batch or 1, heads or 1, targets, sources]."""
    causal = jnp.tri(q.shape[1], k.shape[1], dtype=bool)[None, None]
    return causal if mask is None else mask & causal


@jit(static_argnames="length")
def _up_to(positions, mask, *, length):
    """The mask in which each query sees the places of the cache up to its position."""
    with jax.numpy_rank_promotion("allow"):
        seen = (jnp.arange(length, dtype=positions.dtype) <= positions[..., None])[..., None, :, :]
    return seen if mask is None else seen & mask


@jit(static_argnames="length")
def _poisoned(y, positions, *, length):
    return jnp.where((positions < length)[..., None, None], y, jnp.full((), jnp.nan, y.dtype))


def checked_mask(module: Module, mask: ArrayLike, targets: tuple[int, ...], heads: int, sources: int) -> jax.Array:
    """Checks a mask, and gives it all its axes: the batch, heads or 1, targets, sources.

    Args:
        module: Whom to blame.
        mask: bool[targets, sources], or with the batch axes in front, or with batch axes and heads.
        targets: Batch axes and number of targets.
        heads: Number of query heads.
        sources: Number of sources.
    """
    mask = as_array(module, mask)
    *batch, length = targets
    if mask.dtype != jnp.bool_:
        raise DtypeError(
            f"{name_of(module)}: mask is not of bools.",
            got=describe(mask),
            expected="bool, True where a source is seen",
            fix=["mask.astype(bool), if 1 is seen and 0 is not", "mask == 0, if it was to be added to the logits"],
        )
    inner = (length, sources)
    full = {2: inner, len(batch) + 2: (*batch, *inner), len(batch) + 3: (*batch, heads, *inner)}
    right = full.get(mask.ndim)
    if right is None or any(own not in (1, size) for own, size in zip(mask.shape, right, strict=True)):
        raise ShapeError(
            f"{name_of(module)}: mask doesn't fit the targets and sources.",
            got=describe(mask),
            expected=" or ".join(str(list(shape)) for shape in full.values()) + ", any axis 1 where it is shared",
            fix="valid[:, None, :] for valid, bool[batch, sources], of padded sources",
        )
    if mask.ndim < len(batch) + 3:
        mask = mask[..., None, :, :]
    mask = mask.reshape((*[1] * (len(batch) + 3 - mask.ndim), *mask.shape))
    return jnp.broadcast_to(mask, (*batch, mask.shape[-3], *inner))


def _kv_heads(name: str, num_kv_heads: int | None, num_heads: int) -> int:
    if num_kv_heads is None:
        return num_heads
    count = integer(name, "num_kv_heads", num_kv_heads)
    if num_heads % count:
        raise ArgumentError(
            f"{name}: num_kv_heads doesn't divide num_heads.",
            got=f"num_heads={num_heads}, num_kv_heads={count}",
            expected=f"a divisor of {num_heads}",
            fix=f"num_kv_heads={math.gcd(num_heads, count)}",
        )
    return count


def _head_dim(name: str, head_dim: int | None, embed_dim: int, num_heads: int) -> int:
    if head_dim is not None:
        return integer(name, "head_dim", head_dim)
    if embed_dim % num_heads:
        raise ArgumentError(
            f"{name}: num_heads doesn't divide embed_dim.",
            got=f"embed_dim={embed_dim}, num_heads={num_heads}",
            expected="a divisor, or a head_dim",
            fix=[f"num_heads={math.gcd(embed_dim, num_heads)}", f"head_dim={max(embed_dim // num_heads, 1)}"],
        )
    return embed_dim // num_heads


def _rotary(name: str, rotary: RotaryEmbedding | None, head_dim: int) -> RotaryEmbedding | None:
    if rotary is not None and getattr(rotary, "size", None) != head_dim:
        raise ArgumentError(
            f"{name}: rotary is not made for the size of a head, {head_dim}.",
            got=f"rotary of size {rotary.size}" if isinstance(rotary, RotaryEmbedding) else describe(rotary),
            expected=f"a RotaryEmbedding({head_dim})",
            fix=f"rotary=nn.RotaryEmbedding({head_dim})",
        )
    return rotary


def _biased(name: str, use_bias: bool | Sequence[str]) -> list[bool]:
    """Whether each projection has a bias."""
    if isinstance(use_bias, bool):
        return [use_bias] * len(_PROJECTIONS)
    if not isinstance(use_bias, list | tuple) or not set(use_bias) <= set(_PROJECTIONS):
        raise ArgumentError(
            f"{name}: use_bias names something that is no projection.",
            got=f"use_bias={use_bias!r}",
            expected=f"True, False, or some of {_PROJECTIONS}",
            fix="use_bias=('query', 'value')",
        )
    return [projection in use_bias for projection in _PROJECTIONS]
