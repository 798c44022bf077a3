# SPDX-License-Identifier: Apache-2.0
"""A module passed by value to a plain transformation: who is told that a write to it is lost, and who isn't."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import LostUpdateWarning

X = np.array([[0.5, -1.0], [2.0, 1.5], [1.0, 3.0]], np.float32)


class Net(tether.Module):
    def __init__(self):
        self.norm = nn.BatchNorm(2)

    def __call__(self, x: Any) -> Any:
        return self.norm(x)


def loss(net: Any, x: Any = X) -> Any:
    return (net(x) ** 2).sum()


LOST = {
    "jit": lambda net: jax.jit(loss)(net),
    "grad": lambda net: jax.grad(loss)(net),
    "jit of grad": lambda net: jax.jit(jax.grad(loss))(net),
    "vjp": lambda net: jax.vjp(loss, net),
    "vmap": lambda net: jax.vmap(loss, (None, 0))(net, X[None]),
    "cond": lambda net: jax.lax.cond(True, loss, lambda net: 0.0, net),
    "checkpoint": lambda net: jax.checkpoint(loss)(net),
    "tether.grad inside": lambda net: jax.jit(lambda net: tether.grad(loss)(net))(net),
    "grad inside tether.jit": lambda net: tether.jit(lambda net: jax.grad(loss)(net))(net),
}


def fails(net: Any) -> None:
    def f(net: Any) -> None:
        loss(net)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        jax.jit(f)(net)


KEPT = {
    "returned": lambda net: jax.jit(lambda net: (loss(net), net))(net),
    "a part returned": lambda net: jax.jit(lambda net: (loss(net), net.norm))(net),
    "a view returned": lambda net: jax.jit(lambda net: (loss(net), net.eval()))(net),
    "leaves returned": lambda net: jax.jit(lambda net: (loss(net), jax.tree.leaves(net)))(net),
    "arrays returned": lambda net: jax.jit(lambda net: (loss(net), net.norm.mean, net.norm.var))(net),
    "aux": lambda net: jax.grad(lambda net: (loss(net), net), has_aux=True)(net),
    "scan": lambda net: jax.lax.scan(lambda c, x: (c, loss(c, x)), net, X[None]),
    "nothing written": lambda net: jax.jit(lambda net: net(X, training=False))(net),
    "a tree map inside": lambda net: jax.jit(lambda net: loss(jax.tree.map(lambda x: x, net)))(net),
    "a tree map of a closure": lambda net: jax.jit(lambda: loss(jax.tree.map(lambda x: x, net)))(),
    "a clone": lambda net: jax.jit(lambda net: loss(tether.clone(net)))(net),
    "lerp": lambda net: jax.jit(lambda net: loss(tether.lerp(net, net, 0.5)))(net),
    "bind": lambda net: jax.jit(lambda net: (loss(tether.bind(net, {"norm.weight": jnp.zeros(2)})), net))(net),
    "made inside": lambda net: jax.jit(lambda: loss(Net()))(),
    "eval_shape": lambda net: jax.eval_shape(loss, net),
    "make_jaxpr": lambda net: jax.make_jaxpr(loss)(net),
    "an exception": fails,
    "tether.jit": lambda net: tether.jit(loss)(net),
    "tether.grad": lambda net: tether.grad(loss)(net),
    "tether.vmap": lambda net: tether.vmap(loss)(tether.stack([net, net]), X[None].repeat(2, 0)),
    "a tree map in tether.jit": lambda net: tether.jit(lambda net: loss(jax.tree.map(lambda x: x, net)))(net),
}


@pytest.mark.parametrize("name", LOST)
def test_a_write_that_is_lost_warns(name: str):
    with pytest.warns(LostUpdateWarning, match=r"norm\.mean  \(State\), norm\.var  \(State\)") as caught:
        LOST[name](Net())
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_lost_does_not(name: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        KEPT[name](Net())
        gc.collect()
    assert not caught
