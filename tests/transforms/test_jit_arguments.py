# SPDX-License-Identifier: Apache-2.0
"""jit: static and dynamic arguments, results, reports, modes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.jit_models import Counter, W, X, expected
from tether import nn
from tether.errors import ArgumentError, StaticError


class TestStaticArguments:
    def f(self, x, mode, n=1, *, flip=False):
        return (-1 if flip else 1) * n * (x.sum() if mode == "sum" else x.mean())

    @pytest.mark.parametrize(
        "options",
        [{"static_argnums": (1, 2)}, {"static_argnums": (-2, -1)}, {"static_argnames": ("mode", "n")}, {}],
    )
    def test_by_number_and_by_name(self, options):
        step = tether.jit(self.f, **options)
        assert float(step(X, "sum", 3)) == 3 * X.sum()
        assert float(step(X, "mean", 3)) == pytest.approx(3 * X.mean())
        assert step.traces == 2
        assert float(step(X, "sum", 2)) == 2 * X.sum()
        assert step.traces == (3 if options else 2)  # without options, the int n is dynamic
        assert float(step(X, "sum", 3)) == 3 * X.sum()
        assert step.traces == (3 if options else 2)

    def test_numbers_are_those_of_the_call_of_a_method(self):
        class Net(tether.Module):
            def __init__(self):
                self.w = tether.Param(jnp.ones(3))

            def run(self, x, times):
                for _ in range(times):
                    x = x * self.w * 2
                return x.sum()

        net = Net()
        step = tether.jit(net.run, static_argnums=1)
        assert float(step(jnp.ones(3), 3)) == 24.0
        assert float(step(jnp.ones(3), 1)) == 6.0

    def test_keyword_only_and_bool(self):
        step = tether.jit(self.f)
        assert float(step(X, "sum", flip=True)) == -X.sum()
        assert float(step(X, "sum", flip=False)) == X.sum()
        assert step.traces == 2

    def test_equal_statics_share(self):
        step = tether.jit(lambda x, shape: x.reshape(shape), static_argnames="shape")
        step(X, shape=(3, 4)), step(X, shape=tuple(iter((3, 4)))), step(X, (3, 4))
        assert step.traces <= 2

    def test_static_one_and_true_are_not_the_same(self):
        step = tether.jit(lambda x, n: x * (10 if n is True else 1), static_argnums=1)
        assert float(step(1.0, True)) == 10.0
        assert float(step(1.0, 1)) == 1.0

    def test_unknown_number_prints_the_signature(self):
        def step(x, mode):
            return x

        with pytest.raises(ArgumentError, match=r"step\(x, mode\)"):
            tether.jit(step, static_argnums=2)(X, "sum")
        with pytest.raises(ArgumentError, match=r"step\(x, mode\)"):
            tether.jit(step, static_argnums=-3)(X, "sum")

    def test_unknown_name_raises_at_once(self):
        with pytest.raises(ArgumentError, match="static_argnames"):
            tether.jit(lambda x: x, static_argnames="mode")

    def test_unhashable_static_names_the_argument(self):
        step = tether.jit(lambda x, table: x, static_argnames="table")
        with pytest.raises(StaticError, match="table"):
            step(X, bytearray())
        with pytest.raises(StaticError, match="table"):
            step(X, table=set())


class TestDynamicArguments:
    def test_numbers_in_builtin_containers_are_dynamic(self):
        step = tether.jit(lambda tree: tree["a"][0] * 2 + tree["b"])
        assert [float(step({"a": (i,), "b": 0.5 * i})) for i in range(4)] == [2.5 * i for i in range(4)]
        assert step.traces == 1

    def test_learning_rate_sweep(self):
        model = Counter()

        @tether.jit
        def step(model, lr):
            model.weight = model.weight - lr

        for i in range(5):
            step(model, 0.1 * i)
        np.testing.assert_allclose(model.weight, W - 1.0, atol=1e-6)
        assert step.traces == 1

    def test_scalars_of_different_kinds_keep_their_dtype(self):
        step = tether.jit(lambda x: x * 1)
        for value in (1, 1.0, 1j, np.float32(1), np.int16(1), np.ones(2), jnp.ones(2, jnp.bfloat16)):
            assert step(value).dtype == jax.jit(lambda x: x * 1)(value).dtype
            assert step(value).weak_type == jax.jit(lambda x: x * 1)(value).weak_type

    def test_none_and_structure_are_static(self):
        step = tether.jit(lambda x, y=None: x if y is None else x + y)
        assert [float(step(1.0)), float(step(1.0, None)), float(step(1.0, 2.0))] == [1.0, 1.0, 3.0]

    def test_flags_in_foreign_nodes_are_static(self):
        @jax.tree_util.register_pytree_node_class
        class Config:
            def __init__(self, x, flag):
                self.x, self.flag = x, flag

            def tree_flatten(self):
                return (self.x, self.flag), None

            @classmethod
            def tree_unflatten(cls, _, children):
                return cls(*children)

        step = tether.jit(lambda c: c.x * (2 if c.flag else 3))
        assert float(step(Config(jnp.float32(1), True))) == 2.0
        assert float(step(Config(jnp.float32(1), False))) == 3.0
        assert float(step(Config(jnp.float32(5), False))) == 15.0
        assert step.traces == 2

    def test_tie_between_arguments_is_part_of_the_key(self):
        @tether.jit
        def step(a, b):
            a.value = a.value + 1
            b.value = b.value * 10
            return a.value

        one, two = tether.State(1.0), tether.State(2.0)
        assert float(step(one, two)) == 2.0
        assert float(step(two, two)) == 210.0
        assert float(step(one, two)) == 3.0
        assert (float(one.value), float(two.value)) == (3.0, 2100.0)

    def test_tie_between_argument_and_closure(self):
        a, b = Counter(), Counter()
        step = tether.jit(lambda model: (setattr(a, "count", a.count + 1), model.count)[1])
        assert int(step(b)) == 0
        assert int(step(a)) == 2
        assert int(step(b)) == 0
        assert int(a.count) == 3


class TestResults:
    def test_existing_module_comes_back_as_the_same_object(self):
        model, outer = Counter(), nn.Sequential([nn.Linear(3, 2), nn.Linear(2, 1)])
        assert tether.jit(lambda m: m)(model) is model
        assert tether.jit(lambda: model)() is model
        step = tether.jit(lambda s, m, x: (s, {"sub": s[1], "loss": m(x)}))
        for calls in (1, 2):
            back, rest = step(outer, model, X)
            assert back is outer and rest["sub"] is outer[1]
            assert float(rest["loss"]) == expected(calls)
        other = nn.Sequential([nn.Linear(3, 2), nn.Linear(2, 1)])
        back, rest = step(other, model, X)
        assert back is other and rest["sub"] is other[1]
        assert step.traces == 1

    def test_new_module_is_a_copy(self):
        step = tether.jit(lambda seed: nn.Linear(3, 2, key=jax.random.key(seed)), static_argnums=0)
        one, two = step(0), step(0)
        assert one is not two and tether.cell(one, "weight") is not tether.cell(two, "weight")
        np.testing.assert_allclose(one.weight, nn.Linear(3, 2, key=jax.random.key(0)).weight, rtol=1e-6)
        one.weight = jnp.zeros((2, 3))
        assert float(jnp.abs(two.weight).sum()) > 0
        assert not isinstance(one.weight, jax.core.Tracer)

    def test_mapped_model_is_a_copy(self):
        model = Counter()
        doubled = tether.jit(lambda m: jax.tree.map(lambda v: v * 2, m))(model)
        assert doubled is not model
        np.testing.assert_allclose(doubled.weight, 2 * W)
        np.testing.assert_allclose(model.weight, W)
        assert tether.jit(lambda m: m)(doubled) is doubled

    def test_new_module_around_an_old_one_is_a_copy(self):
        inner = nn.Linear(3, 2, key=jax.random.key(0))
        new = tether.jit(lambda: nn.Sequential([inner, nn.Lambda(jnp.sin)]))()
        np.testing.assert_allclose(new(X), np.sin(np.asarray(inner(X))), rtol=1e-5)
        assert tether.cell(new, "[0].weight") is not tether.cell(inner, "weight")

    def test_none_and_empty_results(self):
        model = Counter()
        assert tether.jit(lambda: None)() is None
        assert tether.jit(lambda m: ((), {}, None))(model) == ((), {}, None)


class TestReports:
    def test_reads_and_writes(self):
        model = Counter()
        step = tether.jit(lambda net, x: net(x))
        assert step.reads == step.writes == ()
        step(model, X)
        assert set(step.reads) == {"net.count", "net.weight"}
        assert step.writes == ("net.count",)

    def test_of_the_last_call(self):
        model = Counter()
        step = tether.jit(lambda net, x, go: net(x) if go else net.weight.sum())
        step(model, X, True)
        step(model, X, False)
        assert (step.reads, step.writes) == (("net.weight",), ())
        step(model, X, True)
        assert step.writes == ("net.count",)

    def test_lower_runs_nothing_and_shares_the_trace(self):
        model = Counter()
        step = tether.jit(lambda net, x: net(x), donate_state=True)
        text = step.lower(model, X).as_text()
        assert "stablehlo" in text or "mhlo" in text
        assert int(model.count) == 0
        assert step.traces == 1
        assert float(step(model, X)) == expected(1)
        assert step.traces == 1
        assert step.lower(model, X).compile().memory_analysis() is not None

    def test_unused_variables_are_no_inputs(self):
        models = [Counter() for _ in range(3)]
        step = tether.jit(lambda ms: ms[1].weight.sum())
        step(models)
        assert len(step.lower(models).in_avals[0][1]) == 1

    def test_unread_writes_are_outputs_alone(self):
        model = Counter()

        @tether.jit
        def reset(model):
            model.count = 7

        reset(model)
        assert int(model.count) == 7
        assert reset.writes == ("model.count",) and reset.reads == ()


class TestModes:
    def test_alternating_modes_trace_twice(self):
        model = nn.Sequential([nn.Linear(3, 4, key=jax.random.key(0)), nn.BatchNorm(4), nn.Dropout(0.5)])
        step = tether.jit(lambda model, x: model(x))
        for _ in range(50):
            step(model.train(), X)
            step(model.eval(), X)
        assert step.traces == 2

    def test_training_flag_of_the_call_around(self):
        model = nn.Sequential([nn.BatchNorm(3)])
        step = tether.jit(model)
        step(X, training=False)
        np.testing.assert_array_equal(model[0].mean, np.zeros(3))
        step(X, training=True)
        np.testing.assert_allclose(model[0].mean, 0.1 * X.mean(0), rtol=1e-5)
        assert step.traces == 2

        class Outer(tether.Module):
            def __init__(self):
                self.inner = nn.BatchNorm(3)
                self.run = tether.Static(tether.jit(lambda net, x: net(x)))

            def __call__(self, x):
                return self.run(self.inner, x)

        outer = Outer()
        outer(X, training=False)
        np.testing.assert_array_equal(outer.inner.mean, np.zeros(3))
        outer(X)
        np.testing.assert_allclose(outer.inner.mean, 0.1 * X.mean(0), rtol=1e-5)
        before = np.asarray(outer.inner.mean)
        outer(X, training=False)
        np.testing.assert_array_equal(outer.inner.mean, before)
