# SPDX-License-Identifier: Apache-2.0
"""Gradients of loops: Tether beside Equinox, on the same body, in one run.

The two are timed in turn in one process; the ratios are medians of paired rounds. Memory is what the compiled gradient
needs for temporaries. It needs the ``parity`` extra.
usage: python -m benchmarks.loops [--rounds N] [--only NAME]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import tether

WIDTH = 32
# name: (steps, lanes, arguments of the loop)
CASES = {
    "20,000 steps, 10,000 checkpoints": (20_000, 2, {"kind": "checkpointed", "checkpoints": 10_000}),
    "1,000 steps, as many at most": (1_000, 1, {"kind": "checkpointed", "max_steps": 1_000}),
    "1,000 steps, 10 checkpoints": (1_000, 1, {"kind": "checkpointed", "checkpoints": 10}),
    "1,000 steps, all kept": (1_000, 1, {"kind": "checkpointed", "max_steps": 1_000, "checkpoints": 1_000}),
    "bounded, 1,000 steps of 4,096": (1_000, 1, {"kind": "bounded", "max_steps": 4_096}),
    "bounded, 4,096 steps of 4,096": (4_096, 1, {"kind": "bounded", "max_steps": 4_096}),
    "scan, 1,000 turns": (1_000, 1, {"kind": "checkpointed"}),
}


def gradient(name: str, library: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of a rotation by an angle that a small network computes, step by step; and its arguments."""
    steps, lanes, options = CASES[name]
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((WIDTH, 2), (WIDTH,))]

    def rotated(value: Any, weights: Any) -> Any:
        angle = weights[1] @ jnp.tanh(weights[0] @ value) / WIDTH
        return jnp.stack(
            [
                jnp.cos(angle) * value[0] - jnp.sin(angle) * value[1],
                jnp.sin(angle) * value[0] + jnp.cos(angle) * value[1],
            ]
        )

    def loss(value: Any, weights: Any) -> Any:
        if name.startswith("scan"):
            turn = lambda value, x: (rotated(value, weights) + x, value[0])
            last, seen = library.scan(turn, value, jnp.zeros((steps, 2)), **options)
            return last.sum() + seen.sum()
        body = lambda carry: (carry[0] + 1, rotated(carry[1], weights))
        return library.while_loop(lambda carry: carry[0] < steps, body, (jnp.int32(0), value), **options)[1].sum()

    value = jnp.asarray(rng.normal(size=(lanes, 2)).astype(np.float32))
    mapped = jax.vmap(jax.grad(loss, (0, 1)), (0, None))
    return (mapped, (value, weights)) if lanes > 1 else (jax.grad(loss, (0, 1)), (value[0], weights))


def main() -> None:
    """Measures the loops and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    table = Table(title=f"Gradients of loops, JAX {jax.__version__}, Python {platform.python_version()}, CPU")
    for column in ("loop", "ms", "Equinox", "ratio", "MB", "Equinox", "ratio", "s to compile", "Equinox"):
        table.add_column(column, justify="left" if column == "loop" else "right")
    for name in CASES:
        if options.only not in name:
            continue
        made, seconds, held, results = [], [], [], []
        for library in (tether, eqxi):
            start = time.perf_counter()
            grad, args = gradient(name, library)
            compiled = jax.jit(grad).lower(*args).compile()
            seconds.append(time.perf_counter() - start)
            made.append(lambda compiled=compiled, args=args: jax.block_until_ready(compiled(*args)))
            held.append(compiled.memory_analysis().temp_size_in_bytes / 1e6)
            results.append(made[-1]())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), *results)
        times = [(timed(made[0]), timed(made[1])) for _ in range(options.rounds)]
        ms = [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
        row = [f"{x:.2f}" for x in ms] + [f"{statistics.median(a / b for a, b in times):.3f}"]
        row += [f"{x:.3f}" for x in held] + [f"{held[0] / held[1]:.3f}"] + [f"{x:.1f}" for x in seconds]
        table.add_row(name, *row)
    Console(width=130).print(table)


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
