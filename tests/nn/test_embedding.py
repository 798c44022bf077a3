# SPDX-License-Identifier: Apache-2.0
"""Embedding: rows, and ids that have none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.int8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_values(shape: tuple[int, ...], dtype, key: jax.Array):
    embedding = nn.Embedding(7, 4, key=key)
    ids = np.random.default_rng(0).integers(0, 7, shape).astype(dtype)
    np.testing.assert_array_equal(embedding(ids), np.asarray(embedding.weight)[ids])
    np.testing.assert_array_equal(embedding(jnp.asarray(ids)), np.asarray(embedding.weight)[ids])


def test_first_values(key: jax.Array):
    weight = nn.Embedding(200, 50, key=key).weight
    assert weight.shape == (200, 50)
    assert float(weight.mean()) == pytest.approx(0, abs=0.03)
    assert float(weight.std()) == pytest.approx(1, abs=0.03)
    assert nn.Embedding(3, 2, key=key, dtype=jnp.bfloat16, weight_init=nn.init.ones).weight.tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("ids", [[0, 7], [-1], [2**31 + 1]], ids=str)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_eager_id_out_of_range_is_an_error(ids, kind, key: jax.Array):
    if ids[0] > 2**31 and kind is jnp.asarray:
        pytest.skip("not representable without x64")
    with pytest.raises(ArgumentError, match="Embedding: an id is outside the table") as caught:
        nn.Embedding(7, 4, key=key)(kind(ids))
    assert caught.value.expected == "ids from 0 to 6"
    assert f"from {min(ids)} to {max(ids)}" in caught.value.got


def test_traced_id_out_of_range_is_nan_without_gradient(key: jax.Array):
    embedding = nn.Embedding(7, 4, key=key)
    ids = jnp.asarray([0, 7, -1, 6])
    for mapped in (tether.jit(embedding), tether.vmap(embedding)):
        rows = np.asarray(mapped(ids))
        np.testing.assert_array_equal(rows[[0, 3]], np.asarray(embedding.weight)[[0, 6]])
        assert np.isnan(rows[[1, 2]]).all()
    grads = tether.jit(lambda ids: tether.grad(lambda e: e(ids).sum())(embedding))(ids)
    np.testing.assert_array_equal(grads.weight, np.isin(np.arange(7), [0, 6])[:, None] * np.ones((7, 4)))


@pytest.mark.parametrize("transformed", [tether.jit, jax.jit])
def test_ids_that_a_trace_closes_over_are_known(transformed, key: jax.Array):
    embedding, ids, wrong = nn.Embedding(7, 4, key=key), jnp.asarray([1, 6]), jnp.asarray([1, 7])
    rows = np.asarray(embedding.weight)[[1, 6]]
    np.testing.assert_array_equal(transformed(lambda: embedding(ids))(), rows)
    with pytest.raises(ArgumentError, match="an id is outside the table"):
        transformed(lambda: embedding(wrong))()


def test_gradient_of_a_repeated_id_adds_up(key: jax.Array):
    embedding = nn.Embedding(3, 2, key=key)
    grads = tether.grad(lambda e: e(jnp.asarray([1, 1, 2])).sum())(embedding)
    assert grads.weight.tolist() == [[0, 0], [2, 2], [1, 1]]


def test_compute_dtype(key: jax.Array):
    embedding = tether.view(nn.Embedding(3, 2, key=key), compute_dtype=jnp.bfloat16)
    assert embedding(jnp.asarray([0])).dtype == jnp.bfloat16
    assert embedding.weight.dtype == jnp.float32


@pytest.mark.parametrize("ids", [np.ones(3), np.ones(3, bool), jnp.ones(3)], ids=lambda ids: str(ids.dtype))
def test_ids_are_integers(ids, key: jax.Array):
    with pytest.raises(DtypeError) as caught:
        nn.Embedding(7, 4, key=key)(ids)
    assert caught.value.what == "Embedding: ids are not integers."
    assert caught.value.fixes[0] == "ids.astype(jnp.int32)"


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2.5, 4), (4, None)])
def test_sizes_are_counts(sizes):
    with pytest.raises(ArgumentError, match=r"Embedding: (num_embeddings|features) is not an integer"):
        nn.Embedding(*sizes)


class TestAttend:
    @pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4)], ids=str)
    def test_values(self, shape: tuple[int, ...], key: jax.Array):
        embedding = nn.Embedding(7, 4, key=key)
        h = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        np.testing.assert_allclose(embedding.attend(h), h @ np.asarray(embedding.weight).T, rtol=1e-5, atol=1e-5)

    def test_gradients_of_both_ends_add_up(self, key: jax.Array):
        embedding, ids = nn.Embedding(5, 3, key=key), jnp.asarray([1, 1, 4])
        c = jax.random.normal(key, (3, 5))
        grads = tether.grad(lambda e: (c * e.attend(e(ids))).sum())(embedding)
        table = np.asarray(embedding.weight)
        right = np.asarray(c).T @ table[ids]
        np.add.at(right, ids, np.asarray(c) @ table)
        np.testing.assert_allclose(grads.weight, right, rtol=1e-5, atol=1e-5)

    def test_dtypes(self, key: jax.Array):
        embedding = nn.Embedding(7, 4, key=key)
        assert embedding.attend(jnp.ones(4, jnp.bfloat16)).dtype == jnp.bfloat16
        assert embedding.attend(jnp.ones(4, jnp.int32)).dtype == jnp.float32
        assert tether.view(embedding, compute_dtype=jnp.float16).attend(jnp.ones(4)).dtype == jnp.float16

    @pytest.mark.parametrize("shape", [(7,), (4, 1), ()], ids=str)
    def test_last_axis_is_features(self, shape: tuple[int, ...], key: jax.Array):
        with pytest.raises(ShapeError) as caught:
            nn.Embedding(7, 4, key=key).attend(jnp.ones(shape))
        assert caught.value.what == "Embedding: the last axis of what attends is not features, 4."
        assert caught.value.expected == "[..., 4]"
        assert caught.value.fixes == ["nn.Linear(h.shape[-1], 4) before it"]
