# SPDX-License-Identifier: Apache-2.0
"""Attention head by head in float64, and its draws written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx
from tether.compat.equinox.nn.attention import dot_product_attention, dot_product_attention_weights

RNG = np.random.default_rng(5)


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attended(layer, q, k, v, mask=None, weights_to=lambda head, weights: weights):
    """The definition: each head by itself, in the rows of the projections that are its own."""

    def projected(name, x):
        linear = getattr(layer, f"{name}_proj")
        y = x @ np.asarray(linear.weight, np.float64).T
        return y if linear.bias is None else y + np.asarray(linear.bias, np.float64)

    heads = []
    for head in range(layer.num_heads):
        own, own_value = (slice(head * size, (head + 1) * size) for size in (layer.qk_size, layer.vo_size))
        q_head, k_head = projected("query", q)[:, own], projected("key", k)[:, own]
        logits = q_head @ k_head.T / np.sqrt(layer.qk_size)
        if mask is not None:
            logits = np.where(mask[head], logits, -np.inf)
        heads.append(weights_to(head, softmax(logits)) @ projected("value", v)[:, own_value])
    return projected("output", np.concatenate(heads, 1))


def inputs(*shapes):
    drawn = [RNG.normal(size=shape) for shape in shapes]
    return drawn, [jnp.asarray(x, jnp.float32) for x in drawn]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_all_sizes_differ(key, masked, biased):
    layer = eqx.nn.MultiheadAttention(2, 3, 5, 7, 11, 13, 17, biased, biased, biased, biased, key=key)
    wide, x = inputs((4, 3), (6, 5), (6, 7))
    mask = RNG.random((2, 4, 6)) > 0.5
    mask[..., 0] = True
    expected = attended(layer, *wide, mask=mask if masked else None)
    got = layer(*x, jnp.asarray(mask) if masked else None)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_sizes_that_follow_from_the_query(key):
    layer = eqx.nn.MultiheadAttention(3, 7, key=key)
    sizes = (layer.key_size, layer.value_size, layer.output_size, layer.qk_size, layer.vo_size)
    assert sizes == (7, 7, 7, 2, 2)
    wide, x = inputs((4, 7), (5, 7), (5, 7))
    np.testing.assert_allclose(layer(*x), attended(layer, *wide), rtol=1e-4, atol=1e-5)


def test_draws(key):
    layer = eqx.nn.MultiheadAttention(2, 3, 5, 7, 11, 13, 17, use_key_bias=True, use_output_bias=True, key=key)
    shapes = {"query": (26, 3), "key": (26, 5), "value": (34, 7), "output": (11, 34)}
    for (name, shape), k in zip(shapes.items(), jax.random.split(key, 4), strict=True):
        linear, limit = getattr(layer, f"{name}_proj"), shape[1] ** -0.5
        weight_key, bias_key = jax.random.split(k)
        expected = jax.random.uniform(weight_key, shape, minval=-limit, maxval=limit)
        np.testing.assert_array_equal(linear.weight, expected)
        if name in ("key", "output"):
            expected = jax.random.uniform(bias_key, shape[:1], minval=-limit, maxval=limit)
            np.testing.assert_array_equal(linear.bias, expected)
        else:
            assert linear.bias is None


def test_each_head_drops_by_a_key_of_its_own(key):
    layer = eqx.nn.MultiheadAttention(2, 4, dropout_p=0.25, key=key)
    wide, x = inputs((3, 4), (5, 4), (5, 4))
    keys = jax.random.split(key, 2)
    kept = [np.asarray(jax.random.bernoulli(k, 0.75, (3, 5))) for k in keys]
    assert (kept[0] != kept[1]).any()
    expected = attended(layer, *wide, weights_to=lambda head, weights: weights * kept[head] / 0.75)
    np.testing.assert_allclose(layer(*x, key=key), expected, rtol=1e-4, atol=1e-5)
    plain = attended(layer, *wide)
    np.testing.assert_allclose(layer(*x, inference=True), plain, rtol=1e-4, atol=1e-5)
    resting = eqx.nn.MultiheadAttention(2, 4, dropout_p=0.25, inference=True, key=key)
    np.testing.assert_allclose(resting(*x, key=key), plain, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="Dropout: a call that drops needs a key"):
        layer(*x)


def test_a_projection_can_be_any_module_of_vectors(key):
    layer = eqx.nn.MultiheadAttention(2, 4, key=key)
    mlp = eqx.nn.MLP(4, 4, 3, 1, key=key)
    swapped = eqx.tree_at(lambda layer: (layer.query_proj, layer.output_proj), layer, (mlp, eqx.nn.Identity()))
    (_, x) = inputs((3, 4))
    same = eqx.tree_at(
        lambda layer: (layer.query_proj.weight, layer.output_proj.weight), layer, (jnp.eye(4), jnp.eye(4))
    )
    q = jnp.stack([mlp(row) for row in x[0]])
    np.testing.assert_allclose(swapped(x[0], x[0], x[0]), same(q, x[0], x[0]), rtol=1e-4, atol=1e-5)


def test_the_functions_alone():
    wide, (q, k, v) = inputs((3, 4), (5, 4), (5, 2))
    weights = softmax(wide[0] @ wide[1].T / 2)
    np.testing.assert_allclose(dot_product_attention_weights(q, k), weights, rtol=1e-4)
    np.testing.assert_allclose(dot_product_attention(q, k, v), weights @ wide[2], rtol=1e-4, atol=1e-5)
    mask = np.tri(3, 5, dtype=bool)
    masked = softmax(np.where(mask, wide[0] @ wide[1].T / 2, -np.inf))
    np.testing.assert_allclose(dot_product_attention_weights(q, k, jnp.asarray(mask)), masked, rtol=1e-4)
    seen = []

    def dropout(weights, *, key, inference):
        seen.append((key, inference))
        return 2 * weights

    got = dot_product_attention(q, k, v, jnp.asarray(mask), dropout, key=7, inference=True)
    np.testing.assert_allclose(got, 2 * masked @ wide[2], rtol=1e-4, atol=1e-5)
    assert seen == [(7, True)]


def test_sequences_that_do_not_fit(key):
    layer = eqx.nn.MultiheadAttention(2, 4, key=key)
    x, y = jnp.ones((3, 4)), jnp.ones((5, 4))
    with pytest.raises(ValueError) as error:
        layer(x, y, x)
    assert str(error.value) == (
        "MultiheadAttention: query, key and value aren't sequences, the last two of equal length.\n"
        "  got:      query float32[3, 4], key float32[5, 4], value float32[3, 4]\n"
        "  expected: [targets, query_size], [sources, key_size], [sources, value_size]"
    )
    with pytest.raises(ValueError) as error:
        layer(x[None], y[None], y[None])
    assert error.value.fixes == ["jax.vmap(attention)(query, key, value), for a batch"]


def test_masks_that_do_not_fit(key):
    layer = eqx.nn.MultiheadAttention(2, 4, key=key)
    x, y = jnp.ones((3, 4)), jnp.ones((5, 4))
    with pytest.raises(ValueError) as error:
        layer(x, y, y, jnp.ones((3, 5), bool))
    assert str(error.value) == (
        "MultiheadAttention: the mask isn't of shape [num_heads, targets, sources].\n"
        "  got:      bool[3, 5]\n"
        "  expected: [2, 3, 5]\n"
        "  fix:      jnp.broadcast_to(mask, (2, 3, 5))"
    )
    with pytest.raises(ValueError) as error:
        dot_product_attention(x, y, y, jnp.ones((5, 3), bool))
    assert str(error.value) == (
        "dot_product_attention: the mask isn't of shape [targets, sources].\n  got:      bool[5, 3]\n  expected: [3, 5]"
    )
