# SPDX-License-Identifier: Apache-2.0
"""The model that is measured, and its data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether import nn

WIDTH, BATCH = 16, 16


def data() -> tuple[Any, Any]:
    """A batch of inputs and targets."""
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.standard_normal((BATCH, WIDTH)), jnp.float32) for _ in range(2))


def make_model(depth: int, seed: int = 0) -> nn.Sequential:
    """(Linear, BatchNorm, ReLU) x depth."""
    layers: list[Any] = []
    for key in jax.random.split(jax.random.key(seed), depth):
        layers += [nn.Linear(WIDTH, WIDTH, key=key), nn.BatchNorm(WIDTH), nn.Lambda(jax.nn.relu)]
    return nn.Sequential(layers)


def mean_squares(model: Any, x: Any, y: Any) -> Any:
    """The loss of both."""
    return jnp.mean((model(x) - y) ** 2)
