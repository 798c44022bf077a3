# SPDX-License-Identifier: Apache-2.0
"""Models, meshes and data for the tests of shard_map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import tether

X = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
BLOCKS = X.reshape(4, 2, 3)
SEEN_ONCE = (BLOCKS + BLOCKS.sum(1, keepdims=True)).reshape(8, 3)  # what Net gives at its first call


LINE = Mesh(np.array(jax.devices()), ("d",))
GRID = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))


class Net(tether.Module):
    """Counts its calls, and adds up what its shard has seen."""

    def __init__(self):
        self.calls, self.seen = tether.State(0), tether.State(jnp.zeros((4, 3)))

    def __call__(self, x):
        self.calls = self.calls + 1
        self.seen = self.seen + x.sum(0, keepdims=True)
        return x * self.calls.astype(x.dtype) + self.seen

    def step(self, x):
        return self(x)


class Total(tether.Module):
    def __init__(self, reduce=None):
        self.total = tether.State(jnp.ones(()), reduce=reduce)

    def __call__(self, x):
        self.total = self.total + x.sum()
        return x


def spec_of(variable: tether.Variable) -> PartitionSpec:
    return variable.value.sharding.spec


def is_clean(model: tether.Module) -> bool:
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model))
