# SPDX-License-Identifier: Apache-2.0
"""Training steps of whole models: Tether beside Flax NNX and Equinox, on the same work, in one run.

The three are timed in turn in one process, block by block; the ratios are medians of paired blocks. Memory is what the
compiled step needs at once: arguments, results and temporaries. It needs the ``parity`` extra.
usage: python -m benchmarks.peers [--rounds N] [--only NAME]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.peers import in_equinox, in_flax, in_tether

LIBRARIES = {"Tether": in_tether, "Flax NNX": in_flax, "Equinox": in_equinox}
MODELS = ("ResNet-18", "GPT-2", "LSTM")


def memory(compiled: Any) -> float:
    """Megabytes that a compiled step holds at once, without what results share with arguments."""
    while not hasattr(compiled, "memory_analysis"):
        compiled = compiled.compiled
    sizes = compiled.memory_analysis()
    sizes = sizes[0] if isinstance(sizes, list) else sizes
    parts = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return (parts - sizes.alias_size_in_bytes) / 1e6


def times(steps: list[Any], rounds: int, block: float = 0.5) -> list[list[float]]:
    """Seconds of a step of each, in each round."""
    counts = []
    for step in steps:
        jax.block_until_ready(step())
        start = time.perf_counter()
        jax.block_until_ready(step())
        counts.append(max(1, round(block / (time.perf_counter() - start))))
    found: list[list[float]] = [[] for _ in steps]
    for place in range(rounds):
        for which in range(len(steps)) if place % 2 else reversed(range(len(steps))):
            start = time.perf_counter()
            for _ in range(counts[which]):
                out = steps[which]()
            jax.block_until_ready(out)
            found[which].append((time.perf_counter() - start) / counts[which])
    return found


def main() -> None:
    """Measures the models and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    title = f"A training step, JAX {jax.__version__}, Python {platform.python_version()}, CPU"
    table = Table(title=title)
    for column in ("model", "library", "ms", "Tether / it", "MB", "Tether / it"):
        table.add_column(column, justify="left" if column in ("model", "library") else "right")
    for model in MODELS:
        if options.only in model:
            made = [module.step(model) for module in LIBRARIES.values()]
            found = times([step for step, _ in made], options.rounds)
            held = [memory(compile_step()) for _, compile_step in made]
            for place, library in enumerate(LIBRARIES):
                ratio = statistics.median(a / b for a, b in zip(found[0], found[place], strict=True))
                ms = statistics.median(found[place]) * 1e3
                row = f"{ms:.2f}", f"{ratio:.3f}", f"{held[place]:.1f}", f"{held[0] / held[place]:.3f}"
                table.add_row(model if place == 0 else "", library, *row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
