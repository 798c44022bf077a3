# SPDX-License-Identifier: Apache-2.0
"""A training step written for another library, on Tether's home for its code, beside the same step in Tether."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

import tether
import tether.compat.objax as objax
from benchmarks.models import WIDTH, data, make_model, mean_squares


def objax_step(depth: int) -> Callable[[], Any]:
    """(Linear, BatchNorm0D, relu) x depth, mean squares, Adam, under ``objax.Jit``."""
    layers: list[Any] = []
    for _ in range(depth):
        layers += [objax.nn.Linear(WIDTH, WIDTH), objax.nn.BatchNorm0D(WIDTH), jax.nn.relu]
    model = objax.nn.Sequential(layers)
    adam = objax.optimizer.Adam(model.vars())
    gradient = objax.GradValues(lambda x, y: ((model(x, training=True) - y) ** 2).mean(), model.vars())

    def step(x: Any, y: Any) -> Any:
        gradients, values = gradient(x, y)
        adam(1e-3, gradients)
        return values[0]

    compiled = objax.Jit(step, model.vars() + adam.vars())
    x, y = data()
    return lambda: compiled(x, y)


def tether_step(depth: int) -> Callable[[], Any]:
    """The same in Tether's own words."""
    model = make_model(depth)
    optimizer = tether.Optimizer(model, optax.adam(1e-3))

    @tether.jit
    def step(x: Any, y: Any) -> Any:
        value, grads = tether.value_and_grad(mean_squares)(model, x, y)
        optimizer.update(grads)
        return value

    x, y = data()
    return lambda: step(x, y)
