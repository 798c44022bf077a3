# SPDX-License-Identifier: Apache-2.0
"""The choice of the next token, by its logits."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tether.errors import ArgumentError, describe


def checked_temperature(name: str, temperature: float) -> float:
    """Reads what logits are divided by before a draw; 0 stands for the likeliest token."""
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ArgumentError(
            f"{name}: temperature is not a number of at least 0.",
            got=f"temperature={describe(temperature)}",
            expected="a float >= 0",
            fix="temperature=0.0 for the likeliest token, 1.0 for draws as the model has learned them",
        )
    return float(temperature)


def next_token(logits: jax.Array, key: Any, temperature: Any, *, greedy: bool, top_k: int | None = None) -> jax.Array:
    """The likeliest token, or one drawn: among the top_k likeliest, if that is given.

    Shapes:
        logits: float[..., vocab_size] -> int32[...]
    """
    if greedy:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    scaled = logits / temperature
    if top_k is not None:
        scaled = jnp.where(logits >= lax.top_k(logits, top_k)[0][..., -1:], scaled, -jnp.inf)
    return jax.random.categorical(key, scaled).astype(jnp.int32)
