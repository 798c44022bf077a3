# SPDX-License-Identifier: Apache-2.0
"""The cache of attention: a text in pieces gives what the whole gives, under every transformation, and past the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn._attention import MultiHeadAttention
from tether.nn._cache import KVCache
from tether.nn._rotary import RotaryEmbedding

RNG = np.random.default_rng(0)
LENGTH = 6


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def close(got, wanted):
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def layer() -> MultiHeadAttention:
    return MultiHeadAttention(8, 4, num_kv_heads=2, causal=True, rotary=RotaryEmbedding(2), key=jax.random.key(0))


def whole(layer, x, xp=np):
    """The causal pass over the whole text, written out; in NumPy it is float64."""
    x = np.asarray(x, np.float64) if xp is np else x

    def affine(linear, x):
        return x @ xp.asarray(linear.weight).T + xp.broadcast_to(
            xp.asarray(linear.bias), (*x.shape[:-1], len(linear.bias))
        )

    def turned(h):
        z = h.reshape(*x.shape[:-1], -1, 2)
        t = xp.arange(x.shape[-2], dtype=x.dtype)
        t = xp.broadcast_to(t.reshape((*[1] * (x.ndim - 2), -1, 1)), z.shape[:-1])
        cos, sin = xp.cos(t), xp.sin(t)
        return xp.stack([z[..., 0] * cos - z[..., 1] * sin, z[..., 0] * sin + z[..., 1] * cos], -1)

    q, k = turned(affine(layer.query_proj, x)), turned(affine(layer.key_proj, x))
    v = affine(layer.value_proj, x).reshape(k.shape)
    k, v = (xp.repeat(h, 2, -2) for h in (k, v))
    e = xp.exp(xp.einsum("...thd,...shd->...hts", q, k) / 2**0.5)
    e = e * xp.broadcast_to(xp.tri(x.shape[-2], dtype=x.dtype), e.shape)
    y = xp.einsum("...hts,...shd->...thd", e / e.sum(-1, keepdims=True), v)
    return affine(layer.out_proj, y.reshape(x.shape))


@tether.jit
def run(layer, x, cache):
    return layer(x, cache=cache)


def test_eager_steps(layer):
    x, cache = normal(2, 3, 8), layer.init_cache(2, 3)
    close(np.concatenate([layer(x[:, i : i + 1], cache=cache) for i in range(3)], 1), whole(layer, x))


@pytest.mark.parametrize("pieces", [[1] * 6, [6], [3, 1, 2], [1, 5]], ids=str)
def test_pieces_give_what_the_whole_gives(layer, pieces: list[int]):
    x, cache = normal(3, LENGTH, 8), layer.init_cache(3, LENGTH)
    parts = jnp.split(x, np.cumsum(pieces)[:-1], axis=1)
    close(np.concatenate([run(layer, part, cache) for part in parts], 1), whole(layer, x))
    assert cache.lengths.tolist() == [LENGTH] * 3
    assert cache.lengths.dtype == jnp.int32


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_any_batch_axes(layer, batch: tuple[int, ...]):
    x, cache = normal(*batch, 4, 8), layer.init_cache(batch, 5)
    y = [run(layer, part, cache) for part in jnp.split(x, [3], axis=-2)]
    close(np.concatenate(y, -2), whole(layer, x))
    assert cache.k.shape == (*batch, 5, 2, 2) and cache.lengths.shape == batch


def test_one_program_for_all_positions_that_writes_in_place(layer):
    """Donated, the buffer stays where it is in memory: no step copies the history."""
    x, cache = normal(2, 40, 8), layer.init_cache(2, 40)
    step = tether.jit(lambda x: layer(x, cache=cache), donate_state=True)
    places, outputs = set(), []
    for i in range(40):
        outputs.append(step(x[:, i : i + 1]))
        places.add((cache.k.unsafe_buffer_pointer(), cache.v.unsafe_buffer_pointer()))
    assert step.traces == 1
    assert len(places - {min(places, key=str)}) <= 1  # the first call is not donated
    close(jnp.concatenate(outputs, 1), whole(layer, x))


def test_scan_carries_the_cache(layer):
    x, cache = normal(3, LENGTH, 8), layer.init_cache(3, LENGTH)
    steps = jnp.moveaxis(x, 1, 0)[:, :, None]

    @tether.jit(donate_state=True)
    def run(steps):
        return tether.scan(lambda carry, x: (carry, layer(x, cache=cache)), None, steps)[1]

    for _ in range(2):
        y = run(steps)
        close(jnp.moveaxis(y[:, :, 0], 0, 1), whole(layer, x))
        cache.reset()


def test_vmap_over_caches(layer):
    x, caches = normal(3, 4, 8), tether.stack([layer.init_cache((), 5) for _ in range(3)])
    step = tether.jit(tether.vmap(lambda cache, x: layer(x, cache=cache)))
    y = [step(caches, x[:, i : i + 2]) for i in (0, 2)]
    close(jnp.concatenate(y, 1), whole(layer, x))
    assert caches.lengths.tolist() == [4, 4, 4]


def test_cache_made_within_a_function(layer):
    x = normal(3, 4, 8)

    @tether.jit
    def within(x):
        cache = layer.init_cache(3, 4)
        return jnp.concatenate([layer(x[:, :2], cache=cache), layer(x[:, 2:], cache=cache)], 1)

    close(within(x), whole(layer, x))


def test_gradient_through_the_cache(layer):
    x, c, cache = normal(2, 4, 8), normal(2, 4, 8), layer.init_cache(2, 4)

    def loss(layer, x):
        parts = [layer(part, cache=cache) for part in jnp.split(x, [1, 2], axis=1)]
        return (c * jnp.concatenate(parts, 1)).sum()

    got = tether.jit(tether.grad(loss, argnums=(0, 1)))(layer, x)
    wanted = jax.jit(jax.grad(lambda layer, x: (c * whole(layer, x, jnp)).sum(), argnums=(0, 1)))(layer, x)
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        close(mine, right)


def test_prompts_of_different_lengths(layer):
    """Padded on the right and run together, each row goes on as if it were alone."""
    lengths, x, after = [2, 4, 1], normal(3, 4, 8), normal(3, 2, 8)
    cache = layer.init_cache(3, 6)
    prompt = run(layer, x, cache)
    cache.lengths = jnp.asarray(lengths)
    y = np.concatenate([run(layer, after[:, :1], cache), run(layer, after[:, 1:], cache)], 1)
    for row, length in enumerate(lengths):
        alone = whole(layer, np.concatenate([x[row, :length], after[row]]))
        close(prompt[row, :length], alone[:length])
        close(y[row], alone[length:])


def test_mask_hides_places_of_the_cache(layer):
    """Padding on the left, hidden: the rows give what they give without it, up to the positions, which count it."""
    plain = MultiHeadAttention(8, 2, causal=True, key=jax.random.key(1))
    x, cache = normal(2, 5, 8), plain.init_cache(2, 7)
    valid = np.ones((2, 1, 7), bool)
    valid[1, :, :2] = False
    y = [plain(part, cache=cache, mask=valid) for part in jnp.split(x, [3], axis=1)]
    y = jnp.concatenate(y, 1)
    close(y[0], plain(x[0]))
    close(y[1, 2:], plain(x[1, 2:]))
    close(y[1, :2], jnp.broadcast_to(plain.out_proj.bias, (2, 8)))  # these see nothing


class TestReset:
    def test_some_rows_begin_anew(self, layer):
        x, y, cache = normal(3, 3, 8), normal(3, 2, 8), layer.init_cache(3, LENGTH)
        run(layer, x, cache)
        cache.reset(np.asarray([False, True, False]))
        assert cache.lengths.tolist() == [3, 0, 3]
        out = run(layer, y, cache)
        close(out[1], whole(layer, y[1]))
        close(out[0], whole(layer, np.concatenate([x[0], y[0]]))[3:])
        cache.reset()
        close(run(layer, x, cache), whole(layer, x))

    def test_under_jit(self, layer):
        cache = layer.init_cache(2, LENGTH)
        run(layer, normal(2, 3, 8), cache)
        tether.jit(lambda rows: cache.reset(rows))(jnp.asarray([True, False]))
        assert cache.lengths.tolist() == [0, 3]

    def test_a_nan_is_forgotten(self, layer):
        x, cache = normal(2, 3, 8), layer.init_cache(2, LENGTH)
        assert np.isnan(run(layer, x.at[0].set(jnp.nan), cache)[0]).all()
        cache.reset()
        close(run(layer, x[:, :1], cache), whole(layer, x[:, :1]))

    @pytest.mark.parametrize("rows", [np.ones(2, np.int32), np.asarray([0])])
    def test_rows_are_bools(self, layer, rows):
        with pytest.raises(DtypeError) as caught:
            layer.init_cache(2, 4).reset(rows)
        assert str(caught.value).startswith("KVCache: rows to reset are not bools.\n  got:      int")
        assert caught.value.expected == "bool[2], True where a row begins anew"

    @pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)], ids=str)
    def test_rows_are_those_of_the_batch(self, layer, shape: tuple[int, ...]):
        with pytest.raises(ShapeError, match="KVCache: rows to reset don't have the shape of the batch"):
            layer.init_cache(2, 4).reset(np.ones(shape, bool))


class TestPastTheEnd:
    def test_eager_call_is_an_error_and_writes_nothing(self, layer):
        cache = layer.init_cache(2, 4)
        layer(normal(2, 3, 8), cache=cache)
        before = [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]
        with pytest.raises(ShapeError) as caught:
            layer(normal(2, 2, 8), cache=cache)
        assert str(caught.value) == (
            "KVCache: there is no room for the tokens.\n"
            "  at:       the module itself  (MultiHeadAttention)\n"
            "  got:      2 tokens after 3\n"
            "  expected: at most 4 in all\n"
            "  fix:      one of\n"
            "    1. cache.reset(), or cache.reset(rows), where a new text begins\n"
            "    2. length=5 or more"
        )
        for leaf, old in zip(jax.tree.leaves(cache), before, strict=True):
            np.testing.assert_array_equal(leaf, old)

    def test_traced_tokens_give_nan_until_reset(self, layer):
        x, cache = normal(2, 6, 8), layer.init_cache(2, 4)
        step = tether.jit(lambda x: layer(x, cache=cache))
        cache.lengths = jnp.asarray([0, 1])
        y = jnp.concatenate([step(x[:, :2]), step(x[:, 2:4]), step(x[:, 4:])], 1)
        np.testing.assert_array_equal(np.isnan(y).any(-1), np.isnan(y).all(-1))
        assert np.isnan(y).all(-1).tolist() == [[False] * 4 + [True] * 2, [False] * 3 + [True] * 3]
        close(y[0, :4], whole(layer, x[0, :4]))
        with pytest.raises(ShapeError, match="no room for the tokens"):
            layer(x[:, :1], cache=cache)
        cache.reset()
        close(step(x[:, :2]), whole(layer, x[:, :2]))

    def test_too_long_a_prompt_is_an_error_when_traced(self, layer):
        cache = layer.init_cache(2, 4)
        with pytest.raises(ShapeError, match="no room for the tokens") as caught:
            tether.jit(lambda x: layer(x, cache=cache))(normal(2, 5, 8))
        assert caught.value.got == "5 tokens"


class TestWrongCache:
    @pytest.mark.parametrize("batch", [3, 1, (), (2, 1)], ids=str)
    def test_of_another_batch(self, layer, batch):
        with pytest.raises(ShapeError) as caught:
            layer(normal(2, 1, 8), cache=layer.init_cache(batch, 4))
        assert caught.value.what == "KVCache: the cache was made for another batch."
        assert caught.value.got == "keys float32[2, 1, 2, 2]"

    def test_of_another_layer(self, layer):
        other = MultiHeadAttention(8, 4, causal=True, key=jax.random.key(0))
        with pytest.raises(ShapeError) as caught:
            layer(normal(2, 1, 8), cache=other.init_cache(2, 4))
        assert caught.value.what == "KVCache: the cache was made for other heads."
        assert caught.value.expected == "float32[2, tokens, 4, 2]"

    def test_of_another_dtype(self, layer):
        with pytest.raises(DtypeError) as caught:
            layer(normal(2, 1, 8).astype(jnp.bfloat16), cache=layer.init_cache(2, 4))
        assert caught.value.what == "KVCache: the cache holds another dtype than the keys have."
        assert caught.value.fixes == ["attention.init_cache(batch, length, dtype=jnp.bfloat16)"]

    def test_no_cache_at_all(self, layer):
        with pytest.raises(ArgumentError) as caught:
            layer(normal(2, 1, 8), cache={"k": 1})
        assert caught.value.what == "MultiHeadAttention: cache is not a cache."

    def test_of_cross_attention_or_without_causal(self, layer):
        x, cache = normal(2, 1, 8), layer.init_cache(2, 4)
        for call in (
            lambda: layer(x, x, cache=cache),
            lambda: layer(x, value=x, cache=cache),
            lambda: tether.view(layer, causal=False)(x, cache=cache),
        ):
            with pytest.raises(ArgumentError) as caught:
                call()
            assert caught.value.what == "MultiHeadAttention: a cache is for causal self attention."
        assert caught.value.got == "causal=False, x"

    def test_mask_is_of_the_places(self, layer):
        with pytest.raises(ShapeError, match="mask doesn't fit") as caught:
            layer(normal(2, 3, 8), cache=layer.init_cache(2, 4), mask=np.ones((3, 3), bool))
        assert caught.value.expected.startswith("[3, 4] or [2, 3, 4]")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_dtypes(layer, dtype):
    x, cache = normal(2, 4, 8), layer.init_cache(2, 4, dtype=dtype)
    step = tether.jit(lambda x: layer(x, cache=cache))
    y = jnp.concatenate([step(x.astype(dtype)[:, i : i + 1]) for i in range(4)], 1)
    assert y.dtype == cache.k.dtype == dtype
    np.testing.assert_allclose(y.astype(jnp.float32), whole(layer, x), atol=5e-2)


def test_dtype_is_that_of_the_computation(layer):
    assert layer.init_cache(1, 2).k.dtype == jnp.float32
    lowered = tether.view(layer, compute_dtype=jnp.bfloat16)
    cache = lowered.init_cache(2, 4)
    assert cache.v.dtype == jnp.bfloat16
    assert lowered(normal(2, 1, 8), cache=cache).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "KVCache: batch is not an integer of at least 1."),
        ((2, 0), "KVCache: length is not an integer of at least 1."),
        (((2, 2.5), 4), "KVCache: batch is not an integer of at least 1."),
        ((None, 4), "KVCache: batch is not an integer of at least 1."),
    ],
)
def test_wrong_sizes(layer, arguments, message: str):
    with pytest.raises(ArgumentError) as caught:
        layer.init_cache(*arguments)
    assert caught.value.what == message
    with pytest.raises(ArgumentError, match="KVCache: dtype is not a floating dtype"):
        KVCache(1, 2, 1, 2, dtype=jnp.int8)
