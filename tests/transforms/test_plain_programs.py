# SPDX-License-Identifier: Apache-2.0
"""Solvers and optimizers of others, which call plain JAX transformations on a function that closes over a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.ode import odeint
from jax.scipy.optimize import minimize

import tether


class Net(tether.Module):
    def __init__(self):
        self.w = tether.Param(-2.0)


AROUND: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "tether.jit": tether.jit}
around = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)


@around
def test_odeint(around: Any):
    """dy/dt = w y, and the gradients of y(1/2) = exp(w/2) by the adjoint, of y(0) and of w."""
    net = Net()
    right_side = lambda y, t: net.w * y  # the same function in each call: JAX caches what it traces under it
    solve = lambda y: odeint(right_side, y, jnp.asarray([0.0, 0.5]))[-1]
    value, gradient = around(solve), around(lambda y: jax.grad(solve)(y))
    of_w = around(lambda: tether.grad(lambda net: solve(1.0))(net).w)
    for w in (-2.0, -1.0):
        net.w = w
        y = np.exp(w / 2)
        np.testing.assert_allclose([value(1.0), gradient(1.0), of_w()], [y, y, y / 2], rtol=1e-3)


def distance(net: Net) -> Callable[[Any], Any]:
    return lambda x: ((x - net.w) ** 2).sum()


@around
def test_minimize(around: Any):
    net = Net()
    fun = distance(net)
    find = around(lambda x: minimize(fun, x, method="BFGS").x)
    for w in (-2.0, 1.0):
        net.w = w
        np.testing.assert_allclose(find(jnp.zeros(2)), [w, w], rtol=1e-4)


@around
def test_lbfgs(around: Any):
    net, optimizer = Net(), optax.lbfgs()
    fun = distance(net)

    def find(x: Any) -> Any:
        state = optimizer.init(x)
        for _ in range(2):
            value, grad = optax.value_and_grad_from_state(fun)(x, state=state)
            updates, state = optimizer.update(grad, state, x, value=value, grad=grad, value_fn=fun)
            x = optax.apply_updates(x, updates)
        return x

    compiled = around(find)
    for w in (-2.0, 1.0):
        net.w = w
        np.testing.assert_allclose(compiled(jnp.zeros(2)), [w, w], rtol=1e-4)
