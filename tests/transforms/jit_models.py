# SPDX-License-Identifier: Apache-2.0
"""Modules and oracles that the tests of jit share."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import tether

X = np.arange(12, dtype=np.float32).reshape(4, 3)
W = np.array([1.0, -2.0, 0.5], np.float32)
COMPILED = "/jax/core/compile/backend_compile_duration"


class Counter(tether.Module):
    """y = sum(x @ weight) * count, after count has grown by one."""

    def __init__(self, weight=W):
        self.weight = tether.Param(weight)
        self.count = tether.State(0.0)

    def __call__(self, x):
        self.count = self.count + 1
        return (x @ self.weight).sum() * self.count


def expected(calls: int, weight=W, x=X) -> float:
    return float((np.asarray(x, np.float64) @ np.asarray(weight, np.float64)).sum() * calls)


class Slots(tether.Module):
    def __init__(self):
        self.a = tether.State(jnp.ones(3))
        self.b = tether.State(jnp.full(3, 2.0))
        self.p = tether.Param(jnp.full(3, 5.0))
