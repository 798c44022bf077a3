# SPDX-License-Identifier: Apache-2.0
"""Plain JAX transformations of functions that come by a module: right, or an error; never a stored tracer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import PlainTransformError

X = np.array([[0.5, -1.0], [2.0, 1.5], [1.0, 3.0]], np.float32)
C = np.array([[1.0, -2.0], [0.5, 1.0], [-1.0, 3.0]], np.float32)


def norm_by_hand(x):
    mean, var = x.mean(0, keepdims=True), x.var(0, keepdims=True)
    return (((x - mean) / jnp.sqrt(var + 1e-5)) * C).sum()


class Net(tether.Module):
    def __init__(self):
        self.w = tether.Param(2.0)
        self.s = tether.State(1.0)

    def read(self, x):
        return self.w * x.sum()

    def write(self, x):
        self.s = 3.0
        return x.sum()

    def both(self, x):
        self.s = self.s + 1
        return self.w * x.sum()


def is_plain(model) -> bool:
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model))


class TestEager:
    @pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, jax.jacrev, jax.jacfwd])
    def test_gradient_twice_and_fresh(self, transform):
        norm = nn.BatchNorm(2)
        loss = lambda x: (norm(x) * C).sum()
        right = jax.grad(norm_by_hand)(jnp.asarray(X))
        mean, var = np.zeros(2), np.ones(2)
        first = transform(loss)
        with jax.checking_leaks():
            for call in (first, first, transform(loss)):
                out = call(jnp.asarray(X))
                np.testing.assert_allclose(jax.tree.leaves(out)[-1], right, rtol=1e-4, atol=1e-5)
                mean, var = 0.9 * mean + 0.1 * X.mean(0), 0.9 * var + 0.1 * X.var(0)
                np.testing.assert_allclose(norm.mean, mean, rtol=1e-5)
                np.testing.assert_allclose(norm.var, var, rtol=1e-5)
                assert is_plain(norm)

    def test_hessian_and_vjp(self):
        net = Net()
        f = lambda x: net.both(x) ** 2
        np.testing.assert_allclose(jax.hessian(f)(jnp.ones(2)), np.full((2, 2), 8.0))
        assert float(net.s) == 2.0
        out, pull = jax.vjp(f, jnp.ones(2))
        np.testing.assert_allclose(pull(jnp.float32(1))[0], [16.0, 16.0])
        assert float(net.s) == 3.0 and is_plain(net)

    def test_grad_of_a_model_as_argument_is_a_copy(self):
        net = Net()
        gradient = jax.grad(lambda net: net.read(X))(net)
        assert isinstance(gradient, Net) and gradient is not net
        assert float(gradient.w) == pytest.approx(X.sum())
        assert is_plain(net)

    def test_read_of_a_value_with_a_tangent_raises(self):
        net = Net()

        def f(x):
            net.s = net.s * x
            return net.s * x  # the gradient through s would be lost

        with pytest.raises(PlainTransformError, match=r"(?s)s  \(State\).*tether\.grad"):
            jax.grad(f)(2.0)
        assert is_plain(net)
        net.s = 1.0
        assert float(tether.grad(f)(2.0)) == 4.0

    def test_vmap_reads_and_equal_writes(self):
        net = Net()
        for _ in range(2):
            np.testing.assert_allclose(jax.vmap(net.both)(X), 2 * X.sum(1))
        assert float(net.s) == 3.0 and net.s.shape == () and is_plain(net)

    def test_vmap_write_that_differs_raises(self):
        net = Net()

        def f(x):
            net.s = x.sum()
            return x

        with pytest.raises(PlainTransformError, match=r"(?s)s  \(State\).*tether\.vmap"):
            jax.vmap(f)(X)
        assert float(net.s) == 1.0

    def test_vmap_over_a_named_axis(self):
        norm = nn.BatchNorm(2, axis_name="batch")
        for calls in (1, 2):
            jax.vmap(norm, axis_name="batch")(X)
            np.testing.assert_allclose(norm.mean, X.mean(0) * (1 - 0.9**calls), rtol=1e-5)
            assert norm.mean.shape == (2,) and is_plain(norm)

    def test_grad_of_vmap(self):
        norm = nn.BatchNorm(2, axis_name="batch")
        loss = lambda x: (jax.vmap(norm, axis_name="batch")(x) * C).sum()
        for _ in range(2):
            np.testing.assert_allclose(
                jax.grad(loss)(jnp.asarray(X)), jax.grad(norm_by_hand)(jnp.asarray(X)), rtol=1e-4, atol=1e-5
            )
        np.testing.assert_allclose(norm.mean, X.mean(0) * 0.19, rtol=1e-5)


HELPERS = {
    "jit": lambda net: jax.jit(lambda x: net.w**2 * x),
    "scan": lambda net: lambda x: jax.lax.scan(lambda c, _: (c * net.w, None), x, None, length=2)[0],
    "cond": lambda net: lambda x: jax.lax.cond(True, lambda x: net.w**2 * x, lambda x: x, x),
}


class TestStaged:
    """The table of ``test_plain_table.py`` has the transformations one by one."""

    def test_stateless_and_own_modules_just_work(self):
        relu = nn.Lambda(jnp.abs)
        np.testing.assert_allclose(jax.jit(relu)(X), np.abs(X))

        @jax.jit
        def make(x):
            return nn.Linear(2, 1, key=jax.random.key(0))(x)

        np.testing.assert_allclose(make(X), nn.Linear(2, 1, key=jax.random.key(0))(X), rtol=1e-5)
        made = jax.jit(lambda: nn.Linear(2, 1, key=jax.random.key(0)))()
        assert is_plain(made) and made(X).shape == (3, 1)

    def test_jitted_function_without_state_inside_plain_jit(self):
        double = tether.jit(lambda x: 2 * x)
        np.testing.assert_allclose(jax.jit(lambda x: double(x) + 1)(X), 2 * X + 1)
        np.testing.assert_allclose(jax.lax.map(double, jnp.asarray(X)), 2 * X)

    def test_model_as_an_argument_is_a_value(self):
        net = Net()
        assert float(jax.jit(lambda net, x: net.read(x))(net, X)) == pytest.approx(2 * X.sum())
        out = jax.jit(lambda net: jax.tree.map(lambda v: v * 2, net))(net)
        assert float(out.w) == 4.0 and float(net.w) == 2.0
        carried, _ = jax.lax.scan(lambda net, row: (jax.tree.map(lambda v: v + 1, net), None), net, X)
        assert float(carried.s) == 4.0

    def test_batchnorm_in_a_jitted_loss(self):
        norm = nn.BatchNorm(2)
        loss = lambda x: (norm(x) * C).sum()
        right = jax.grad(norm_by_hand)(jnp.asarray(X))
        for calls, grad in enumerate([jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss)), tether.grad(loss)], 1):
            np.testing.assert_allclose(grad(jnp.asarray(X)), right, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(norm.mean, X.mean(0) * (1 - 0.9**calls), rtol=1e-5)

    def test_dropout_draws_another_mask_on_each_call(self):
        dropout = nn.Dropout(0.5)
        apply = jax.jit(dropout)
        with tether.random.scope(jax.random.key(0)):  # not the default stream, which would stay in a Ref
            masks = [np.asarray(apply(jnp.ones(64))) for _ in range(2)]
        assert (masks[0] != masks[1]).any()
        with tether.random.scope(jax.random.key(0)):
            by_hand = [np.asarray(dropout(jnp.ones(64))) for _ in range(2)]
        np.testing.assert_array_equal(masks, by_hand)

    @pytest.mark.parametrize("name", HELPERS)
    def test_a_gradient_flows_through_a_plain_helper(self, name: str):
        """Of the Variables that tether.grad differentiates, though JAX has the helper in its caches."""
        net = Net()
        helper = HELPERS[name](net)
        gradient = lambda: tether.grad(lambda net: helper(1.0))(net).w
        for w in (2.0, 3.0):
            net.w = w
            assert float(helper(1.0)) == w**2  # by itself: it reads a Ref from here on
            assert float(gradient()) == float(tether.jit(gradient)()) == 2 * w

    def test_a_helper_sees_what_was_written_before_it(self):
        net = Net()
        helper = jax.jit(lambda x: net.s * x)

        @tether.jit
        def twice(x):
            net.s = net.s + 1
            first = helper(x)
            net.s = net.s + 1
            return first, helper(x)

        assert [float(y) for y in twice(1.0)] == [2, 3]
        assert float(helper(1.0)) == 3
        assert [float(y) for y in twice(1.0)] == [4, 5]
        assert [float(y) for y in tether.jit(twice)(1.0)] == [6, 7]

    def test_a_rule_of_its_own_can_not_close_over_what_is_differentiated(self):
        net = Net()
        f = jax.custom_vjp(lambda x: net.w * x)
        f.defvjp(lambda x: (net.w * x, None), lambda _, ct: (ct,))
        with pytest.raises(PlainTransformError, match=r"(?s)rule of its own.*w  \(Param\)"):
            tether.grad(lambda net: f(1.0))(net)
        assert float(tether.jit(lambda: f(1.0))()) == 2


class TestBornInside:
    """A module that came by value, or was made, in a plain trace, and is used in another one inside that."""

    @pytest.mark.parametrize("around", [jax.jit, lambda f: f, lambda f: tether.jit(f)], ids=["jit", "eager", "tether"])
    def test_scan_reads_it(self, around):
        @around
        def f(net, x):
            loss = lambda net: jax.lax.scan(lambda c, row: (c + net.w * row.sum(), None), 0.0, x)[0]
            return loss(net), jax.grad(loss)(net).w

        net = Net()
        for w in (2.0, 3.0):
            net.w = w
            np.testing.assert_allclose(f(net, X), (w * X.sum(), X.sum()), rtol=1e-6)

    def test_a_write_after_that_raises(self):
        def f(net, x):
            body = lambda c, row: (c + net.s * row.sum(), None)
            first = jax.lax.scan(body, 0.0, x)[0]
            net.s = net.s + 1
            return first, jax.lax.scan(body, 0.0, x)[0], net  # here JAX would find the first trace again

        with pytest.raises(PlainTransformError, match=r"(?s)after a plain.*s  \(State\)"):
            jax.jit(f)(Net(), X)
        net = Net()
        first, second, _ = tether.jit(f)(net, X)
        np.testing.assert_allclose((first, second), (X.sum(), 2 * X.sum()), rtol=1e-6)

    def test_a_write_in_a_scan_of_it_raises(self):
        def f(net, x):
            return jax.lax.scan(lambda c, row: (c + net.both(row), None), 0.0, x)[0]

        with pytest.raises(PlainTransformError, match=r"(?s)lax.scan.*s  \(State\)"):
            jax.jit(f)(Net(), X)


def test_a_smuggled_module_raises_with_its_birthplace():
    kept = []

    @jax.jit
    def f(x):
        linear = nn.Linear(2, 1, key=jax.random.key(0))
        linear.weight = linear.weight * x.sum()
        kept.append(linear)
        return linear(x)

    f(X)
    with pytest.raises(tether.errors.LeakError, match=r"(?s)weight.*test_plain\.py"):
        _ = kept[0].weight
