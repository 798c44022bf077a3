# SPDX-License-Identifier: Apache-2.0
"""ConvNet, DNNet and RNN against float64 in NumPy."""

from __future__ import annotations

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tests.compat.objax.zoo import _numpy
from tether.compat.objax.zoo.convnet import ConvNet
from tether.compat.objax.zoo.dnnet import DNNet
from tether.compat.objax.zoo.rnn import RNN


def leaky(x):
    return np.where(x > 0, x, 0.01 * x)


class TestConvNet:
    def test_values(self):
        network = ConvNet(3, 5, scales=2, filters=4, filters_max=8, unknown="ignored")
        widths = [layer.w.shape[2:] for layer in network if isinstance(layer, objax.nn.Conv2D)]
        assert widths == [(3, 4), (4, 4), (4, 8), (8, 8), (8, 8), (8, 5)]
        values = _numpy.weights(network)
        for name, variable in network.vars().items():
            variable.assign(jnp.asarray(values[name]))
        x = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype("f")
        h = x.astype(np.float64)
        for place, layer in enumerate(network):
            if isinstance(layer, objax.nn.Conv2D):
                found = _numpy.part(values, f"(ConvNet)[{place}](Conv2D).")
                h = _numpy.conv(h, found["w"], 1, 1, found["b"])
                h = leaky(h) if place < len(network) - 2 else h
            elif place in (6, 11):
                h = _numpy.max_pool(h, 2, 2)
        np.testing.assert_allclose(network(x), h.mean((2, 3)), rtol=1e-4, atol=1e-5)

    def test_another_pooling(self):
        network = ConvNet(1, 2, 1, 2, 2, pooling=objax.functional.average_pool_2d)
        assert network[6](jnp.arange(4.0).reshape(1, 1, 2, 2)).tolist() == [[[[1.5]]]]


class TestDNNet:
    def test_values(self):
        network = DNNet((size for size in (3, 4, 2)), objax.functional.tanh)
        x = np.random.default_rng(0).normal(size=(5, 3))
        w1, w2 = (np.asarray(network[place].w.value, np.float64) for place in (0, 2))
        np.testing.assert_allclose(network(x.astype("f")), np.tanh(np.tanh(x @ w1) @ w2), rtol=1e-5, atol=1e-6)
        assert len(network) == 4

    def test_no_layer(self):
        with pytest.raises(AssertionError) as caught:
            DNNet([3], objax.functional.relu)
        assert str(caught.value) == (
            "DNNet: no layer.\n"
            "  got:      layer_sizes=[3]\n"
            "  expected: the number of inputs, and of the outputs of each layer"
        )


class TestRNN:
    def values(self, rnn, inputs, h):
        w_xh, w_hh, b_h = (np.asarray(v.value, np.float64) for v in (rnn.w_xh, rnn.w_hh, rnn.b_h))
        w, b = (np.asarray(v.value, np.float64) for v in (rnn.output_layer.w, rnn.output_layer.b))
        outputs = []
        for x in inputs.astype(np.float64):
            h = np.tanh(x @ w_xh + h @ w_hh + b_h)
            outputs.append(h @ w + b)
        return np.concatenate(outputs), h

    @pytest.mark.parametrize("jit", [False, True])
    def test_values(self, jit):
        rnn = RNN(nstate=4, nin=3, nout=2)
        rnn.b_h.assign(jnp.array([0.5, -1.0, 0.25, 2.0]))
        rnn.init_state(5)
        call = objax.Jit(lambda x: rnn(x), rnn.vars()) if jit else rnn
        inputs = np.random.default_rng(0).normal(size=(14, 5, 3)).astype("f")
        expected, h = self.values(rnn, inputs, np.zeros((5, 4)))
        found = [call(inputs[:7]), call(inputs[7:])]  # the state goes on
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(rnn.state.value, h, rtol=1e-5, atol=1e-5)

    def test_the_last_output_alone(self):
        rnn = RNN(4, 3, 2)
        rnn.init_state(5)
        inputs = np.random.default_rng(0).normal(size=(7, 5, 3)).astype("f")
        expected, _ = self.values(rnn, inputs, np.zeros((5, 4)))
        np.testing.assert_allclose(rnn(inputs, only_return_final=True), expected[-5:], rtol=1e-5, atol=1e-5)
        rnn.init_state(5)
        np.testing.assert_allclose(rnn(inputs), expected, rtol=1e-5, atol=1e-5)  # from zeros again

    def test_names(self):
        rnn = RNN(4, 3, 2)
        rnn.init_state(1)
        assert [name.removeprefix("(RNN).") for name in rnn.vars().keys()] == [  # noqa: SIM118  (of variables)
            *("w_xh", "w_hh", "b_h", "output_layer(Linear).b", "output_layer(Linear).w", "state")
        ]

    def test_it_learns(self):
        """The sum of the inputs so far, kept in the state."""
        rnn = RNN(8, 1, 1)
        x = np.random.default_rng(0).normal(size=(6, 16, 1)).astype("f") * 0.2
        y = np.cumsum(x, 0).reshape(-1, 1)
        rnn.init_state(16)

        def loss(x, y):
            rnn.state.value = jnp.zeros((16, 8))
            return ((rnn(x) - y) ** 2).mean()

        gv, adam = objax.GradValues(loss, rnn.vars()), objax.optimizer.Adam(rnn.vars())

        @objax.Jit
        def train(x, y):
            gradients, values = gv(x, y)
            adam(0.03, gradients)
            return values[0]

        losses = [float(train(x, y)) for _ in range(150)]
        assert losses[-1] < 0.02 * losses[0]

    def test_errors(self):
        rnn = RNN(4, 3, 2)
        with pytest.raises(AssertionError) as caught:
            rnn(jnp.ones((7, 5, 3)))
        assert str(caught.value) == (
            "RNN: it has no state yet.\n  fix:      rnn.init_state(batch_size), before the first call"
        )
        rnn.init_state(5)
        for shape in ((7, 4, 3), (7, 5, 2), (5, 3), (0, 5, 3)):
            with pytest.raises(AssertionError) as caught:
                rnn(jnp.ones(shape))
            assert str(caught.value) == (
                "RNN: the inputs don't fit the network and its state.\n"
                f"  got:      float32[{', '.join(map(str, shape))}]\n"
                "  expected: [time, 5, 3], one step at least\n"
                "  fix:      rnn.init_state(batch_size), for a batch of another size"
            )


def test_the_zoo_is_imported_by_name():
    """As in Objax: the package has no zoo before someone imports a part of it."""
    program = "import tether.compat.objax as o; print(hasattr(o, 'zoo'));"
    program += "from tether.compat.objax.zoo import vgg, resnet_v2; import sys; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
