# SPDX-License-Identifier: Apache-2.0
"""GPT-2: a transformer that reads text from left to right, and writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether._transforms import jit, scan
from tether.errors import ArgumentError, DtypeError, ShapeError, describe
from tether.nn import Dropout, Embedding, LayerNorm, Linear, init
from tether.nn._attention import active, attend, attend_cached
from tether.nn._cache import KVCache
from tether.nn._inputs import as_array, integer, name_of
from tether.random import keys
from tether.zoo._sampling import checked_temperature, next_token


class Attention(Module):
    """Causal self attention with one projection for queries, keys and values, as in the published weights.

    Args:
        embed_dim: Size of the last axis of x and y.
        num_heads: Number of heads.
        dropout: Probability to drop a weight, and an element of y, in training.
        deviation: Standard deviation of the first values of the last projection.
        key, dtype: As in GPT2.
    Shapes:
        x: float[..., length, embed_dim] -> float[..., length, embed_dim]
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, deviation: float, key: Any, dtype: DTypeLike):
        first_key, last_key = keys(key, 2)
        self.num_heads = num_heads
        self.c_attn = _linear(embed_dim, 3 * embed_dim, 0.02, first_key, dtype)
        self.c_proj = _linear(embed_dim, embed_dim, deviation, last_key, dtype)
        self.attn_dropout, self.resid_dropout = Dropout(dropout), Dropout(dropout)

    def __call__(self, x: jax.Array, cache: KVCache | None = None) -> jax.Array:
        heads = (*x.shape[:-1], self.num_heads, -1)
        q, k, v = (part.reshape(heads) for part in jnp.split(self.c_attn(x), 3, -1))
        dropout = active(self.attn_dropout)
        if cache is None:
            y = attend(q, k, v, causal=True, dropout=dropout)
        else:
            y = attend_cached(q, k, v, cache, dropout=dropout)
        return self.resid_dropout(self.c_proj(y.reshape(x.shape)))


class FeedForward(Module):
    """Two linear maps with a GELU between, in its approximation by tanh.

    Args:
        embed_dim: Size of the last axis of x and y; 4 times as many between.
        dropout, deviation, key, dtype: As in Attention.
    Shapes:
        x: float[..., embed_dim] -> float[..., embed_dim]
    """

    def __init__(self, embed_dim: int, dropout: float, deviation: float, key: Any, dtype: DTypeLike):
        first_key, last_key = keys(key, 2)
        self.c_fc = _linear(embed_dim, 4 * embed_dim, 0.02, first_key, dtype)
        self.c_proj = _linear(4 * embed_dim, embed_dim, deviation, last_key, dtype)
        self.dropout = Dropout(dropout)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True)))


class Block(Module):
    """Attention and a feed-forward part, each normalized before and added to its input.

    h = x + attn(ln_1(x)); y = h + mlp(ln_2(h))

    Args:
        embed_dim, num_heads, dropout, deviation, key, dtype: As in Attention.
    Shapes:
        x: float[..., length, embed_dim] -> float[..., length, embed_dim]
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, deviation: float, key: Any, dtype: DTypeLike):
        attention_key, mlp_key = keys(key, 2)
        self.ln_1 = LayerNorm(embed_dim, dtype=dtype)
        self.attn = Attention(embed_dim, num_heads, dropout, deviation, attention_key, dtype)
        self.ln_2 = LayerNorm(embed_dim, dtype=dtype)
        self.mlp = FeedForward(embed_dim, dropout, deviation, mlp_key, dtype)

    def __call__(self, x: jax.Array, cache: KVCache | None = None) -> jax.Array:
        h = x + self.attn(self.ln_1(x), cache)
        return h + self.mlp(self.ln_2(h))


class GPT2Cache(Module):
    """The caches of all layers; ``model.init_cache`` makes one.

    Args:
        layers: One cache for each layer.
    """

    def __init__(self, layers: Sequence[KVCache]):
        self.layers = list(layers)

    @property
    def lengths(self) -> jax.Array:
        """The tokens that each row has seen, int32[*batch]."""
        return self.layers[0].lengths

    def set_lengths(self, lengths: ArrayLike) -> None:
        """Lets each row have seen so many tokens, no more than it has: what followed, such as padding, is forgotten."""
        for layer in self.layers:
            layer.lengths = jnp.array(lengths)  # a copy each: a buffer can be donated but once

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Forgets all tokens, of all rows or of those where ``rows``, bool[*batch], is True."""
        for layer in self.layers:
            layer.reset(rows)


class GPT2(Module):
    r"""Predicts the next token of a text at each of its places; ``generate`` writes it on.

    Names of parts are those of the published weights, which have linear weights as [in, out] and masks among the
    tensors. ``GPT2.published`` says that to ``tether.interop.torch.load(model, file, **tether.zoo.GPT2.published)``.
    The output layer is the embedding of the tokens.

    ``model(ids, cache=model.init_cache(batch, length))`` lets ids follow what the cache has seen, as in
    ``nn.MultiHeadAttention``.

    Args:
        vocab_size: Number of tokens.
        num_positions: Longest text, in tokens.
        embed_dim: Size of the vectors.
        num_layers: Number of blocks, at least 1.
        num_heads: Number of heads of each attention; divides embed_dim.
        dropout: Probability to drop an element after the embeddings and in each part of a block, in training.
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
    Shapes:
        ids: int[..., length] -> float[..., length, vocab_size], the logits
    Raises:
        ShapeError: ids have no axis of length, or are longer than num_positions.
        DtypeError: ids are not integers.
        ArgumentError: a number out of its range, or heads that don't divide embed_dim.
    Example:
        >>> model = tether.zoo.GPT2(vocab_size=11, num_positions=16, embed_dim=8, num_layers=2, num_heads=2)
        >>> model(jnp.asarray([[1, 2, 3]])).shape
        (1, 3, 11)
        >>> model.generate(jnp.asarray([[1, 2, 3]]), 5).shape
        (1, 5)
    References:
        Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.
        GPT2LMHeadModel of Hugging Face's transformers, for names and numbers.
    """

    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rules": {r"^transformer\.": "", r"\.attn\.(masked_)?bias$": None, r"^lm_head\.weight$": None},
        "transforms": {r"\.(c_attn|c_proj|c_fc)\.weight$": np.transpose},
    }

    def __init__(
        self,
        vocab_size: int = 50257,
        num_positions: int = 1024,
        embed_dim: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        *,
        dropout: float = 0.1,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        name = name_of(self)
        self.num_positions, self.num_heads = integer(name, "num_positions", num_positions), num_heads
        count, embed_dim = integer(name, "num_layers", num_layers), integer(name, "embed_dim", embed_dim)
        _check_heads(name, num_heads, embed_dim)
        token_key, position_key, *block_keys = keys(key, count + 2)
        normal = init.normal(0.02)
        self.wte = Embedding(vocab_size, embed_dim, key=token_key, dtype=dtype, weight_init=normal)
        self.wpe = Embedding(self.num_positions, embed_dim, key=position_key, dtype=dtype, weight_init=normal)
        self.drop = Dropout(dropout)
        deviation = 0.02 / math.sqrt(2 * count)  # so that the sum over all blocks doesn't grow with their number
        self.h = [Block(embed_dim, num_heads, dropout, deviation, k, dtype) for k in block_keys]
        self.ln_f = LayerNorm(embed_dim, dtype=dtype)

    def __call__(self, ids: ArrayLike, *, cache: GPT2Cache | None = None) -> jax.Array:
        ids = self._checked(ids)
        caches = [None] * len(self.h) if cache is None else self._caches(cache)
        positions = jnp.arange(ids.shape[-1]) if caches[0] is None else caches[0].positions(ids.shape[-1])
        with jax.numpy_rank_promotion("allow"):
            h = self.drop(self.wte(ids) + self.wpe(positions))
        for block, layer_cache in zip(self.h, caches, strict=True):
            h = block(h, layer_cache)
        return self.wte.attend(self.ln_f(h))

    def init_cache(self, batch: int | Sequence[int], length: int, *, dtype: DTypeLike | None = None) -> GPT2Cache:
        """Makes an empty cache, to be passed at the call.

        Args:
            batch: Batch size, or sizes of all batch axes; () for one text.
            length: Room for so many tokens a row.
            dtype: Of keys and values, that of the computation; None is that of the parameters.
        """
        dtype = dtype or self.wte.compute_dtype or self.wte.weight.dtype
        size = self.wte.features // self.num_heads
        return GPT2Cache([KVCache(batch, length, self.num_heads, size, dtype=dtype) for _ in self.h])

    def generate(
        self,
        ids: ArrayLike,
        count: int,
        *,
        lengths: ArrayLike | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Writes a text on, in evaluation: one compiled program for the prompt and all further tokens.

        Args:
            ids: int[..., length], the prompt.
            count: Number of tokens to write, at least 1.
            lengths: int[...], of each prompt, where they are padded on the right; 1 to length.
            temperature: The logits are divided by it before a token is drawn; 0 takes the likeliest token.
            top_k: Draw among so many of the likeliest tokens; None is all.
            key: PRNG key of the draws; None draws it from the stream in force.
        Returns:
            The new tokens, int32[..., count].
        Raises:
            ShapeError: prompt and new tokens are more than num_positions, or lengths are not one for each prompt.
            DtypeError: ids or lengths are not integers.
            ArgumentError: an option out of its range.
        """
        name, ids = name_of(self), self._checked(ids)
        count = integer(name, "count", count)
        top_k = top_k if top_k is None else integer(name, "top_k", top_k)
        temperature = checked_temperature(name, temperature)
        if ids.shape[-1] + count > self.num_positions:
            raise ShapeError(
                f"{name}: the text would be longer than the model has positions.",
                got=f"a prompt of {ids.shape[-1]} tokens, {count} more",
                expected=f"at most {self.num_positions} in all",
                fix=f"ids[..., -{max(self.num_positions - count, 1)}:], or fewer new tokens",
            )
        lengths = None if lengths is None else self._checked_lengths(lengths, ids)
        # The draws' own keys, of which taking the likeliest token needs none.
        key = keys(key, 1)[0] if temperature else jax.random.key(0)
        options = {"count": count, "top_k": top_k and min(top_k, self.wte.num_embeddings)}
        return _generate(self.eval(), ids, lengths, temperature or 1.0, key, greedy=not temperature, **options)

    def _checked(self, ids: ArrayLike) -> jax.Array:
        ids = as_array(self, ids)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise DtypeError(
                f"{name_of(self)}: ids are not integers.",
                got=describe(ids),
                expected="an integer array",
                fix="ids.astype(jnp.int32)",
            )
        if ids.ndim == 0 or not 0 < ids.shape[-1] <= self.num_positions:
            raise ShapeError(
                f"{name_of(self)}: ids are no texts of 1 to {self.num_positions} tokens.",
                got=describe(ids),
                expected="[..., length]",
                fix=["ids[None] for a single token", f"ids[..., -{self.num_positions}:] for a longer text"],
            )
        return ids

    def _checked_lengths(self, lengths: ArrayLike, ids: jax.Array) -> jax.Array:
        lengths = as_array(self, lengths)
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise DtypeError(
                f"{name_of(self)}: lengths are not integers.",
                got=describe(lengths),
                expected="an integer array",
                fix="lengths.astype(jnp.int32)",
            )
        if lengths.shape != ids.shape[:-1]:
            raise ShapeError(
                f"{name_of(self)}: lengths are not one for each prompt.",
                got=f"lengths {describe(lengths)}, ids {describe(ids)}",
                expected=f"int{list(ids.shape[:-1])}",
                fix="valid.sum(-1), where valid is True at tokens and False at padding",
            )
        return lengths

    def _caches(self, cache: GPT2Cache) -> Sequence[KVCache]:
        if not isinstance(cache, GPT2Cache) or len(cache.layers) != len(self.h):
            raise ArgumentError(
                f"{name_of(self)}: cache is not one of this model.",
                got=f"{len(cache.layers)} layers" if isinstance(cache, GPT2Cache) else describe(cache),
                expected=f"a cache of {len(self.h)} layers",
                fix="cache = model.init_cache(batch, length)",
            )
        return cache.layers


@jit(static_argnames=("count", "top_k", "greedy"))
def _generate(model, ids, lengths, temperature, key, *, count, top_k, greedy):
    """Reads the prompt, then takes token after token: a scan that carries the cache."""
    cache = model.init_cache(ids.shape[:-1], ids.shape[-1] + count)
    logits = model(ids, cache=cache)
    if lengths is None:
        last = logits[..., -1, :]
    else:
        cache.set_lengths(lengths)
        last = jnp.take_along_axis(logits, (lengths - 1)[..., None, None], -2)[..., 0, :]

    choose = lambda logits, key: next_token(logits, key, temperature, greedy=greedy, top_k=top_k)

    def step(carry, key):
        model, cache, logits = carry
        token = choose(logits, key)
        return (model, cache, model(token[..., None], cache=cache)[..., 0, :]), token

    steps = jax.random.split(key, count)  # the last token is not read again
    (*_, last), tokens = scan(step, (model, cache, last), steps[:-1])
    tokens = jnp.concatenate([tokens, choose(last, steps[-1])[None]])
    return jnp.moveaxis(tokens, 0, -1)


def _linear(in_features: int, out_features: int, deviation: float, key: Any, dtype: DTypeLike) -> Linear:
    return Linear(
        in_features, out_features, key=key, dtype=dtype, weight_init=init.normal(deviation), bias_init=init.zeros
    )


def _check_heads(name: str, num_heads: int, embed_dim: int) -> None:
    if embed_dim % integer(name, "num_heads", num_heads):
        raise ArgumentError(
            f"{name}: num_heads doesn't divide embed_dim.",
            got=f"embed_dim={embed_dim}, num_heads={num_heads}",
            expected=f"a divisor of {embed_dim}",
            fix=f"num_heads={math.gcd(embed_dim, num_heads)}",
        )


def gpt2(**options: Any) -> GPT2:
    """The smallest GPT-2, of 12 layers; ``options`` are arguments of GPT2."""
    return GPT2(**options)


def gpt2_medium(**options: Any) -> GPT2:
    """The GPT-2 of 24 layers; ``options`` are arguments of GPT2."""
    return GPT2(**{"embed_dim": 1024, "num_layers": 24, "num_heads": 16, **options})


def gpt2_large(**options: Any) -> GPT2:
    """The GPT-2 of 36 layers; ``options`` are arguments of GPT2."""
    return GPT2(**{"embed_dim": 1280, "num_layers": 36, "num_heads": 20, **options})


def gpt2_xl(**options: Any) -> GPT2:
    """The GPT-2 of 48 layers; ``options`` are arguments of GPT2."""
    return GPT2(**{"embed_dim": 1600, "num_layers": 48, "num_heads": 25, **options})
