# SPDX-License-Identifier: Apache-2.0
"""What the two files of cases share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tether

O1 = np.array([[1, 10], [3, 20], [5, 30], [7, 40]], np.float32)
O1_OUT = np.array([-1.341639, -0.447213, 0.447213, 1.341639])


RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype(np.float32)
C = RNG.normal(size=(8, 4)).astype(np.float32)


def avals(tree):
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(leaf.shape, leaf.dtype, jax.typeof(leaf).weak_type) for leaf in leaves]


def is_plain(model) -> bool:
    return all(isinstance(v, jax.Array) and not isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(model))


def stream():
    return jax.random.key_data(tether.pure(tether.random.draw).values()["tether.random.default"])


def norm_by_hand(x):
    mean, var = x.mean(0, keepdims=True), x.var(0, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5)
