# SPDX-License-Identifier: Apache-2.0
"""What Tether is measured against: (Linear, BatchNorm, ReLU) x depth in plain JAX, parameters in nested dicts.

The arithmetic is that of the layers: batch statistics in two passes, running statistics that no NaN or infinity
enters, decay 0.9, eps 1e-5, Adam.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def make(depth: int, width: int, seed: int) -> tuple[Any, Any]:
    """Parameters and state of a model."""
    keys = jax.random.split(jax.random.key(seed), depth)
    bound = width**-0.5
    params = [
        {
            "weight": jax.random.uniform(key, (width, width), minval=-bound, maxval=bound),
            "bias": jnp.zeros(width),
            "scale": jnp.ones(width),
            "shift": jnp.zeros(width),
        }
        for key in keys
    ]
    state = [{"mean": jnp.zeros(width), "var": jnp.ones(width)} for _ in range(depth)]
    return params, state


def forward(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
    """The output and the new state."""
    new_state = []
    for p, s in zip(params, state, strict=True):
        h = x @ p["weight"].T + p["bias"]
        mean = h.mean(0)
        var = jnp.square(h - mean).mean(0)
        new_state.append(_moved(s, jax.lax.stop_gradient(mean), jax.lax.stop_gradient(var)))
        x = jax.nn.relu((h - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["shift"])
    return x, new_state


def _moved(state: Any, mean: Any, var: Any) -> Any:
    is_finite = jnp.isfinite(mean) & jnp.isfinite(var)
    return {
        "mean": jnp.where(is_finite, 0.9 * state["mean"] + 0.1 * mean, state["mean"]),
        "var": jnp.where(is_finite, 0.9 * state["var"] + 0.1 * var, state["var"]),
    }


def make_step(tx: optax.GradientTransformation) -> Any:
    """One training step: ``(params, state, opt_state, x, y) -> (params, state, opt_state, loss)``."""

    def loss(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        out, new_state = forward(params, state, x)
        return jnp.mean((out - y) ** 2), new_state

    def step(params: Any, state: Any, opt_state: Any, x: Any, y: Any) -> Any:
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, value

    return step
