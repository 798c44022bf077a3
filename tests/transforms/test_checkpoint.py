# SPDX-License-Identifier: Apache-2.0
"""checkpoint: the same numbers, one update, the same masks, and a backward pass that recomputes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Net(tether.Module):
    def __init__(self):
        self.linear = nn.Linear(3, 3, key=jax.random.key(0))
        self.norm = nn.BatchNorm(3)
        self.dropout = nn.Dropout(0.5)
        self.calls = tether.State(0)

    def __call__(self, x):
        self.calls = self.calls + 1
        return jnp.sin(self.dropout(self.norm(self.linear(x))))


def results(wrap):
    """Loss, gradients, state and stream after two gradients of a model under ``wrap``."""
    tether.seed(0)
    net = Net()
    layer = wrap(net)
    found = []
    for _ in range(2):
        found.append(tether.value_and_grad(lambda x, net: (layer(x) ** 2).sum(), argnums=(0, 1))(X, net))
    values = {path: v.value for path, v in tether.variables(net).items()}
    return found, values, jax.random.key_data(tether.random.draw())


@pytest.mark.parametrize(
    "wrap",
    [
        tether.checkpoint,
        tether.remat,
        lambda net: tether.checkpoint(tether.checkpoint(net)),
        lambda net: tether.checkpoint(policy=jax.checkpoint_policies.dots_saveable)(net),
        lambda net: tether.checkpoint(lambda x: net(x), prevent_cse=False),
    ],
    ids=["checkpoint", "remat", "twice", "policy", "prevent_cse"],
)
def test_value_gradient_state_and_masks_are_those_without(wrap):
    plain, rematerialized = results(lambda net: net), results(wrap)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6),  # of values around 4
        jax.tree.leaves(plain),
        jax.tree.leaves(rematerialized),
    )
    assert int(rematerialized[1]["calls"]) == 2


def test_the_backward_pass_recomputes():
    w = tether.Param(2.0)
    f = lambda x: jnp.sin(jnp.sin(w.value * x))
    text = lambda fun: str(
        jax.make_jaxpr(tether.pure(tether.grad(fun)))(tether.pure(tether.grad(fun)).values(1.0), 1.0)
    )
    assert text(tether.checkpoint(f)).count("= sin ") > text(f).count("= sin ")
    saved = tether.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)
    assert text(saved).count("= sin ") == text(f).count("= sin ")


def test_grad_of_grad_and_jit():
    net = Net()

    def penalty(layer):
        return lambda x: (tether.grad(lambda x: (layer(x) ** 2).sum())(x) ** 2).sum()

    tether.seed(0)
    plain = tether.grad(penalty(net))(X)
    tether.seed(0)
    np.testing.assert_allclose(tether.jit(tether.grad(penalty(tether.checkpoint(net))))(X), plain, rtol=1e-4, atol=1e-5)
    assert int(net.calls) == 2


def test_arguments():
    f = tether.checkpoint(lambda x, n, *, mode: x * n if mode == "times" else x + n, static_argnums=1)
    assert float(f(2.0, 3, mode="times")) == 6.0
    assert float(tether.grad(f)(2.0, 3, mode="times")) == 3.0
    with pytest.raises(ArgumentError, match="static_argnums"):
        tether.checkpoint(lambda x: x, static_argnums=2)(1.0)
    with pytest.raises(ArgumentError, match="checkpoint"):
        tether.checkpoint(3)


def test_failure_writes_nothing():
    net, fail = Net(), [True]

    def f(x):
        y = net(x)
        if fail:
            raise ValueError("stop")
        return y.sum()

    layer = tether.checkpoint(f)
    for call in (layer, tether.grad(layer)):
        with pytest.raises(ValueError, match="stop"):
            call(X)
        assert int(net.calls) == 0
    fail.clear()
    tether.grad(layer)(X)
    assert int(net.calls) == 1


def test_existing_module_comes_back():
    net = Net()
    assert tether.checkpoint(lambda x: (x, net))(X)[1] is net
