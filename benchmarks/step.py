# SPDX-License-Identifier: Apache-2.0
"""What Tether costs beside hand-written JAX: training steps, first calls, flattening, eager calls.

Each row times the two in turn in one process, block by block, and gives the median of the paired ratios.
usage: python -m benchmarks.step [--quick]
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from rich.console import Console
from rich.table import Table

import tether
from benchmarks import handwritten, homes, transforms
from benchmarks.decoding import decoding
from benchmarks.models import WIDTH, data, make_model, mean_squares

_BLOCK = 0.03  # seconds of one timed block


def tether_step(depth: int, *, donate: bool, closure: bool) -> Callable[[], Any]:
    """One training step with Tether: a call of the result is a step."""
    model = make_model(depth)
    optimizer = tether.Optimizer(model, optax.adam(1e-3))
    x, y = data()

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = tether.value_and_grad(mean_squares)(model, x, y)
        optimizer.update(grads)
        return value

    if closure:
        closed = tether.jit(lambda x, y: step(model, optimizer, x, y), donate_state=donate)
        return lambda: closed(x, y)
    compiled = tether.jit(step, donate_state=donate)
    return lambda: compiled(model, optimizer, x, y)


def plain_step(depth: int, *, donate: bool) -> Callable[[], Any]:
    """The same step written by hand."""
    tx = optax.adam(1e-3)
    params, state = handwritten.make(depth, WIDTH, 0)
    held = [params, state, tx.init(params)]
    x, y = data()
    compiled = jax.jit(handwritten.make_step(tx), donate_argnums=(0, 1, 2) if donate else ())

    def step() -> Any:
        *held[:], value = compiled(*held, x, y)
        return value

    return step


def paired(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Median microseconds of one call of each, and the median of the ratios of neighbouring blocks."""
    calls = [_calls(first), _calls(second)]
    times: list[list[float]] = [[], []]
    for place in range(rounds):
        for which in (0, 1) if place % 2 else (1, 0):
            times[which].append(_block((first, second)[which], calls[which]))
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6, statistics.median(ratios)


def _calls(function: Callable[[], Any]) -> int:
    for _ in range(5):
        jax.block_until_ready(function())
    once = min(_block(function, 3) for _ in range(3))
    return max(1, round(_BLOCK / once))


def _block(function: Callable[[], Any], calls: int) -> float:
    out = None
    start = time.perf_counter()
    for _ in range(calls):
        out = function()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def per_turn(pair: transforms.Pair, turns: int, rounds: int) -> tuple[float, float, float]:
    """Two compiled programs, by the turn of their loop."""
    (ours, our_args), (theirs, their_args) = (make() for make in pair)
    first, second, ratio = paired(lambda: ours(*our_args), lambda: theirs(*their_args), rounds)
    return first / turns, second / turns, ratio


def first_calls(depth: int, rounds: int) -> tuple[float, float, float]:
    """Seconds from a new function to the end of its first call, compilation included."""
    times: list[list[float]] = [[], []]
    for place in range(rounds):
        makers = [lambda: tether_step(depth, donate=False, closure=False), lambda: plain_step(depth, donate=False)]
        for which in (0, 1) if place % 2 else (1, 0):
            jax.clear_caches()
            function = makers[which]()
            gc.collect()
            start = time.perf_counter()
            jax.block_until_ready(function())
            times[which].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6, statistics.median(ratios)


def flattening(rounds: int) -> tuple[float, float, float]:
    """A flatten of the model of 300 leaves, against ``jax.tree.leaves`` of the same arrays in nested dicts."""
    model = make_model(50)
    params, state = handwritten.make(50, WIDTH, 0)
    return paired(lambda: jax.tree.flatten(model)[0][0], lambda: jax.tree.leaves((params, state))[0], rounds)


def eager(depth: int, rounds: int) -> tuple[float, float, float]:
    """An eager forward call in training mode."""
    model = make_model(depth)
    params, state = handwritten.make(depth, WIDTH, 0)
    x, _ = data()
    return paired(lambda: model(x), lambda: handwritten.forward(params, state, x), rounds)


def eager_evaluation(depth: int, rounds: int) -> tuple[float, float, float]:
    """An eager forward call in evaluation mode, the normalisation by running statistics written by hand."""
    model = make_model(depth).eval()
    params, state = handwritten.make(depth, WIDTH, 0)
    x, _ = data()

    def plain() -> Any:
        h = x
        for p, s in zip(params, state, strict=True):
            h = h @ p["weight"].T + p["bias"]
            h = jax.nn.relu((h - s["mean"]) * jax.lax.rsqrt(s["var"] + 1e-5) * p["scale"] + p["shift"])
        return h

    return paired(lambda: model(x), plain, rounds)


def fresh_models(depth: int, count: int) -> tuple[int, int]:
    """Traces and compilations of one step that meets many new models of one structure."""
    compiled: list[str] = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    models = [make_model(depth, seed) for seed in range(count)]
    optimizers = [tether.Optimizer(model, optax.adam(1e-3)) for model in models]
    x, y = data()

    @tether.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = tether.value_and_grad(mean_squares)(model, x, y)
        optimizer.update(grads)
        return value

    jax.monitoring.register_event_duration_secs_listener(listen)
    for model, optimizer in zip(models, optimizers, strict=True):
        jax.block_until_ready(step(model, optimizer, x, y))
    return step.traces, len(compiled)


def main() -> None:
    """Measures all rows and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and depths 10 and 50 alone")
    parser.add_argument("--only", default="", help="measure the rows alone whose name contains this")
    options = parser.parse_args()
    rounds = 21 if options.quick else 61
    depths = (10, 50) if options.quick else (10, 50, 200)
    rows: list[tuple[str, str, Callable[[], tuple[float, float, float]]]] = []
    for depth in depths:
        for donate in (False, True):
            for closure in (False, True):
                name = (
                    f"step, L={depth}, {'donated' if donate else 'not donated'}, {'closure' if closure else 'argument'}"
                )
                make = lambda depth=depth, donate=donate, closure=closure: paired(
                    tether_step(depth, donate=donate, closure=closure), plain_step(depth, donate=donate), rounds
                )
                rows.append((name, "1.10", make))
    rows.append(("first call, L=10", "1.25", lambda: first_calls(10, 3 if options.quick else 5)))
    rows.append(("first call, L=50", "1.25", lambda: first_calls(50, 1 if options.quick else 3)))
    rows.append(("flatten, 300 leaves", "1.00", lambda: flattening(rounds)))
    rows.append(("eager forward, training, L=10", "1.30", lambda: eager(10, rounds)))
    rows.append(("eager forward, evaluation, L=10", "1.30", lambda: eager_evaluation(10, rounds)))
    few = 3 if options.quick else 7
    for name, (make_pair, turns) in transforms.PAIRS.items():
        rows.append((name, "1.10", lambda make=make_pair, turns=turns: per_turn(make(), turns, rounds)))
        rows.append((f"{name}: trace", "1.50", lambda make=make_pair: transforms.tracing(make(), few)))
    for depth in (10, 50):
        pair = lambda depth=depth: paired(homes.objax_step(depth), homes.tether_step(depth), rounds)
        rows.append((f"a step of Objax code beside Tether's, L={depth}", "1.15", pair))
    rows.append(("GPT-2, a token at position 1,000, beside one at 10", "1.05", lambda: decoding(rounds)))
    table = Table(title=f"Tether beside hand-written JAX {jax.__version__}, Python {platform.python_version()}, CPU")
    for column in ("what", "Tether, µs", "by hand, µs", "ratio", "bound"):
        table.add_column(column, justify="left" if column == "what" else "right")
    console = Console(width=100)
    for name, bound, measure in rows:
        if options.only in name:
            ours, theirs, ratio = measure()
            table.add_row(name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ratio:.3f}", bound)
            console.print(f"{name}: {ratio:.3f}")  # at once: the deep ones compile for minutes
    console.print(table)
    if not options.only:
        traces, compilations = fresh_models(10, 20)
        console.print(f"20 fresh models through one step: {traces} trace(s), {compilations} compilation(s)")


if __name__ == "__main__":
    main()
