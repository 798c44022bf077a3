# SPDX-License-Identifier: Apache-2.0
"""What a scan runs over: stacked modules, sliced, written and stacked back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.loop_models import WAYS, XS, Net, Noisy, close, same, values
from tether import nn
from tether.errors import ArgumentError, ShapeError, StackedError

X = XS[0]


class Layer(tether.Module):
    """A layer with a row of a cache, and a count."""

    def __init__(self, seed):
        self.linear = nn.Linear(3, 3, key=jax.random.key(seed))
        self.cache = tether.State(jnp.zeros(3))
        self.calls = tether.State(0)

    def __call__(self, h):
        self.calls = self.calls + 1
        self.cache = self.cache + h.mean(0)
        return jnp.tanh(self.linear(h)) - jnp.broadcast_to(self.cache, h.shape)


def by_hand(layers, norms, h, reverse):
    """The layers one by one, in float64: the result, the caches, the means of the norms."""
    weights, biases, caches = (np.float64(v) for v in (layers.linear.weight, layers.linear.bias, layers.cache))
    means, h = np.float64(norms.mean), np.float64(h)
    for i in range(3)[::-1] if reverse else range(3):
        caches[i] = caches[i] + h.mean(0)
        h = np.tanh(h @ weights[i].T + biases[i]) - caches[i]
        means[i] = 0.9 * means[i] + 0.1 * h.mean(0)
        h = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5)
    return h, caches, means


class TestStacked:
    @pytest.mark.parametrize(("way", "reverse"), [("eager", False), ("jit", True), ("disable_jit", True)])
    def test_rows_are_sliced_and_written(self, way, reverse):
        """Two stacked modules and arrays, two times; the stack and its part come back as themselves."""
        layers, norms = tether.stack([Layer(i) for i in range(3)]), tether.stack([nn.BatchNorm(3) for _ in range(3)])

        def turn(h, x):
            layer, row = x["layer"], x["row"]
            return x["norm"](layer(h)), (row, layer.calls, layer, layer.linear)

        run = WAYS[way](
            lambda h: tether.scan(turn, h, {"layer": layers, "norm": norms, "row": jnp.arange(3)}, reverse=reverse)
        )
        h = X
        for call in (1, 2):
            expected, caches, means = by_hand(layers, norms, h, reverse)
            h, (rows, calls, again, part) = run(h)
            np.testing.assert_allclose(h, expected, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(layers.cache, caches, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(norms.mean, means, rtol=1e-3, atol=1e-4)
            assert rows.tolist() == [0, 1, 2] and calls.tolist() == layers.calls.tolist() == [call] * 3
            assert again is layers and part is layers.linear

    @pytest.mark.parametrize("way", ["jit", "disable_jit"])
    def test_streams_are_the_members_own(self, way):
        noises, alone = tether.stack([Noisy(i) for i in range(3)]), [Noisy(i) for i in range(3)]
        run = lambda: tether.scan(lambda c, noise: (c, (noise(c), noise(c))), jnp.zeros(2), noises)[1]
        found = WAYS[way](run)()
        for i, noise in enumerate(alone):
            close((found[0][i], found[1][i]), (noise(jnp.zeros(2)), noise(jnp.zeros(2))))
            same(noises.rng[i], noise.rng)

    @pytest.mark.parametrize("way", ["eager", "disable_jit"])
    def test_what_the_body_makes_comes_back_stacked(self, way):
        """New modules stacked as tether.stack does, views of existing ones too; existing ones as themselves."""
        net, keys = Net(), jax.random.split(jax.random.key(3), 3)

        def turn(c, key):
            return c, (nn.Linear(2, 3, key=key), {"noise": Noisy(0)}, net, net.linear, net.eval())

        new, made, again, part, view = WAYS[way](lambda: tether.scan(turn, 0, keys)[1])()
        expected = tether.stack([nn.Linear(2, 3, key=key) for key in keys])
        assert jax.tree.structure(new) == jax.tree.structure(expected)
        close(values(new), values(expected))
        assert made["noise"].rng.shape == view.calls.shape == (3,) and tether.index(view, 0).training is False
        assert again is net and part is net.linear
        y = tether.vmap(lambda layer, x: layer(x))(new, jnp.ones((3, 2)))
        np.testing.assert_allclose(y, np.asarray(expected.weight).sum(-1) + expected.bias, rtol=1e-5)


def test_gradients_of_stacked_layers():
    """Against jax.lax.scan over the same arrays."""
    layers = tether.stack([Layer(i) for i in range(3)])

    def plain(weights):
        def turn(h, x):
            weight, bias = x
            return jnp.tanh(h @ weight.T + bias[None]) - h.mean(0)[None], None

        return (jax.lax.scan(turn, X, weights)[0] ** 2).sum()

    expected = jax.grad(plain)((layers.linear.weight, layers.linear.bias))
    loss = lambda layers: (tether.scan(lambda h, layer: (layer(h), None), X, layers)[0] ** 2).sum()
    found = tether.jit(tether.grad(loss))(layers)
    close((found.linear.weight, found.linear.bias), expected, rtol=1e-4)
    assert layers.calls.tolist() == [1, 1, 1] and found.calls is None


def test_stacks_of_stacks():
    """An ensemble of stacked layers: vmap of scan, and scan of scan, against a loop."""
    layers = [nn.Linear(3, 3, key=jax.random.key(i)) for i in range(6)]
    ensemble = tether.stack([tether.stack(layers[:3]), tether.stack(layers[3:])])
    through = lambda layers: tether.scan(lambda h, layer: (layer(h), None), jnp.ones(3), layers)[0]
    expected = []
    for weights, biases in zip(np.float64(ensemble.weight), np.float64(ensemble.bias), strict=True):
        h = np.ones(3)
        for weight, bias in zip(weights, biases, strict=True):
            h = weight @ h + bias
        expected.append(h)
    np.testing.assert_allclose(tether.jit(tether.vmap(through))(ensemble), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tether.jit(lambda e: tether.map(through, e))(ensemble), expected, rtol=1e-5, atol=1e-6)


def test_shared_stack_in_lanes():
    """Each lane draws from children of the members' streams, which advance once."""
    noises = tether.stack([Noisy(i) for i in range(3)])
    run = lambda x: tether.scan(lambda c, noise: (c, noise(x)), 0, noises)[1]
    found = np.asarray(tether.jit(tether.vmap(run))(jnp.zeros(2)))
    assert len(np.unique(found)) == found.size == 6
    same(noises.rng, jnp.stack([jax.random.split(jax.random.key(i))[0] for i in range(3)]))


def test_errors():
    net, layers = Net(), tether.stack([nn.BatchNorm(3), nn.BatchNorm(3)])
    body = lambda c, x: (c, None)
    for error, message, args in (
        (StackedError, r"module in xs isn't stacked.*\n +at: +xs\['net'\] +\(Net\)", ({"net": net},)),
        (ShapeError, r"differs in length.\n +got: +xs\[1\]: 3, xs\[0\].weight: 2\n", ((layers, XS),)),
        (ShapeError, r"differs in length.\n +got: +xs: 3, length: 4\n", (XS, 4)),
        (ArgumentError, r"no first axis.*\n +at: +xs\[1\]\n +got: +2.0", ([XS, 2.0],)),
        (ArgumentError, r"no first axis.*\n +at: +xs\n +got: +State object", (tether.cell(net, "calls"),)),
        (ArgumentError, "nothing says how many turns", (None,)),
        (ArgumentError, r"no number of turns.\n +got: +2.5", (None, 2.5)),
        (ArgumentError, r"no number of turns.\n +got: +-1", (None, -1)),
    ):
        with pytest.raises(error, match=message):
            tether.scan(body, 0, *args)
    with pytest.raises(ArgumentError, match=r"no number of turns.\n +got: +int32\[\]"):
        tether.jit(lambda n: tether.scan(body, 0, length=n))(3)
