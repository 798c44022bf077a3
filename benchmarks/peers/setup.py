# SPDX-License-Identifier: Apache-2.0
"""What the training steps have in common: sizes, data, loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

CLASSES = 10
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 4, 256, 4, 128, 1024
HIDDEN, FEATURES, STEPS = 128, 128, 100


def data(name: str) -> tuple[jax.Array, jax.Array]:
    """Random inputs and labels, the same for all."""
    rng = np.random.default_rng(0)
    if name == "GPT-2":
        ids = rng.integers(0, VOCABULARY, (4, LENGTH + 1)).astype(np.int32)
        return jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:])
    shape = (8, 3, 64, 64) if name == "ResNet-18" else (8, STEPS, FEATURES)
    x = rng.normal(size=shape).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.integers(0, CLASSES, 8).astype(np.int32))


def loss(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
