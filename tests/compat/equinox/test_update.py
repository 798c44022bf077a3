# SPDX-License-Identifier: Apache-2.0
"""Updates of Equinox's modules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tether.compat.equinox as eqx


class Layer(eqx.Module):
    weight: Any
    act: Any


def test_a_step_of_gradient_descent():
    layer = Layer(jnp.array([1.0, 2.0]), jax.nn.relu)
    grads = eqx.filter_grad(lambda m: (m.weight**2).sum())(layer)
    new = eqx.apply_updates(layer, jax.tree.map(lambda g: -0.25 * g, grads))
    assert new.weight.tolist() == [0.5, 1.0] and new.act is jax.nn.relu
    assert layer.weight.tolist() == [1.0, 2.0]
