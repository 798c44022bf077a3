# SPDX-License-Identifier: Apache-2.0
"""jax.disable_jit(): bodies and branches run in Python, with concrete values, and with the same results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.loop_models import XS, Net, Noisy, advanced, close, same, stream, values
from tether import nn


def everything(net, noisy, layers, average, x):
    """Each kind of loop and branch, with a module in every place: carry, value, xs, closure, result."""

    def turn(c, step):
        carried, mean, h = c
        layer, row = step["layer"], step["x"]
        seen.append(isinstance(h, jax.core.Tracer))
        h = layer(carried(row)) + noisy(h)
        new = nn.Linear(2, 2, key=jax.random.key(1))
        return (net, tether.lerp(mean, net.linear, 0.5), h), (carried, layer, new, h.sum())

    seen = []
    (again, mean, h), ys = tether.scan(turn, (net, average, jnp.zeros((4, 3))), {"layer": layers, "x": x}, reverse=True)
    h = tether.fori_loop(0, 2, lambda i, h: net(h) * i.astype(h.dtype), h)
    counted = tether.while_loop(lambda c: net.calls < 7, lambda c: (net(h), c + 1)[1], 0)
    which = tether.cond(h.sum() > -1e9, lambda h: (net, noisy(h)), lambda h: (net, h), h)
    mapped = tether.map(net, x)
    return again, mean, h, ys, counted, which, mapped, seen


def parts():
    tether.seed(0)
    layers = tether.stack([nn.BatchNorm(3) for _ in range(3)])
    return Net(), Noisy(1), layers, nn.Linear(3, 3, key=jax.random.key(9))


def test_results_state_and_streams_are_those_of_the_compiled_program():
    found = []
    for disabled in (False, True):
        net, noisy, layers, average = parts()
        before = values(average)
        with jax.disable_jit(disabled):
            again, mean, h, ys, counted, which, mapped, seen = everything(net, noisy, layers, average, jnp.asarray(XS))
        assert again is net and ys[0] is net and ys[1] is layers and which[0] is net
        assert seen == ([False] * 3 if disabled else [True])
        same(values(average), before)
        found.append(([values(part) for part in (net, layers, mean, ys[2])], h, ys[3], counted, which[1], mapped))
        assert int(net.calls) == 3 + 2 + 2 + 3
        assert stream() == advanced(4)  # scan, fori_loop, while_loop, map: the branch draws from the other stream
        same(noisy.rng, jax.random.split(jax.random.split(jax.random.key(1))[0])[0])  # scan, cond
    close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_values_are_concrete(capsys):
    """print, float and if; also with a model that is being differentiated, whose values are known."""
    net = Net()

    def turn(c, x):
        h = net(x)
        print(f"turn {int(net.calls)}: {float(h.sum()):.3f}")
        return (c + 1 if float(c) < 2 else c), None

    def branch(x):
        return jnp.sin(x) if x > 0 else x

    with jax.disable_jit():
        assert float(tether.scan(turn, 0.0, XS)[0]) == 2
        assert float(tether.cond(True, branch, jnp.cos, 1.0)) == pytest.approx(np.sin(1.0))
        assert float(tether.while_loop(lambda c: float(c) < 3, lambda c: c + 1 if c > 1 else c + 2, 0.0)) == 3
        assert float(tether.fori_loop(0, 3, lambda i, c: c + 1 if int(i) == 1 else c, 0.0)) == 1
        assert tether.map(lambda x: x if float(x[0, 0]) > 0 else -x, XS).shape == XS.shape
    assert capsys.readouterr().out.count("turn") == 3 and int(net.calls) == 3


def test_gradients():
    """Of a loop and a branch, with respect to a closed-over model and its stacked layers."""
    gradients = []
    for disabled in (False, True):
        net, _, layers, _ = parts()
        net = net.eval()

        def loss(net, layers):
            def turn(h, layer):
                h = layer(h, training=False) + net(h)
                return tether.cond(h.sum() > -1e9, lambda h: h * net.scale[None], lambda h: h, h), None

            return (tether.scan(turn, jnp.asarray(XS[0]), layers)[0] ** 2).sum()

        with jax.disable_jit(disabled):
            gradients.append(jax.tree.leaves(tether.grad(loss, argnums=(0, 1))(net, layers)))
        assert int(net.calls) == 3
    close(gradients[1], gradients[0], rtol=1e-3, atol=1e-2)


def test_lanes_that_differ_fall_back():
    """Where a predicate differs from lane to lane, all branches are needed, as in JAX."""
    x = jnp.array([1.0, -1.0])
    f = lambda x: tether.cond(x > 0, jnp.sin, jnp.cos, x)
    g = lambda x: tether.while_loop(lambda c: c < 3, lambda c: c + 2 + x, x)
    h = lambda n: tether.fori_loop(0, n, lambda i, c: c + i, 0)
    with jax.disable_jit():
        np.testing.assert_allclose(tether.vmap(f)(x), [np.sin(1), np.cos(-1)], rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(g)(x), [4, 3])
        assert tether.vmap(h)(jnp.array([3, 1])).tolist() == [3, 0]


def test_modules_without_some_cells():
    """Gradients of a model that has streams: their cells are None."""
    noisy, w = Noisy(0), tether.Param(2.0)

    class Scaled(tether.Module):
        def __init__(self):
            self.noisy, self.w = noisy, w

    model = Scaled()
    found = []
    for disabled in (False, True):
        zeros = jax.tree.map(jnp.zeros_like, tether.filter(model, tether.Param))
        turn = lambda total, x: (jax.tree.map(jnp.add, total, tether.grad(lambda m: m.w * x)(model)), None)
        with jax.disable_jit(disabled):
            found.append(float(tether.scan(turn, zeros, jnp.arange(4.0))[0].w))
    assert found == [6, 6]
