# SPDX-License-Identifier: Apache-2.0
"""pure and uses: stateful functions as plain ones, and what they touch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, LeakError, SelectionError, ShapeError

X = np.array([[1, 10], [3, 20], [5, 30], [7, 40]], np.float32)
OUT = [-1.341639, -0.447213, 0.447213, 1.341639]


class TestPure:
    def test_under_plain_jit_and_scan(self):
        norm = nn.BatchNorm(2)
        plain = tether.pure(norm)
        out, new = jax.jit(plain)(plain.values(), X)
        np.testing.assert_allclose(out[:, 0], OUT, atol=1e-5)
        np.testing.assert_allclose(new["mean"], [0.4, 2.5], rtol=1e-6)
        np.testing.assert_allclose(new["var"], [1.4, 13.4], rtol=1e-6)
        np.testing.assert_array_equal(norm.mean, [0.0, 0.0])
        values, _ = jax.lax.scan(lambda v, _: tether.pure(norm)(v, X)[::-1], plain.values(), None, length=3)
        np.testing.assert_allclose(values["mean"], X.mean(0) * (1 - 0.9**3), rtol=1e-5)
        np.testing.assert_array_equal(norm.mean, [0.0, 0.0])

    def test_differentiates_under_plain_grad(self):
        linear = nn.Linear(2, 1)
        plain = tether.pure(lambda x: linear(x).sum())
        gradients = jax.grad(lambda v: plain(v, X)[0], allow_int=True)(
            {k: v for k, v in plain.values().items() if k.startswith("linear")}
        )
        np.testing.assert_allclose(gradients["linear.weight"], X.sum(0)[None], rtol=1e-6)

    def test_module_shaped_values(self):
        norm = nn.BatchNorm(2)
        snapshot = tether.snapshot(norm)
        out, new = tether.pure(norm)(snapshot, X)
        assert isinstance(new, nn.BatchNorm)
        np.testing.assert_allclose(new.mean, [0.4, 2.5], rtol=1e-6)
        np.testing.assert_array_equal(norm.mean, [0.0, 0.0])
        np.testing.assert_array_equal(snapshot.mean, [0.0, 0.0])

    def test_random_stream_is_a_value(self):
        dropout = nn.Dropout(0.5)
        plain = tether.pure(dropout)
        values = plain.values()
        one, after = plain(values, jnp.ones(32))
        again, _ = plain(values, jnp.ones(32))
        other, _ = plain(after, jnp.ones(32))
        np.testing.assert_array_equal(one, again)
        assert (np.asarray(one) != np.asarray(other)).any()

    def test_errors(self):
        linear = nn.Linear(2, 1)
        plain = tether.pure(linear)
        with pytest.raises(SelectionError, match="wait"):
            plain({"wait": jnp.ones((1, 2))}, X)
        with pytest.raises(ShapeError, match="weight"):
            plain({**plain.values(), "weight": jnp.ones((2, 2))}, X)
        with pytest.raises(LeakError, match="bias"):
            plain({"weight": linear.weight}, X)
        with pytest.raises(ArgumentError, match="pure"):
            tether.pure(3)

    def test_failure_writes_nothing(self):
        norm = nn.BatchNorm(2)

        def f(x):
            norm(x)
            raise ValueError("stop")

        plain = tether.pure(f)
        with pytest.raises(ValueError, match="stop"):
            plain(plain.values(), X)
        np.testing.assert_array_equal(norm.mean, [0.0, 0.0])


class TestUses:
    def test_reads_and_writes_by_path(self):
        model = nn.Sequential([nn.Linear(2, 2), nn.BatchNorm(2)])
        found = tether.uses(model)(X)
        assert set(found.reads) >= {"[0].weight", "[0].bias", "[1].weight", "[1].bias", "[1].mean", "[1].var"}
        assert set(found.writes) == {"[1].mean", "[1].var"}
        assert found.writes["[1].mean"] is tether.cell(model, "[1].mean")
        assert set(tether.uses(model.eval())(X).writes) == set()

    def test_of_arguments_and_closures(self):
        one, two = tether.State(1.0), nn.Linear(2, 1)

        def f(net, x):
            one.value = 2.0
            return net(x)

        found = tether.uses(f)(two, X)
        assert set(found.reads) == {"net.weight", "net.bias"}
        assert set(found.writes.values()) == {one}

    def test_runs_and_writes_nothing(self):
        counter, ran = tether.State(0), []

        def f():
            counter.value = counter.value + 1
            jax.debug.callback(lambda: ran.append(1))

        assert list(tether.uses(f)().writes.values()) == [counter]
        assert int(counter.value) == 0 and ran == []

    def test_draws(self):
        assert "tether.random.default" in tether.uses(nn.Dropout(0.5))(X).writes
        assert "tether.random.default" not in tether.uses(nn.Dropout(0.5).eval())(X).writes
