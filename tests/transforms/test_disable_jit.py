# SPDX-License-Identifier: Apache-2.0
"""jax.disable_jit: a compiled function runs as Python, and everything else is as it is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.jit_models import Counter, Slots, W, X, expected
from tether.errors import StateLostError, StaticError


class Net(tether.Module):
    """A Param, a State that is read after it is written, and a draw."""

    def __init__(self):
        self.weight = tether.Param(W)
        self.mean = tether.State(0.5)

    def __call__(self, x):
        drawn = jax.random.key_data(tether.random.draw())[0] % 7
        self.mean = 0.9 * self.mean + 0.1 * (x @ self.weight).mean()
        return (x @ self.weight - self.mean) * drawn.astype(jnp.float32)


def trained(disabled: bool, layer=lambda model: model):
    """The losses of two steps of training, the model after them, and the stream."""
    tether.seed(0)
    net = Net()

    @tether.jit
    def step(model, x):
        loss, grads = tether.value_and_grad(lambda m: (layer(m)(x) ** 2).sum())(model)
        model.weight = model.weight - 1e-4 * grads.weight
        return loss

    with jax.disable_jit(disabled):
        losses = [step(net, jnp.asarray(X)) for _ in range(2)]
    assert step.traces == (0 if disabled else 1)
    return losses, net.weight, net.mean, jax.random.key_data(tether.random.draw())


@pytest.mark.parametrize("layer", [lambda model: model, tether.checkpoint], ids=["plain", "checkpoint"])
def test_values_state_and_stream_are_those_of_compiled_code(layer):
    compiled, eager = trained(False, layer), trained(True, layer)
    assert compiled[0][0] > compiled[0][1] > 0 and float(eager[2]) != 0.5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), compiled, eager)


@pytest.mark.parametrize("donate", [False, True])
def test_the_users_own_objects_and_concrete_values(donate):
    model, seen = Counter(), []

    @tether.jit(static_argnames="mode", donate_state=donate)
    def step(m, x, extra, mode):
        seen.append((m, x, extra, mode))
        y = m(x)
        assert float(y) == expected(len(seen))  # a tracer has no number
        return y, m

    extra = {"a": 1}
    with jax.disable_jit():
        for _ in range(2):
            before = model.count
            _, same = step(model, X, extra, mode="sum")
            assert same is model and float(before) == len(seen) - 1  # no buffer was given away
    assert all(parts[0] is model and parts[1] is X and parts[2] is extra and parts[3] == "sum" for parts in seen)
    assert (int(model.count), step.traces, step.reads) == (2, 0, ())


def test_before_between_and_after_compiled_calls():
    model = Counter()
    step = tether.jit(lambda x: model(x))
    for calls in range(1, 6):
        with jax.disable_jit(calls % 2 == 1):
            assert float(step(X)) == expected(calls)
    assert (int(model.count), step.traces) == (5, 1)


def test_failure_writes_nothing():
    model, fail = Slots(), [True]

    @tether.jit(donate_state=True)
    def step(model):
        model.a = model.a + 1
        if fail:
            raise ValueError("stop")

    with jax.disable_jit():
        with pytest.raises(ValueError, match="stop"):
            step(model)
        np.testing.assert_array_equal(model.a, np.ones(3))
        fail.clear()
        step(model)
    np.testing.assert_array_equal(model.a, np.full(3, 2.0))


def test_errors_are_the_same():
    model = Slots()
    step = tether.jit(lambda x, table: x, static_argnums=1)
    lost = tether.jit(lambda model: model.a.sum())
    model.a.delete()
    with jax.disable_jit():
        with pytest.raises(StaticError, match="table"):
            step(1.0, {1, 2})
        with pytest.raises(StateLostError, match=r"a  \(State\)"):
            lost(model)


def test_methods_nested_calls_and_other_transformations():
    class Owner(tether.Module):
        def __init__(self):
            self.counter = Counter()

        @tether.jit
        def step(self, x):
            return self.counter(x)

    owner = Owner()
    outer = tether.jit(lambda owner, x: owner.step(x) + owner.step(x))
    with jax.disable_jit():
        assert float(outer(owner, X)) == expected(1) + expected(2)
        gradient = tether.grad(lambda x: outer(owner, x))(jnp.asarray(X))
        lanes = tether.vmap(owner.step)(jnp.stack([X, 2 * X]))
    np.testing.assert_allclose(gradient, np.broadcast_to(7 * W, (4, 3)), rtol=1e-6)
    np.testing.assert_allclose(lanes, [expected(5), 2 * expected(5)], rtol=1e-6)
    assert (int(owner.counter.count), Owner.step.traces, outer.traces) == (5, 0, 0)
