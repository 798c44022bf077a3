# SPDX-License-Identifier: Apache-2.0
"""The choice of the next token, against the probabilities by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tether.errors import ArgumentError
from tether.zoo._sampling import checked_temperature, next_token

LOGITS = np.asarray([0.5, 2.0, -1.0, 1.0], np.float32)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 2), (1.0, 4)])
def test_draws_have_the_probabilities(key: jax.Array, temperature: float, top_k: int | None):
    many = jnp.broadcast_to(jnp.asarray(LOGITS), (20_000, 4))
    tokens = next_token(many, key, temperature, greedy=False, top_k=top_k)
    assert tokens.shape == (20_000,) and tokens.dtype == jnp.int32
    weights = np.exp(LOGITS / temperature) * (np.argsort(np.argsort(-LOGITS)) < (top_k or 4))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20_000, weights / weights.sum(), atol=0.015)


def test_the_likeliest(key: jax.Array):
    tokens = next_token(jnp.asarray([LOGITS, -LOGITS], jnp.float16), key, 1.0, greedy=True)
    assert tokens.tolist() == [1, 2] and tokens.dtype == jnp.int32


@pytest.mark.parametrize("value", [-1.0, True, float("nan"), float("inf"), "1", None])
def test_temperature(value):
    assert checked_temperature("Model", 1) == 1.0
    with pytest.raises(ArgumentError, match=r"(?s)Model: temperature is not a number.*a float >= 0.*likeliest"):
        checked_temperature("Model", value)
