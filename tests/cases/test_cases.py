# SPDX-License-Identifier: Apache-2.0
"""Faults that people reported against the libraries before this one, each kind as tests with its right values.

The numbers are those of the list of cases that the project keeps; so are the oracles O1, O2, O4 and O5.
"""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tests.cases.common import O1, O1_OUT, RNG, C, X, avals, is_plain, norm_by_hand, stream
from tether import nn
from tether.errors import (
    ShapeError,
    VmapWriteError,
)


class TestCase01DifferentiateTwice:
    @pytest.mark.parametrize("grad", [tether.grad, jax.grad])
    @pytest.mark.parametrize("order", [1, 2])
    def test_second_call_and_fresh_gradient(self, grad, order):
        norm = nn.BatchNorm(4)
        loss = lambda f: lambda x: (f(x) * C).sum() ** 2
        second = lambda grad, f: grad(lambda x: (grad(loss(f))(x) ** 2).sum())
        make = (lambda g, f: g(loss(f))) if order == 1 else second
        right = jax.jit(make(jax.grad, norm_by_hand))(X)
        once = make(grad, norm)
        for calls, gradient in enumerate((once, once, make(grad, norm)), 1):
            np.testing.assert_allclose(gradient(jnp.asarray(X)), right, rtol=2e-3, atol=2e-3)
            np.testing.assert_allclose(norm.mean, X.mean(0) * (1 - 0.9**calls), rtol=1e-4, atol=1e-6)
            assert is_plain(norm)

    def test_nothing_leaks(self):  # the law of the transformations looks at the other kinds
        norm = nn.BatchNorm(4)
        with jax.checking_leaks():
            tether.jit(tether.grad(lambda x: (norm(x) * C).sum()))(X)
        assert is_plain(norm)


class TestCase02StructureStays:
    @pytest.mark.parametrize("mode", ["batch", "ema"])
    def test_first_call_changes_nothing(self, mode):
        model = nn.Sequential([nn.Linear(4, 4), nn.BatchNorm(4, mode=mode), nn.Dropout(0.5)])
        before, snapshot = avals(model), tether.snapshot(model)
        step = tether.jit(lambda model, x: model(x))
        for call in (model, step, tether.grad(lambda x: model(x).sum()), tether.checkpoint(model)):
            call(model, X) if call is step else call(X)
            assert avals(model) == before
        step(model, X)
        assert step.traces == 1
        difference = jax.tree.map(jnp.subtract, model, snapshot)
        assert float(jnp.abs(difference[1].mean).sum()) > 0 and float(jnp.abs(difference[0].weight).sum()) == 0


class TestCase04RandomNumbersForEver:
    draw = staticmethod(lambda: jax.random.uniform(tether.random.draw()))

    def ways(self):
        def helper():
            return self.draw()

        yield self.draw
        yield lambda: helper()
        yield functools.partial(lambda draw: draw(), self.draw)
        yield lambda draw=self.draw: draw()
        yield lambda: tether.vmap(lambda _: self.draw())(jnp.zeros(1))[0]

    def test_three_values_equal_to_eager_ones(self):
        for f in self.ways():
            tether.seed(7)
            eager = [float(f()) for _ in range(3)]
            tether.seed(7)
            jitted = tether.jit(f)
            assert [float(jitted()) for _ in range(3)] == pytest.approx(eager)
            assert len(set(eager)) == 3 and jitted.traces == 1

    def test_own_generator_that_nobody_names(self):
        rng = tether.Rng(3)
        step = tether.jit(lambda: jax.random.uniform(tether.random.draw(rng)))
        assert len({float(step()) for _ in range(3)}) == 3


class TestCase05StaleTrace:
    def test_mode_and_static_settings_are_in_the_key(self):
        model = nn.Sequential([nn.BatchNorm(2), nn.Dropout(0.0)])
        f = tether.jit(lambda model, x: model(x))
        np.testing.assert_allclose(f(model, O1)[:, 0], O1_OUT, atol=1e-4)
        running = (O1 - np.asarray(model[0].mean)) / np.sqrt(np.asarray(model[0].var) + 1e-5)
        np.testing.assert_allclose(f(model.eval(), O1), running, rtol=1e-4)
        np.testing.assert_allclose(f(tether.view(model, nn.Dropout, training=False), O1)[:, 0], O1_OUT, atol=1e-4)
        halved = f(tether.view(model, nn.Dropout, p=0.5), O1)
        assert (np.asarray(halved) == 0).any()

    def test_another_shape_is_an_error(self):
        m = nn.BatchNorm(3)
        f = tether.jit(lambda x: x * m.mean.shape[0])
        assert float(f(1.0)) == 3.0
        with pytest.raises(ShapeError, match=r"(?s)mean.*float32\[7\].*float32\[3\]"):
            m.mean = jnp.zeros(7)
        m = nn.BatchNorm(7)
        assert float(f(1.0)) == 7.0

    def test_another_dtype_is_another_program(self):
        f = tether.jit(lambda m, x: m(x))
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float32):
            linear = nn.Linear(2, 2, dtype=dtype)
            assert f(linear, jnp.ones(2, dtype)).dtype == dtype
        assert f.traces == 2

    def test_a_kind_of_device_change(self):
        m = nn.Linear(2, 2)
        f = tether.jit(m)
        first = f(jnp.ones(2))
        tether.place(m, jax.devices()[1])
        second = f(np.ones(2, np.float32))
        assert second.devices() == {jax.devices()[1]}
        np.testing.assert_allclose(first, second, rtol=1e-6)


class TestCase07To08RunningStatistics:
    def test_training_normalizes_by_the_batch(self):
        norm = nn.BatchNorm(1)
        norm(np.array([[0.0], [1.0]], np.float32))
        np.testing.assert_allclose(norm(np.array([[10.0], [11.0]], np.float32))[:, 0], [-1, 1], atol=1e-4)

    def test_o1(self):
        for variance, var in (("biased", [1.4, 13.4]), ("unbiased", [1.566667, 17.566667])):
            norm = nn.BatchNorm(2, variance=variance)
            np.testing.assert_allclose(tether.jit(norm)(O1)[:, 0], O1_OUT, atol=1e-5)
            np.testing.assert_allclose(norm.mean, [0.4, 2.5], rtol=1e-5)
            np.testing.assert_allclose(norm.var, var, rtol=1e-5)

    def test_running_statistics_carry_no_gradient(self):
        norm = nn.BatchNorm(2)
        f = lambda x: (norm(x), (norm.mean + norm.var).sum())[1]
        np.testing.assert_array_equal(tether.grad(f)(O1), np.zeros_like(O1))

    @pytest.mark.parametrize("steps", [0, 1, 10, 100])
    def test_evaluation_early_in_training(self, steps):
        v = O1.var(0)
        for debias in (False, True):
            norm = nn.BatchNorm(2, debias=debias)
            step = tether.jit(norm)
            for _ in range(steps):
                step(O1)
            if steps == 0:
                np.testing.assert_allclose(norm(O1, training=False), O1, rtol=1e-5)
            elif not debias:
                np.testing.assert_allclose(norm.var, 0.9**steps + (1 - 0.9**steps) * v, rtol=1e-4)
            else:
                out = np.asarray(norm(O1, training=False))
                np.testing.assert_allclose(out.var(0), [1, 1], rtol=1e-4)


class TestCase09Ties:
    class Tied(tether.Module):
        def __init__(self):
            self.enc = nn.Linear(2, 2, use_bias=False)
            self.dec = nn.Linear(2, 2, use_bias=False)
            self.dec.weight = tether.cell(self.enc, "weight")

    def tied(self):
        tied = self.Tied()
        tied.dec.weight = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        return tied

    loss = staticmethod(lambda t: (jnp.ones((1, 2)) @ t.enc.weight @ t.dec.weight).sum())

    def check(self, tied, value):
        assert len(jax.tree.leaves(tied)) == 1 == len(tether.variables(tied))
        np.testing.assert_allclose(tied.enc.weight, value)
        tied.enc.weight = 2 * jnp.asarray(value)
        np.testing.assert_allclose(tied.dec.weight, 2 * jnp.asarray(value))

    def test_one_gradient_one_slot_one_step(self):
        tied = self.tied()
        optimizer = tether.Optimizer(tied, optax.adam(0.1))
        assert optimizer.paths == ("enc.weight",)

        @tether.jit
        def step(tied, optimizer):
            gradient = tether.grad(self.loss)(tied)
            optimizer.update(gradient)
            return gradient

        gradient = step(tied, optimizer)
        np.testing.assert_array_equal(gradient.enc.weight, [[7, 11], [9, 13]])
        np.testing.assert_array_equal(gradient.dec.weight, [[7, 11], [9, 13]])
        np.testing.assert_allclose(tied.enc.weight, np.array([[0.9, 1.9], [2.9, 3.9]]), rtol=1e-5)

    @pytest.mark.parametrize(
        "operation",
        [
            *[tether.clone, copy.deepcopy, tether.snapshot, lambda t: jax.tree.map(lambda v: v, t)],
            *[
                tether.jit(lambda t: jax.tree.map(lambda v: v, t)),
                lambda t: t.eval(),
                lambda t: tether.freeze(t, "enc"),
            ],
            *[
                lambda t: tether.index(tether.stack([t, t]), 1),
                lambda t: tether.combine(*tether.partition(t, tether.State)),
            ],
        ],
    )
    def test_survives(self, operation):
        self.check(operation(self.tied()), [[1, 2], [3, 4]])

    def test_survives_pickle(self):
        model = nn.Sequential([nn.Linear(2, 2), nn.Linear(2, 2)])
        model = tether.replace(model, {"[1].weight": tether.cell(model, "[0].weight")})
        again = pickle.loads(pickle.dumps(model))
        assert len(jax.tree.leaves(again)) == 3
        again[0].weight = jnp.ones((2, 2))
        np.testing.assert_array_equal(again[1].weight, np.ones((2, 2)))

    def test_under_a_vmap_ensemble(self):
        stacked = tether.stack([self.tied(), self.tied()])
        gradient = tether.vmap(lambda t: tether.grad(self.loss)(t))(stacked)
        np.testing.assert_array_equal(gradient.dec.weight[1], [[7, 11], [9, 13]])
        assert len(jax.tree.leaves(gradient)) == 1


class TestCase11And19SharedUnderVmap:
    @pytest.mark.parametrize("size", [3, 5])
    def test_shape_of_state_never_decides_and_never_grows(self, size):
        s = tether.State(jnp.zeros(size))

        def f(x):
            s.value = s.value + x.sum()

        for call in (tether.vmap(f), tether.jit(tether.vmap(f)), tether.vmap(f)):
            with pytest.raises(VmapWriteError, match=r"(?s)mean.*stack.*discard"):
                call(jnp.ones((5, 2)))
            assert s.value.shape == (size,) and float(s.value.sum()) == 0

    def test_declared_reduction_is_the_same_cold_and_warm(self):
        s = tether.State(jnp.zeros(3), reduce="sum")

        def f(x):
            s.value = s.value + x.sum()

        for _ in range(3):
            tether.vmap(f)(jnp.ones((5, 2)))
        np.testing.assert_array_equal(s.value, np.full(3, 10 * (1 + 5 + 25)))

    def test_batchnorm_without_the_axis_names_layer_axis_and_choices(self):
        norm = nn.Sequential([nn.BatchNorm(4)])
        x = RNG.normal(size=(3, 8, 4)).astype(np.float32)
        with pytest.raises(VmapWriteError, match=r"(?s)\[0\]\.mean.*'rows'.*reduce.*stack.*discard"):
            tether.vmap(norm, axis_name="rows")(x)
        assert is_plain(norm) and norm[0].mean.shape == (4,)


class TestCase12OnlyParametersMove:
    def model(self):
        class Net(tether.Module):
            def __init__(self):
                self.linear = nn.Linear(4, 4, key=jax.random.key(0))
                self.plain = nn.Linear(4, 4, use_bias=False, key=jax.random.key(1))
                self.norm = nn.BatchNorm(4)
                self.steps, self.rng = tether.State(0), tether.Rng(0)
                self.act, self.flag, self.width = jnp.tanh, True, 4
                self.table = tether.Constant(jnp.arange(4.0))

            def __call__(self, x):
                return self.act(self.norm(self.plain(self.linear(x)))) * self.table[None]

        return Net()

    @pytest.mark.parametrize("tx", [optax.adamw(0.1, weight_decay=0.5), optax.sgd(0.1), optax.lbfgs(), optax.adam(0.1)])
    def test_state_is_bit_identical(self, tx):
        model = tether.freeze(self.model(), "plain")
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
        optimizer = tether.Optimizer(model, tx)
        assert set(optimizer.paths) == {"linear.weight", "linear.bias", "norm.weight", "norm.bias"}

        @tether.jit
        def step(model, optimizer):
            value, gradient = tether.value_and_grad(lambda model: (model(X) * C).sum())(model)
            optimizer.update(gradient, value=value, grad=gradient, value_fn=lambda params: value)

        before = tether.snapshot(model)
        step(model, optimizer)
        np.testing.assert_allclose(model.norm.mean, 0.1 * np.asarray(before.plain(before.linear(X))).mean(0), atol=1e-5)
        moved = set(tether.diff(before, model))
        assert moved <= {*optimizer.paths, "norm.mean", "norm.var"} and "linear.weight" in moved

    def test_gradients_of_zero(self):
        model = self.model()
        optimizer = tether.Optimizer(model, optax.sgd(0.1))
        before = tether.snapshot(model)
        optimizer.update(jax.tree.map(jnp.zeros_like, tether.grad(lambda m: (m(X) * C).sum())(model)))
        assert set(tether.diff(before, model)) <= {"norm.mean", "norm.var"}


class TestCase13Variance:
    def test_o4_and_a_constant_channel_and_float16(self):
        column = np.array([[4096.0], [4097.0], [4098.0], [4099.0]], np.float32)
        for f in (nn.BatchNorm(1), tether.jit(nn.BatchNorm(1))):
            np.testing.assert_allclose(f(column)[:, 0], [-1.34164, -0.44721, 0.44721, 1.34164], atol=1e-4)
            np.testing.assert_array_equal(f(np.full((4, 1), 1e7, np.float32)), np.zeros((4, 1)))
        half = (60000 + np.arange(4) * 32).astype(np.float16)[:, None]
        norm = nn.BatchNorm(1)
        assert np.isfinite(norm(half)).all() and np.isfinite(norm.var).all()


class TestCase16Masks:
    def test_all_differ(self):
        a, b = nn.Dropout(0.5), nn.Dropout(0.5)
        x = jnp.ones(32)
        step = tether.jit(lambda x: a(x))
        mapped = tether.vmap(lambda x: a(x))
        masks = [a(x), b(x), a(x), tether.clone(a)(x), step(x), step(x), *mapped(jnp.ones((4, 32)))]
        masks += [*tether.jit(mapped)(jnp.ones((4, 32))), *mapped(jnp.ones((4, 32)))]
        masks = np.stack(masks)
        assert len(np.unique(masks, axis=0)) == len(masks) == 18

    def test_same_seed_same_masks_jitted_or_not(self):
        dropout = nn.Dropout(0.5)
        program = lambda f: [np.asarray(f(jnp.ones(32))) for _ in range(3)]
        eager = program(dropout)
        tether.seed(0)
        np.testing.assert_array_equal(program(tether.jit(dropout)), eager)

    def test_evaluation_never_draws(self):
        dropout = nn.Dropout(0.5).eval()
        before = stream()
        for f in (dropout, tether.jit(dropout), tether.vmap(dropout), tether.vmap(tether.jit(dropout))):
            f(jnp.ones((2, 4)))
            np.testing.assert_array_equal(stream(), before)


class TestCase17Rematerialization:
    @pytest.mark.parametrize("wrap", [tether.checkpoint, lambda m: tether.checkpoint(tether.checkpoint(m))])
    def test_state_moves_once_and_masks_agree(self, wrap):
        def run(wrap):
            tether.seed(0)
            model = nn.Sequential([nn.BatchNorm(4), nn.Dropout(0.5)])
            layer = wrap(model)
            loss = lambda x: (layer(x) ** 2 * C).sum()
            value = tether.value_and_grad(loss)(X)
            return [*value, tether.grad(lambda x: (tether.grad(loss)(x) ** 2).sum())(X), model[0].mean, stream()]

        for got, wanted in zip(run(wrap), run(lambda m: m), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(run(wrap)[3], X.mean(0) * (1 - 0.9**2), rtol=1e-5)
