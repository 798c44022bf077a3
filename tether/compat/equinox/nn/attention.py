# SPDX-License-Identifier: Apache-2.0
"""Attention, of one example.

| Equinox | here | what differs |
| --- | --- | --- |
| dot_product_attention, dot_product_attention_weights | the same | |
| MultiheadAttention | the same fields, draws and keys of heads | ``deterministic=`` is ``inference=``, not ignored |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tether._transforms import vmap
from tether.compat.equinox.module import Module, static_field
from tether.compat.equinox.nn._arguments import renamed_inference
from tether.compat.equinox.nn.dropout import Dropout
from tether.compat.equinox.nn.linear import Linear
from tether.errors import ShapeError, describe

__all__ = ["MultiheadAttention", "dot_product_attention", "dot_product_attention_weights"]


def dot_product_attention_weights(query: Any, key: Any, mask: Any = None) -> jax.Array:
    """softmax(q k^T / sqrt(size)), one row for each query.

    Args:
        query: float[targets, size].
        key: float[sources, size].
        mask: bool[targets, sources], True where a source is seen.
    Raises:
        ShapeError: a mask of another shape.
    Example:
        >>> q, k = jnp.zeros((1, 2)), jnp.ones((3, 2))
        >>> eqx.nn.attention.dot_product_attention_weights(q, k, jnp.array([[True, True, False]])).tolist()
        [[0.5, 0.5, 0.0]]
    """
    logits = jnp.einsum("td,sd->ts", query, key) / math.sqrt(query.shape[-1])
    if mask is not None:
        _check_mask("dot_product_attention", mask, logits.shape, "[targets, sources]")
        logits = jnp.where(mask, logits, -jnp.inf)
    return jax.nn.softmax(logits, axis=-1)


def dot_product_attention(
    query: Any,
    key_: Any,
    value: Any,
    mask: Any = None,
    dropout: Callable[..., Any] | None = None,
    *,
    key: Any = None,
    inference: bool | None = None,
) -> jax.Array:
    """Averages of the values by softmax(q k^T / sqrt(size)).

    Args:
        query: float[targets, size].
        key_: float[sources, size].
        value: float[sources, value size].
        mask: bool[targets, sources], True where a source is seen.
        dropout: What the weights go through, called as ``dropout(weights, key=key, inference=inference)``.
        key: PRNG key for it.
        inference: As in Dropout.
    Raises:
        ShapeError: a mask of another shape.
    """
    weights = dot_product_attention_weights(query, key_, mask)
    if dropout is not None:
        weights = dropout(weights, key=key, inference=inference)
    return jnp.einsum("ts,sd->td", weights, value)


class MultiheadAttention(Module):
    """Attends with several heads: each averages the values by how well queries meet keys.

    y = concat over heads of softmax(q k^T / sqrt(qk_size)) v, through a last linear map; q, k and v are linear maps of
    query, key and value

    Args:
        num_heads: Number of heads.
        query_size: Number of features of query.
        key_size, value_size, output_size: Of key, value and y; None is query_size.
        qk_size, vo_size: Sizes of a head: of q and k, and of v; None is query_size // num_heads.
        use_query_bias, use_key_bias, use_value_bias, use_output_bias: Whether that map has a bias.
        dropout_p: Probability that a weight is dropped.
        inference: As in Dropout.
        key: PRNG key of the first values.
    Shapes:
        query: float[targets, query_size] -> float[targets, output_size]
        key_, value: float[sources, key_size], float[sources, value_size]
        mask: bool[num_heads, targets, sources], True where a source is seen.
    Raises:
        ShapeError: inputs that aren't sequences, keys and values of different number, or a mask of another shape.
        RuntimeError: a call that drops has no key.
    Example:
        >>> attention = eqx.nn.MultiheadAttention(2, 8, key=jax.random.PRNGKey(0))
        >>> x = jnp.ones((5, 8))
        >>> attention(x, x, x, jnp.broadcast_to(jnp.tri(5, dtype=bool), (2, 5, 5))).shape
        (5, 8)
    References:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear
    dropout: Dropout
    num_heads: int = static_field()
    query_size: int = static_field()
    key_size: int = static_field()
    value_size: int = static_field()
    output_size: int = static_field()
    qk_size: int = static_field()
    vo_size: int = static_field()
    use_query_bias: bool = static_field()
    use_key_bias: bool = static_field()
    use_value_bias: bool = static_field()
    use_output_bias: bool = static_field()

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        *,
        key: Any,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.query_size = query_size
        self.key_size = query_size if key_size is None else key_size
        self.value_size = query_size if value_size is None else value_size
        self.output_size = query_size if output_size is None else output_size
        self.qk_size = query_size // num_heads if qk_size is None else qk_size
        self.vo_size = query_size // num_heads if vo_size is None else vo_size
        self.use_query_bias = use_query_bias
        self.use_key_bias = use_key_bias
        self.use_value_bias = use_value_bias
        self.use_output_bias = use_output_bias
        width, out_width = num_heads * self.qk_size, num_heads * self.vo_size
        keys = jax.random.split(key, 4)
        self.query_proj = Linear(self.query_size, width, use_query_bias, key=keys[0])
        self.key_proj = Linear(self.key_size, width, use_key_bias, key=keys[1])
        self.value_proj = Linear(self.value_size, out_width, use_value_bias, key=keys[2])
        self.output_proj = Linear(out_width, self.output_size, use_output_bias, key=keys[3])
        self.dropout = Dropout(dropout_p, inference)

    def __call__(
        self,
        query: Any,
        key_: Any,
        value: Any,
        mask: Any = None,
        *,
        key: Any = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """One output for each query; each head has a part of the key."""
        inference = renamed_inference("MultiheadAttention", inference, deterministic)
        _check_sequences(query, key_, value)
        if mask is not None:
            shape = (self.num_heads, query.shape[0], key_.shape[0])
            _check_mask("MultiheadAttention", mask, shape, "[num_heads, targets, sources]")
        heads = (
            self._heads(self.query_proj, query),
            self._heads(self.key_proj, key_),
            self._heads(self.value_proj, value),
        )
        keys = None if key is None else jax.random.split(key, self.num_heads)
        attend = partial(dot_product_attention, dropout=self.dropout, inference=inference)
        y = vmap(attend)(*heads, mask=mask, key=keys).swapaxes(0, 1)
        return vmap(self.output_proj)(y.reshape(query.shape[0], -1))

    def _heads(self, projection: Callable[..., Any], x: Any) -> jax.Array:
        """The projection of each row, [num_heads, rows, size]."""
        # By vmap, not with the weight: a projection may have been replaced by any module.
        return vmap(projection)(x).reshape(x.shape[0], self.num_heads, -1).swapaxes(0, 1)


def _check_sequences(query: Any, key: Any, value: Any) -> None:
    if {query.ndim, key.ndim, value.ndim} == {2} and key.shape[0] == value.shape[0]:
        return
    batched = {query.ndim, key.ndim, value.ndim} == {3}
    raise ShapeError(
        "MultiheadAttention: query, key and value aren't sequences, the last two of equal length.",
        got=f"query {describe(query)}, key {describe(key)}, value {describe(value)}",
        expected="[targets, query_size], [sources, key_size], [sources, value_size]",
        fix="jax.vmap(attention)(query, key, value), for a batch" if batched else None,
    )


def _check_mask(name: str, mask: Any, shape: tuple[int, ...], meaning: str) -> None:
    if mask.shape != shape:
        raise ShapeError(
            f"{name}: the mask isn't of shape {meaning}.",
            got=describe(mask),
            expected=f"[{', '.join(map(str, shape))}]",
            fix=f"jnp.broadcast_to(mask, {shape})" if mask.shape == shape[1:] else None,
        )
