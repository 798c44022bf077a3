# SPDX-License-Identifier: Apache-2.0
"""MultiHeadAttention beside float64 NumPy, head by head; masks, groups, dropout, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn._attention import MultiHeadAttention
from tether.nn._rotary import RotaryEmbedding

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def affine(linear, x):
    y = x @ np.asarray(linear.weight, np.float64).T
    return y if linear.bias is None else y + np.asarray(linear.bias, np.float64)


def oracle(layer, x, source=None, value=None, mask=True):
    """One head after the other, in float64; mask has all its axes: batch, heads, targets, sources."""
    x = np.asarray(x, np.float64)
    source = x if source is None else np.asarray(source, np.float64)
    value = source if value is None else np.asarray(value, np.float64)
    size, group = layer.head_dim, layer.num_heads // layer.num_kv_heads
    q, k, v = affine(layer.query_proj, x), affine(layer.key_proj, source), affine(layer.value_proj, value)
    mask = np.broadcast_to(mask, (*x.shape[:-2], layer.num_heads, x.shape[-2], source.shape[-2]))
    outputs = []
    for head in range(layer.num_heads):
        own, shared = (slice(n * size, (n + 1) * size) for n in (head, head // group))
        logits = q[..., own] @ np.swapaxes(k[..., shared], -1, -2) / np.sqrt(size)
        e = np.where(mask[..., head, :, :], np.exp(logits), 0)
        total = e.sum(-1, keepdims=True)
        outputs.append(e / np.where(total == 0, 1, total) @ v[..., shared])
    return affine(layer.out_proj, np.concatenate(outputs, -1))


@tether.jit
def run(layer, *inputs, mask=None):
    return layer(*inputs, mask=mask)


def close(got, wanted, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, ()),
        ({}, (2, 3)),
        ({"num_kv_heads": 2}, (2,)),
        ({"num_kv_heads": 1, "head_dim": 3}, (2,)),
        ({"use_bias": False}, (2,)),
        ({"use_bias": ("query", "value")}, (2,)),
    ],
    ids=str,
)
def test_self_attention(options, batch: tuple[int, ...], key: jax.Array):
    layer = MultiHeadAttention(8, 4, key=key, **options)
    x = normal(*batch, 5, 8)
    close(run(layer, x), oracle(layer, x))
    causal = MultiHeadAttention(8, 4, key=key, causal=True, **options)
    close(run(causal, x), oracle(causal, x, mask=np.tri(5, dtype=bool)))


def test_cross_attention(key: jax.Array):
    layer = MultiHeadAttention(8, 2, key_size=6, value_size=5, key=key)
    x, keys, values = normal(2, 4, 8), normal(2, 7, 6), normal(2, 7, 5)
    close(run(layer, x, keys, values), oracle(layer, x, keys, values))
    both = MultiHeadAttention(8, 2, key_size=6, key=key)
    assert both.value_proj.in_features == 6
    close(run(both, x, keys), oracle(both, x, keys))
    same = MultiHeadAttention(8, 2, key=key)
    close(same(x, value=x + 1), oracle(same, x, x, x + 1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(5, 5), (1, 5), (2, 3, 5, 5), (2, 1, 1, 5), (1, 3, 5, 5), (2, 3, 4, 5, 5), (1, 1, 4, 5, 1), (2, 3, 1, 1, 5)],
    ids=str,
)
def test_masks(shape: tuple[int, ...], causal: bool, key: jax.Array):
    layer = MultiHeadAttention(8, 4, num_kv_heads=2, causal=causal, key=key)
    x, mask = normal(2, 3, 5, 8), RNG.random(shape) < 0.6
    full = mask if mask.ndim == 5 else mask[..., None, :, :]
    close(run(layer, x, mask=mask), oracle(layer, x, mask=full & (np.tri(5, dtype=bool) if causal else True)))


@pytest.mark.parametrize("wide", [False, True])
def test_target_that_sees_nothing_gives_zeros_and_no_gradient(wide: bool, key: jax.Array):
    with jax.enable_x64(wide):
        layer = MultiHeadAttention(8, 2, key=key)
        x = jnp.asarray(normal(2, 4, 8), jnp.float64 if wide else jnp.float32)
        mask = np.ones((2, 4, 4), bool)
        mask[0, 1], mask[1] = False, False
        y = np.asarray(run(layer, x, mask=mask))
        close(y[0, 1], layer.out_proj.bias)
        close(y[1], np.broadcast_to(layer.out_proj.bias, (4, 8)))
        close(y, oracle(layer, x, mask=mask[:, None]))
        of_layer, of_x = tether.jit(tether.grad(lambda layer, x: layer(x, mask=mask).sum(), argnums=(0, 1)))(layer, x)
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((of_layer, of_x)))
        np.testing.assert_array_equal(of_x[1], np.zeros((4, 8)))
        assert float(abs(of_x[0]).max()) > 1e-3


def test_far_logits(key: jax.Array):
    """exp of these overflows."""
    layer = MultiHeadAttention(4, 1, key=key, use_bias=False)
    layer.query_proj.weight = layer.key_proj.weight = 40 * jnp.eye(4)
    for dtype in (np.float32, np.float64):
        x = np.eye(2, 4, dtype=dtype)
        with jax.enable_x64(dtype == np.float64):
            close(layer(x), affine(layer.out_proj, affine(layer.value_proj, np.asarray(x, np.float64))))


def test_float64_is_computed_in_float64(key: jax.Array):
    """JAX's own function rounds the softmax to float32, whatever it is given."""
    layer = MultiHeadAttention(8, 4, num_kv_heads=2, causal=True, key=key)
    x, mask = RNG.normal(size=(2, 5, 8)), RNG.random((2, 5, 5)) < 0.6
    with jax.enable_x64(True):
        y = run(layer, x, mask=mask)
        assert y.dtype == jnp.float64
        close(y, oracle(layer, x, mask=mask[:, None] & np.tri(5, dtype=bool)), 1e-12)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_softmax_of_narrow_dtypes_is_float32(dtype, dropout: float, key: jax.Array):
    """A thousand equal weights: added up in bfloat16 they stop at 256, in float16 each is off by 2e-4."""
    layer = MultiHeadAttention(2, 1, dropout=dropout, key=key)
    layer.value_proj.weight, layer.value_proj.bias = jnp.zeros((2, 2)), jnp.ones(2)
    layer.out_proj.weight, layer.out_proj.bias = jnp.eye(2), jnp.zeros(2)
    y = run(layer, jnp.zeros((1000, 2), dtype))
    assert y.dtype == dtype
    close(y, np.ones((1000, 2)), 4e-3)


def test_inputs_of_two_dtypes_give_that_of_x(key: jax.Array):
    layer = MultiHeadAttention(4, 2, key=key)
    x, memory = normal(3, 4), normal(5, 4)
    y = layer(x.astype(np.float16), memory)
    assert y.dtype == jnp.float16
    close(y, oracle(layer, x, memory), 1e-2)
    assert layer(np.ones((3, 4), np.int32)).dtype == jnp.float32


def test_norms_and_rotary_act_on_each_head(key: jax.Array):
    rotary, norms = RotaryEmbedding(4, layout="interleaved"), [nn.LayerNorm(4, use_bias=False) for _ in range(2)]
    layer = MultiHeadAttention(8, 2, rotary=rotary, query_norm=norms[0], key_norm=norms[1], key=key)
    norms[0].weight, norms[1].weight = jnp.asarray([1.0, 2.0, 3.0, 4.0]), jnp.asarray([2.0, 1.0, 0.5, 1.0])
    x = normal(6, 8)
    q, k, v = (affine(p, x).reshape(6, 2, 4) for p in (layer.query_proj, layer.key_proj, layer.value_proj))
    turn = np.exp(1j * np.arange(6)[:, None, None] * np.asarray([1.0, 0.01]))

    def prepared(h, weight):
        h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5) * np.asarray(weight)
        z = (h[..., ::2] + 1j * h[..., 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(h.shape)

    q, k = prepared(q, norms[0].weight), prepared(k, norms[1].weight)
    e = np.exp(np.einsum("thd,shd->hts", q, k) / 2)
    y = np.einsum("hts,shd->thd", e / e.sum(-1, keepdims=True), v).reshape(6, 8)
    close(run(layer, x), affine(layer.out_proj, y), 1e-4)


def test_gradients_agree_with_float64_differences(key: jax.Array):
    layer = MultiHeadAttention(8, 4, num_kv_heads=2, causal=True, rotary=RotaryEmbedding(2), dropout=0.3, key=key)
    x, c, direction = (RNG.normal(size=(2, 3, 8)) for _ in range(3))
    with jax.enable_x64(True):
        drawn = jax.random.key(7)
        loss = tether.jit(lambda x: (jnp.asarray(c) * layer(x, key=drawn)).sum())
        slope = (loss(x + 1e-6 * direction) - loss(x - 1e-6 * direction)) / 2e-6
        assert float((tether.jit(tether.grad(loss))(jnp.asarray(x)) * direction).sum()) == pytest.approx(
            float(slope), rel=1e-6
        )


class TestDropout:
    def test_weights_are_dropped_and_scaled(self, key: jax.Array):
        """With equal weights and v = 1, each head gives the number of kept sources / (n (1 - p))."""
        layer = MultiHeadAttention(4, 2, dropout=0.25, key=key)
        layer.query_proj.weight, layer.query_proj.bias = jnp.zeros((4, 4)), jnp.zeros(4)
        layer.value_proj.weight, layer.value_proj.bias = jnp.zeros((4, 4)), jnp.ones(4)
        layer.out_proj.weight, layer.out_proj.bias = jnp.eye(4), jnp.zeros(4)
        y = np.asarray(layer(jnp.ones((200, 8, 4)), key=key))
        np.testing.assert_array_equal(y[..., 0], y[..., 1])
        assert (y[..., 0] != y[..., 2]).mean() > 0.5  # each head draws for itself
        kept = y * 8 * 0.75
        np.testing.assert_allclose(kept, kept.round(), atol=1e-5)
        assert kept.mean() / 8 == pytest.approx(0.75, abs=0.01)

    def test_evaluation_drops_nothing_and_one_key_gives_one_mask(self, key: jax.Array):
        layer, x = MultiHeadAttention(8, 2, dropout=0.5, key=key), normal(3, 5, 8)
        close(layer(x, training=False), oracle(layer, x))
        np.testing.assert_array_equal(layer(x, key=key), layer(x, key=key))
        assert float(abs(layer(x) - layer(x)).max()) > 1e-3
        assert tether.view(layer, p=0.0).dropout.p == 0
        close(tether.view(layer, p=0.0)(x), oracle(layer, x))

    def test_almost_no_dropout_is_no_dropout(self, key: jax.Array):
        """The arithmetic of its own agrees with JAX's, masks and groups included."""
        x, mask = normal(2, 5, 8), RNG.random((2, 4, 5, 5)) < 0.6
        plain = MultiHeadAttention(8, 4, num_kv_heads=2, causal=True, key=key)
        dropping = MultiHeadAttention(8, 4, num_kv_heads=2, causal=True, dropout=1e-9, key=key)
        close(run(dropping, x, mask=mask), run(plain, x, mask=mask), 1e-6)

    def test_a_shared_model_under_vmap_draws_for_each_lane(self, key: jax.Array):
        layer = MultiHeadAttention(4, 2, dropout=0.5, key=key)
        y = tether.vmap(layer)(jnp.ones((3, 5, 4)))
        assert float(abs(y[0] - y[1]).max()) > 1e-3


def test_parameters(key: jax.Array):
    layer = MultiHeadAttention(8, 4, num_kv_heads=2, head_dim=3, key_size=5, value_size=6, use_bias=["out"], key=key)
    assert {path: variable.value.shape for path, variable in tether.variables(layer).items()} == {
        "query_proj.weight": (12, 8),
        "key_proj.weight": (6, 5),
        "value_proj.weight": (6, 6),
        "out_proj.weight": (8, 12),
        "out_proj.bias": (8,),
    }
    layer = MultiHeadAttention(
        4, 2, key=key, dtype=jnp.bfloat16, weight_init=nn.init.ones, bias_init=nn.init.constant(2)
    )
    assert {variable.value.dtype for variable in tether.variables(layer).values()} == {jnp.dtype(jnp.bfloat16)}
    assert layer.key_proj.weight.tolist() == [[1] * 4] * 4 and layer.out_proj.bias.tolist() == [2] * 4
    weights = [MultiHeadAttention(64, 2, key=key).query_proj.weight, MultiHeadAttention(64, 2, key=key).key_proj.weight]
    assert float(abs(weights[0]).max()) == pytest.approx(1 / 8, rel=0.01)
    assert float(abs(weights[0] - weights[1]).max()) > 0.1  # not one key for all


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 10}, "MultiHeadAttention: num_heads doesn't divide embed_dim."),
        ({"num_kv_heads": 3}, "MultiHeadAttention: num_kv_heads doesn't divide num_heads."),
        ({"num_kv_heads": 8}, "MultiHeadAttention: num_kv_heads doesn't divide num_heads."),
        ({"num_heads": 0}, "MultiHeadAttention: num_heads is not an integer of at least 1."),
        ({"num_kv_heads": 0}, "MultiHeadAttention: num_kv_heads is not an integer of at least 1."),
        ({"head_dim": -1}, "MultiHeadAttention: head_dim is not an integer of at least 1."),
        ({"key_size": 2.5}, "MultiHeadAttention: key_size is not an integer of at least 1."),
        ({"dropout": 1.5}, "Dropout: p, the probability to drop, is not in [0, 1]."),
        ({"dtype": jnp.int32}, "Linear: dtype is not a floating dtype."),
        ({"rotary": RotaryEmbedding(4)}, "MultiHeadAttention: rotary is not made for the size of a head, 2."),
        ({"rotary": True}, "MultiHeadAttention: rotary is not made for the size of a head, 2."),
        ({"use_bias": "query"}, "MultiHeadAttention: use_bias names something that is no projection."),
        ({"use_bias": ["q"]}, "MultiHeadAttention: use_bias names something that is no projection."),
    ],
)
def test_wrong_options(options, message: str):
    with pytest.raises(ArgumentError) as caught:
        MultiHeadAttention(**{"embed_dim": 8, "num_heads": 4} | options)
    assert caught.value.what == message
    assert caught.value.got and caught.value.expected and caught.value.fixes


def test_sizes_that_do_not_divide_say_what_to_do():
    with pytest.raises(ArgumentError) as caught:
        MultiHeadAttention(10, 4)
    assert str(caught.value) == (
        "MultiHeadAttention: num_heads doesn't divide embed_dim.\n"
        "  got:      embed_dim=10, num_heads=4\n"
        "  expected: a divisor, or a head_dim\n"
        "  fix:      one of\n"
        "    1. num_heads=2\n"
        "    2. head_dim=2"
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(8,)], "x doesn't end in a length and 8 features."),
        ([(3, 6)], "x doesn't end in a length and 8 features."),
        ([(3, 8), (3, 6)], "key_value doesn't end in a length and 8 features."),
        ([(3, 8), (3, 8), (3, 7)], "value doesn't end in a length and 8 features."),
        ([(2, 3, 8), (3, 8)], "the inputs differ in their batch axes, or keys and values in their number."),
        ([(2, 3, 8), (1, 3, 8)], "the inputs differ in their batch axes, or keys and values in their number."),
        ([(3, 8), (4, 8), (5, 8)], "the inputs differ in their batch axes, or keys and values in their number."),
        ([(3, 8), (4, 8), (1, 8)], "the inputs differ in their batch axes, or keys and values in their number."),
    ],
)
def test_wrong_inputs(shapes, message: str, key: jax.Array):
    with pytest.raises(ShapeError) as caught:
        MultiHeadAttention(8, 2, key=key)(*map(jnp.ones, shapes))
    assert caught.value.what == f"MultiHeadAttention: {message}"
    assert caught.value.got and caught.value.expected and caught.value.fixes


def test_causal_needs_as_many_sources_as_targets(key: jax.Array):
    with pytest.raises(ShapeError, match="causal attention needs as many sources as targets") as caught:
        MultiHeadAttention(8, 2, causal=True, key=key)(jnp.ones((3, 8)), jnp.ones((4, 8)))
    assert caught.value.got == "x float32[3, 8], key_value float32[4, 8]"


@pytest.mark.parametrize(
    "shape",
    [(4,), (4, 5), (5, 4), (2, 4, 4), (3, 2, 4, 4), (2, 4, 1), (2, 3, 4, 1, 1), (2, 3, 4, 3), (2, 3, 2, 4, 5), ()],
    ids=str,
)
def test_mask_of_a_wrong_shape(shape: tuple[int, ...], key: jax.Array):
    with pytest.raises(ShapeError) as caught:
        MultiHeadAttention(8, 2, key=key)(jnp.ones((2, 3, 4, 8)), mask=jnp.ones(shape, bool))
    assert caught.value.what == "MultiHeadAttention: mask doesn't fit the targets and sources."
    assert caught.value.expected == ("[4, 4] or [2, 3, 4, 4] or [2, 3, 2, 4, 4], any axis 1 where it is shared")


@pytest.mark.parametrize("mask", [np.zeros((4, 4), np.float32), np.ones((4, 4), np.int32), [[True] * 4] * 4], ids=repr)
def test_mask_is_an_array_of_bools(mask, key: jax.Array):
    with pytest.raises(DtypeError, match="MultiHeadAttention: (mask is not of bools|the input is not an array)"):
        MultiHeadAttention(8, 2, key=key)(jnp.ones((4, 8)), mask=mask)


def test_complex_numbers_are_refused(key: jax.Array):
    with pytest.raises(DtypeError, match="MultiHeadAttention: complex numbers"):
        MultiHeadAttention(8, 2, key=key)(jnp.ones((4, 8), jnp.complex64))
