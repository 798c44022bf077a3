# SPDX-License-Identifier: Apache-2.0
"""What one more token costs GPT-2: late in a cache beside early in the same cache."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import tether
from tether import zoo

EARLY, LATE, LENGTH, BLOCK = 10, 1_000, 1_024, 20


def decoding(rounds: int) -> tuple[float, float, float]:
    """Microseconds of a token from position 1,000 and from position 10, and the median of the paired ratios."""
    model = zoo.GPT2(1024, LENGTH, 256, 4, 4, dropout=0.0, key=jax.random.key(0)).eval()
    cache = model.init_cache(4, LENGTH)
    ids = jnp.zeros((4, 1), jnp.int32)
    step = tether.jit(lambda model, cache, ids: model(ids, cache=cache), donate_state=True)

    def tokens(position: int) -> float:
        cache.set_lengths(jnp.full(4, position, jnp.int32))
        start: Any = time.perf_counter()
        for _ in range(BLOCK):
            out = step(model, cache, ids)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / BLOCK

    model(jnp.zeros((4, LATE), jnp.int32), cache=cache)  # so that no token is made up of zeros
    tokens(EARLY)
    pairs = [(tokens(LATE), tokens(EARLY)) for _ in range(rounds)]
    late, early = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
    return late, early, statistics.median(a / b for a, b in pairs)
