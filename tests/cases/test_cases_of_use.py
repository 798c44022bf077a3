# SPDX-License-Identifier: Apache-2.0
"""Faults that users of other libraries met, by number: arguments, failures, drift, discovery, compilation, modes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tests.cases.common import O1, C, X, stream
from tether import nn
from tether.errors import (
    ArgumentError,
    DtypeError,
    PlainTransformError,
    ShapeError,
    StaticError,
)


class TestCase18ArgumentNumbers:
    class Model(tether.Module):
        def __init__(self):
            self.w = tether.Param(2.0)

        def run(self, x, train):
            return self.w * x if train else x

    def test_zero_is_honored_and_self_is_not_counted(self):
        run = self.Model().run
        assert float(tether.grad(run, argnums=0)(3.0, True)) == 2.0
        assert float(tether.grad(run, argnums=-2)(3.0, False)) == 1.0
        for options in ({"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": "train"}, {}):
            step = tether.jit(run, **options)
            assert [float(step(3.0, flag)) for flag in (True, False)] == [6.0, 3.0]

    @pytest.mark.parametrize("number", [2, -3, True, "nobody"])
    def test_wrong_ones_print_the_signature(self, number):
        run = self.Model().run
        for make in (lambda: tether.grad(run, argnums=number), lambda: tether.jit(run, static_argnums=number)):
            with pytest.raises(ArgumentError, match=r"run\(x, train\)"):
                make()(3.0, True)


class TestCase20FailureInTheMiddle:
    @pytest.mark.parametrize("stop", [ValueError("stop"), KeyboardInterrupt()], ids=["error", "interrupt"])
    @pytest.mark.parametrize(
        "wrap",
        [
            *[tether.jit, tether.grad, tether.vmap, tether.checkpoint],
            *[lambda f: tether.jit(tether.grad(f)), lambda f: functools.partial(tether.eval_shape, f)],
            *[lambda f: tether.grad(tether.checkpoint(f)), lambda f: tether.jit(f, donate_state=True), tether.uses],
        ],
    )
    def test_everything_is_as_before(self, wrap, stop):
        model = nn.Sequential([nn.BatchNorm(4), nn.Dropout(0.5)])
        stopping = [stop]

        def f(x):
            y = model(x.reshape(-1, 4))
            if stopping:
                raise stopping[0]
            return y.sum()

        before, key = jax.tree.leaves(model), stream()
        x = np.stack([np.stack([X, X]), np.stack([X, X])])
        call = wrap(f)
        for _ in range(2):
            with pytest.raises(type(stop)):
                call(x)
            assert all(a is b for a, b in zip(jax.tree.leaves(model), before, strict=True))
            np.testing.assert_array_equal(stream(), key)
        stopping.clear()
        mean = X.mean(0)
        tether.jit(f)(X)
        np.testing.assert_allclose(model[0].mean, 0.1 * mean, rtol=1e-4, atol=1e-6)


class TestCase21Shared:
    def test_o2_two_calls_in_program_order(self):
        class Siamese(tether.Module):
            def __init__(self):
                self.left = nn.BatchNorm(1)
                self.right = self.left

            def __call__(self, a, b):
                return self.left(a), self.right(b)

        two, four = np.full((4, 1), 2.0, np.float32), np.full((4, 1), 4.0, np.float32)
        for wrap in (lambda f: f, tether.jit, tether.checkpoint):
            model = Siamese()
            assert len(jax.tree.leaves(model)) == 4
            wrap(model)(two, four)
            np.testing.assert_allclose(model.left.mean, [0.58], rtol=1e-5)
        for other in (tether.clone(model), jax.tree.map(lambda v: v, model), pickle.loads(pickle.dumps(model.left))):
            part = other.left if hasattr(other, "left") else other
            assert part.mean.shape == (1,)
        cloned = tether.clone(model)
        cloned(two, four)
        np.testing.assert_array_equal(cloned.left.mean, cloned.right.mean)


class TestCase22Drift:
    @pytest.mark.mixed_dtypes
    def test_dtype_is_kept_and_weak_types_stripped(self):
        s = tether.State(jnp.zeros(2, jnp.float16))

        @tether.jit
        def step():
            s.value = 0.9 * s.value + 0.1 * jnp.ones(2, jnp.float32)

        for _ in range(3):
            step()
            assert s.value.dtype == jnp.float16
        assert step.traces == 1
        for initial in (0, 0.0, True, 1j):
            assert not tether.State(initial).value.weak_type

    @pytest.mark.parametrize("wrap", [lambda f: f, tether.jit, tether.checkpoint])
    def test_lossy_writes_and_shapes_raise(self, wrap):
        count, scalar = tether.State(0), tether.State(0.0)

        def lossy():
            count.value = count.value + 1.5

        def shape():
            scalar.value = scalar.value + jnp.ones(3)

        with pytest.raises(DtypeError, match=r"(?s)int32\[\].*fix"):
            wrap(lossy)()
        with pytest.raises(ShapeError, match=r"(?s)float32\[3\].*float32\[\]"):
            wrap(shape)()
        assert (int(count.value), float(scalar.value)) == (0, 0.0)

    def test_x64(self):
        with jax.enable_x64(True):
            s = tether.State(np.zeros(2))
            assert s.value.dtype == jnp.float64
            s.value = jnp.ones(2, jnp.float32)
            assert s.value.dtype == jnp.float64


class TestCase23HalfPrecision:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_statistics_stay_float32(self, dtype):
        norm = nn.BatchNorm(2)
        step = tether.jit(norm)
        x = (O1 * 100).astype(dtype)
        for _ in range(3):
            assert step(x).dtype == dtype
        assert norm.mean.dtype == norm.var.dtype == jnp.float32
        assert float(norm.var[1]) > 65504 * 0.27 and np.isfinite(norm.var).all()
        assert step.traces == 1


LOOKUP: dict = {}


class TestCase33Discovery:
    def test_containers_everywhere(self):
        @dataclasses.dataclass
        class Box:
            net: tether.Module

        Named = collections.namedtuple("Named", ["net"])

        class Registry:
            def __init__(self, net):
                self._net = net

            @property
            def net(self):
                return self._net

        for wrap, take in [
            (lambda m: [m], lambda c: c[0]),
            (lambda m: {"a": m}, lambda c: c["a"]),
            (lambda m: (1, (m,)), lambda c: c[1][0]),
            (Box, lambda c: c.net),
            (Named, lambda c: c.net),
            (Registry, lambda c: c.net),
        ]:
            linear = nn.Linear(4, 4)
            held = wrap(linear)
            step = tether.jit(lambda x, held=held, take=take: take(held)(x))
            step(X)
            linear.weight = jnp.zeros((4, 4))
            np.testing.assert_array_equal(step(X), np.broadcast_to(linear.bias, (8, 4)))

    def test_lists_and_dicts_of_layers_are_parameters(self):
        class Net(tether.Module):
            def __init__(self):
                self.layers = [nn.Linear(2, 2) for _ in range(3)]
                self.heads = {"b": nn.Linear(2, 1), "a": nn.Linear(2, 1)}

        class Other(tether.Module):
            def __init__(self):
                self.layers = [nn.Linear(2, 2) for _ in range(3)]
                self.heads = {"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}

        assert len(tether.variables(Net(), tether.Param)) == 10
        assert list(tether.variables(Net())) == list(tether.variables(Other()))

    def test_what_only_reading_finds_is_said(self):
        nets = iter([nn.Linear(4, 4)])
        cache = {}

        class Lazy:
            __slots__ = ()

            def __call__(self, x):
                net = LOOKUP.setdefault("net", cache.get("net"))
                return net(x)

        cache["net"] = next(nets)
        step = tether.jit(Lazy().__call__)
        first = step(X)
        cache["net"].weight = jnp.zeros((4, 4))
        assert (np.asarray(step(X)) != np.asarray(first)).any()


class TestCase35Recompilation:
    def test_instances_steps_rates_and_modes(self):
        @tether.jit
        def step(model, optimizer, x, lr, i):
            gradient = tether.grad(lambda m: (m(x) * C).sum() * lr)(model)
            optimizer.update(gradient)
            return i + 1

        for seed in range(5):
            key = jax.random.key(seed)
            model = nn.Sequential([nn.Linear(4, 4, key=key), nn.Lambda(lambda h: jnp.maximum(h, 0)), nn.BatchNorm(4)])
            optimizer = tether.Optimizer(model, optax.adam(1e-3))
            for i in range(3):
                assert int(step(model, optimizer, X, 0.1 * i, i)) == i + 1
        assert step.traces == 1

    def test_two_modes_are_two_programs(self):
        model = nn.Sequential([nn.BatchNorm(4), nn.Dropout(0.1)])
        step = tether.jit(lambda model, x: model(x))
        for _ in range(100):
            step(model.train(), X), step(model.eval(), X)
        assert step.traces == 2

    def test_unhashable_and_array_settings_are_named(self):
        class Bad(tether.Module):
            def __init__(self, value):
                self.table = value

        with pytest.raises(StaticError, match=r"table"):
            tether.jit(lambda m: 1)(Bad({1, 2}))
        with pytest.raises(tether.errors.DeclarationError, match=r"(?s)table.*Param.*State.*Constant"):
            Bad(np.ones(3))


class TestCase36Overhead:
    def test_a_warm_call_writes_only_what_was_written(self, monkeypatch):
        model = nn.Sequential([nn.Linear(4, 4) for _ in range(20)] + [nn.BatchNorm(4)])
        step = tether.jit(lambda model, x: model(x))
        step(model, X)
        before = jax.tree.leaves(model)
        step(model, X)
        after = jax.tree.leaves(model)
        changed = [path for path, a, b in zip(tether.variables(model), before, after, strict=True) if a is not b]
        assert changed == ["[20].mean", "[20].var"]

    def test_a_warm_call_walks_no_module(self, monkeypatch):
        from tether._core import structure

        model = nn.Sequential([nn.Linear(4, 4), nn.BatchNorm(4)])
        for step in (tether.jit(lambda x: model(x)), tether.jit(lambda x, m=model: m(x))):
            step(X)
            with monkeypatch.context() as patch:
                patch.setattr(structure.Survey, "__init__", lambda *_: pytest.fail("walked a module"))
                step(X)


class TestCase55Mode:
    def test_one_mode_readable_and_scoped(self):
        model = nn.Sequential([nn.BatchNorm(4), nn.Sequential([nn.Dropout(0.5)])])
        assert model.training and not model.eval().training and not model.eval()[1][0].training
        frozen = tether.view(model, "[0]", training=False)
        assert not frozen[0].training and frozen[1].training and not frozen.train()[0].training
        assert not tether.clone(model.eval()).training

    def test_rows_are_independent_in_evaluation(self):
        model = nn.Sequential([nn.Linear(4, 4), nn.BatchNorm(4), nn.Dropout(0.5)])
        model(X)
        for f in (model.eval(), tether.jit(model.eval()), lambda x: model(x, training=False)):
            whole = np.asarray(f(X))
            np.testing.assert_allclose(f(X[2:3]), whole[2:3], rtol=1e-5, atol=1e-6)
        assert model.training


class TestCase56WrongShapes:
    def test_rank_and_channels_with_path(self):
        model = nn.Sequential([nn.Linear(4, 3), nn.BatchNorm(4)])
        for f in (model, tether.jit(model), tether.grad(lambda x: model(x).sum())):
            with pytest.raises(ShapeError, match=r"(?s)\[1\].*got:.*expected:"):
                f(X)
        with pytest.raises(ShapeError, match="BatchNorm"):
            nn.BatchNorm(4)(X[0])
        with pytest.raises(ShapeError, match=r"Linear"):
            tether.vmap(nn.Linear(3, 2))(X)


class TestCase57BatchOfOne:
    def test_an_error_and_nothing_moves(self):
        norm = nn.BatchNorm(4)
        for f in (norm, tether.jit(norm), tether.grad(lambda x: norm(x).sum())):
            with pytest.raises(ShapeError, match="two or more"):
                f(X[:1])
        np.testing.assert_array_equal(norm.var, np.ones(4))
        np.testing.assert_allclose(norm(X[:1], training=False), X[:1], rtol=1e-4)

    def test_torch_preset_ten_steps_by_hand(self):
        norm, step = (layer := nn.BatchNorm.preset("torch", 2)), tether.jit(layer)
        mean, var = np.zeros(2), np.ones(2)
        for i in range(10):
            x = O1 * (i + 1)
            step(x)
            mean, var = 0.9 * mean + 0.1 * x.mean(0), 0.9 * var + 0.1 * x.var(0, ddof=1)
        np.testing.assert_allclose(norm.mean, mean, rtol=1e-5)
        np.testing.assert_allclose(norm.var, var, rtol=1e-5)
        np.testing.assert_allclose(norm(O1, training=False), (O1 - mean) / np.sqrt(var + 1e-5), rtol=1e-4)


class TestCase03ForeignTransforms:
    def test_never_silence(self):
        norm = nn.BatchNorm(4)
        with pytest.raises(PlainTransformError, match=r"(?s)checkpoint.*tether\.checkpoint"):
            jax.checkpoint(lambda x: norm(x))(X)
        np.testing.assert_array_equal(norm.mean, np.zeros(4))
        jax.jit(lambda x: norm(x))(X)  # delivered
        np.testing.assert_allclose(norm.mean, 0.1 * X.mean(0), rtol=1e-4, atol=1e-6)
        tether.jit(norm)(X)
        np.testing.assert_allclose(norm.mean, 0.19 * X.mean(0), rtol=1e-4, atol=1e-6)
