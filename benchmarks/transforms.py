# SPDX-License-Identifier: Apache-2.0
"""What the other transformations cost beside hand-written JAX: a loop, an ensemble, a branch, a checkpoint.

Each pair is one compiled program; the first ratio is of running it, the second of tracing and lowering it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tether
from benchmarks import handwritten
from benchmarks.models import BATCH, WIDTH, make_model, mean_squares

DEPTH, TURNS, MEMBERS = 10, 100, 8

Pair = tuple[Callable[[], Any], Callable[[], Any]]  # makers of ``(function, arguments)``, Tether's and by hand


def _data(*shape: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.standard_normal((*shape, BATCH, WIDTH)), jnp.float32) for _ in range(2))


def scan_pair() -> Pair:
    """Training over 100 batches in one scan."""

    def ours() -> Any:
        model = make_model(DEPTH)
        optimizer = tether.Optimizer(model, optax.adam(1e-3))

        def turn(total: Any, batch: Any) -> Any:
            value, grads = tether.value_and_grad(mean_squares)(model, *batch)
            optimizer.update(grads)
            return total + value, None

        return tether.jit(lambda x, y: tether.scan(turn, 0.0, (x, y))[0]), _data(TURNS)

    def by_hand() -> Any:
        tx = optax.adam(1e-3)
        params, state = handwritten.make(DEPTH, WIDTH, 0)
        step = handwritten.make_step(tx)

        def turn(carry: Any, batch: Any) -> Any:
            *trained, total = carry
            *trained, value = step(*trained, *batch)
            return (*trained, total + value), None

        loop = jax.jit(lambda trained, x, y: jax.lax.scan(turn, (*trained, jnp.float32(0)), (x, y))[0])
        return _Held(loop, (params, state, tx.init(params))), _data(TURNS)

    return ours, by_hand


class _Held:
    """A compiled function of state and inputs, whose state is kept from call to call."""

    def __init__(self, function: Any, state: Any):
        self.function, self.state = function, state

    def __call__(self, *args: Any) -> Any:
        *state, out = self.function(self.state, *args)
        self.state = tuple(state)
        return out

    def lower(self, *args: Any) -> Any:
        return self.function.lower(self.state, *args)


def ensemble_pair() -> Pair:
    """A training step of eight models in one vmap."""

    def ours() -> Any:
        models = tether.stack([make_model(DEPTH, seed) for seed in range(MEMBERS)])
        optimizer = tether.Optimizer(models, optax.adam(1e-3))

        def step(x: Any, y: Any) -> Any:
            values, grads = tether.vmap(tether.value_and_grad(mean_squares))(models, x, y)
            optimizer.update(grads)
            return values.sum()

        return tether.jit(step), _data(MEMBERS)

    def by_hand() -> Any:
        tx = optax.adam(1e-3)
        made = [handwritten.make(DEPTH, WIDTH, seed) for seed in range(MEMBERS)]
        params, state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)

        def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
            out, state = handwritten.forward(params, state, x)
            return jnp.mean((out - y) ** 2), state

        def step(held: Any, x: Any, y: Any) -> Any:
            params, state, opt_state = held
            grad = jax.vmap(jax.value_and_grad(loss, has_aux=True))
            (values, state), grads = grad(params, state, x, y)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), state, opt_state, values.sum()

        return _Held(jax.jit(step), (params, state, tx.init(params))), _data(MEMBERS)

    return ours, by_hand


def cond_pair() -> Pair:
    """A training step in one branch; the other leaves everything as it is."""

    def ours() -> Any:
        model = make_model(DEPTH)
        optimizer = tether.Optimizer(model, optax.adam(1e-3))

        def train(x: Any, y: Any) -> Any:
            value, grads = tether.value_and_grad(mean_squares)(model, x, y)
            optimizer.update(grads)
            return value

        return tether.jit(lambda x, y: tether.cond(x[0, 0] < 9, train, lambda x, y: jnp.float32(0), x, y)), _data()

    def by_hand() -> Any:
        tx = optax.adam(1e-3)
        params, state = handwritten.make(DEPTH, WIDTH, 0)
        step = handwritten.make_step(tx)

        def branch(held: Any, x: Any, y: Any) -> Any:
            return jax.lax.cond(x[0, 0] < 9, lambda: step(*held, x, y), lambda: (*held, jnp.float32(0)))

        return _Held(jax.jit(branch), (params, state, tx.init(params))), _data()

    return ours, by_hand


def checkpoint_pair() -> Pair:
    """A training step whose forward pass is recomputed in the backward pass."""

    def ours() -> Any:
        model = make_model(DEPTH)
        optimizer = tether.Optimizer(model, optax.adam(1e-3))

        def step(x: Any, y: Any) -> Any:
            value, grads = tether.value_and_grad(tether.checkpoint(mean_squares))(model, x, y)
            optimizer.update(grads)
            return value

        return tether.jit(step), _data()

    def by_hand() -> Any:
        tx = optax.adam(1e-3)
        params, state = handwritten.make(DEPTH, WIDTH, 0)

        @jax.checkpoint
        def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
            out, new = handwritten.forward(params, state, x)
            return jnp.mean((out - y) ** 2), new

        def step(held: Any, x: Any, y: Any) -> Any:
            params, state, opt_state = held
            (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x, y)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), state, opt_state, value

        return _Held(jax.jit(step), (params, state, tx.init(params))), _data()

    return ours, by_hand


PAIRS: dict[str, tuple[Callable[[], Pair], int]] = {
    f"scan over {TURNS} training steps": (scan_pair, TURNS),
    f"vmap over {MEMBERS} models, a training step": (ensemble_pair, 1),
    "cond around a training step": (cond_pair, 1),
    "checkpoint, a training step": (checkpoint_pair, 1),
}


def tracing(pair: Pair, rounds: int) -> tuple[float, float, float]:
    """Microseconds to trace and lower each of the two, and the median of the ratios."""
    times: list[list[float]] = [[], []]
    for place in range(rounds):
        for which in (0, 1) if place % 2 else (1, 0):
            function, args = pair[which]()
            jax.clear_caches()
            gc.collect()
            start = time.perf_counter()
            function.lower(*args)
            times[which].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6, statistics.median(ratios)
