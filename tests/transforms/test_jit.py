# SPDX-License-Identifier: Apache-2.0
"""jit: one trace, one compilation, every Variable found, all writes or none, buffers given away safely."""

from __future__ import annotations

import collections
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.jit_models import Counter, W, X, expected
from tether import nn
from tether.errors import MissedReadWarning


class TestCompilations:
    def test_counting_works(self, compiled):
        jax.jit(lambda x: x * 3 + 1)(X).block_until_ready()
        assert len(compiled) == 1

    def test_a_step_compiles_once(self, compiled):
        model, x = Counter(), jnp.asarray(X)
        step = tether.jit(lambda model, x: model(x))
        step(model, x)
        before = len(compiled)
        assert sum("lambda" in name for name in compiled) == 1
        for calls in range(2, 6):
            assert float(step(model, x)) == expected(calls)
        assert len(compiled) == before
        assert step.traces == 1

    @pytest.mark.parametrize("donate", [False, True])
    def test_committed_input_compiles_once(self, compiled, donate):
        model, x = Counter(), jax.device_put(X, jax.devices()[1])
        step = tether.jit(lambda model, x: model(x), donate_state=donate)
        for calls in range(1, 4):
            assert float(step(model, x)) == expected(calls)
        assert sum("lambda" in name for name in compiled) == 1
        assert step.traces == 1
        assert model.count.devices() == {jax.devices()[1]}

    @pytest.mark.parametrize("donate", [False, True])
    def test_placed_model_compiles_once(self, compiled, donate):
        model = Counter()
        tether.place(model, jax.devices()[2])
        step = tether.jit(lambda model, x: model(x), donate_state=donate)
        for calls in range(1, 4):
            assert float(step(model, X)) == expected(calls)
        assert sum("lambda" in name for name in compiled) == 1
        assert model.count.devices() == {jax.devices()[2]} == model.weight.devices()

    def test_committed_then_uncommitted_input_stays_right(self):
        model = Counter()
        step = tether.jit(lambda model, x: model(x))
        values = [step(model, x) for x in (X, jax.device_put(X, jax.devices()[1]), X)]
        assert [float(value) for value in values] == [expected(calls) for calls in (1, 2, 3)]
        assert step.traces == 1

    def test_twenty_fresh_models_share_one_program(self, compiled):
        step = tether.jit(lambda model, x: model(x))
        x, models = jnp.asarray(X), [Counter(W + np.float32(i)) for i in range(20)]
        before = len(compiled)
        for i, model in enumerate(models):
            assert float(step(model, x)) == pytest.approx(expected(1, W + i), rel=1e-5)
        assert step.traces == 1
        assert len(compiled) - before == 1

    def test_twenty_fresh_models_with_a_lambda_each(self):
        class Net(tether.Module):
            def __init__(self, seed):
                self.linear = nn.Linear(3, 2, key=jax.random.key(seed))
                self.act = lambda h: jnp.maximum(h, 0)

            def __call__(self, x):
                return self.act(self.linear(x))

        step = tether.jit(lambda model, x: model(x))
        for seed in range(20):
            model = Net(seed)
            oracle = np.maximum(X @ np.asarray(model.linear.weight).T + np.asarray(model.linear.bias), 0)
            np.testing.assert_allclose(step(model, X), oracle, rtol=1e-5, atol=1e-5)
        assert step.traces == 1

    def test_closed_over_model_that_is_rebound_shares_the_program(self):
        model = Counter()
        step = tether.jit(lambda x: model(x))
        assert float(step(X)) == expected(1)
        first, model = model, Counter(2 * W)
        assert float(step(X)) == expected(1, 2 * W)
        assert float(step(X)) == expected(2, 2 * W)
        assert int(first.count) == 1
        assert step.traces == 1

    def test_other_shapes_and_dtypes_trace_again(self):
        model = Counter()
        step = tether.jit(lambda model, x: model(x))
        step(model, X), step(model, X[:2]), step(model, X), step(model, X.astype(np.float16).astype(np.float32))
        assert step.traces == 2
        assert int(model.count) == 4

    def test_weak_type_of_state_never_changes(self, compiled):
        scale = tether.State(1.0)
        assert not scale.value.weak_type

        @tether.jit
        def step():
            scale.value = 2.0 * scale.value
            return scale.value

        assert [float(step()) for _ in range(3)] == [2.0, 4.0, 8.0]
        assert not scale.value.weak_type
        assert sum("step" in name for name in compiled) == 1

    def test_a_body_is_run_once_for_each_compilation(self):
        runs, model = [], Counter()

        @tether.jit
        def step(x):
            runs.append(1)
            return model(x)

        for _ in range(4):
            step(X)
        assert len(runs) == 1 == step.traces


class TestWaysToAModel:
    """However a function comes by its model, the Variables are inputs and the writes are delivered."""

    def check(self, step, model, *args):
        assert float(step(*args)) == expected(1)
        model.weight = 2 * model.weight  # a baked-in constant would not follow
        assert float(step(*args)) == expected(2, 2 * W)
        assert int(model.count) == 2
        assert step.traces == 1

    def test_the_model_itself(self):
        model = Counter()
        self.check(tether.jit(model), model, X)

    def test_bound_method(self):
        model = Counter()
        self.check(tether.jit(model.__call__), model, X)

    def test_keyword_argument(self):
        model = Counter()
        step = tether.jit(lambda *, net, x: net(x))
        assert float(step(net=model, x=X)) == expected(1)
        assert float(step(x=X, net=model)) == expected(2)
        assert step.traces == 1

    def test_partial(self):
        model = Counter()
        self.check(tether.jit(functools.partial(lambda net, x: net(x), model)), model, X)
        model = Counter()
        self.check(tether.jit(functools.partial(lambda x, net: net(x), net=model)), model, X)

    def test_defaults(self):
        model = Counter()

        def step(x, net=model, *, other=None):
            return net(x)

        self.check(tether.jit(step), model, X)

        def keyword(x, *, net=None):
            return net(x)

        model = Counter()
        keyword.__kwdefaults__ = {"net": model}
        self.check(tether.jit(keyword), model, X)

    @pytest.mark.parametrize("wrap", [lambda m: [m], lambda m: (None, m), lambda m: {"net": m}, lambda m: {1: [(m,)]}])
    def test_container_as_argument(self, wrap):
        model = Counter()
        find = lambda tree: next(p for p in jax.tree.leaves(tree, is_leaf=lambda v: v is model) if p is model)
        self.check(tether.jit(lambda tree, x: find(tree)(x)), model, wrap(model), X)

    def test_containers_in_a_closure(self):
        Pair = collections.namedtuple("Pair", ["net", "rest"])
        for wrap, take in [
            (lambda m: [m], lambda c: c[0]),
            (lambda m: {"a": {"b": [m]}}, lambda c: c["a"]["b"][0]),
            (lambda m: Pair(m, 1), lambda c: c.net),
            (lambda m: types.SimpleNamespace(net=m), lambda c: c.net),
        ]:
            model = Counter()
            held = wrap(model)
            self.check(tether.jit(lambda x, held=held, take=take: take(held)(x)), model, X)

    def test_rebound_place_in_a_container_is_followed(self):
        first, second = Counter(), Counter(2 * W)
        held = {"net": first}
        step = tether.jit(lambda x: held["net"](x))
        step(X)
        held["net"] = second
        assert float(step(X)) == expected(1, 2 * W)
        assert (int(first.count), int(second.count)) == (1, 1)

    def test_self_of_a_plain_object(self):
        class Trainer:
            def __init__(self, model):
                self.model = model

            @tether.jit
            def step(self, x):
                return self.model(x)

        trainer = Trainer(Counter())
        assert float(trainer.step(X)) == expected(1)
        trainer.model.weight = 2 * trainer.model.weight
        assert float(trainer.step(X)) == expected(2, 2 * W)
        other = Trainer(Counter(3 * W))
        assert float(other.step(X)) == pytest.approx(expected(1, 3 * W))
        assert int(trainer.model.count) == 2
        trainer.model = Counter(4 * W)
        assert float(trainer.step(X)) == pytest.approx(expected(1, 4 * W))

    def test_global(self):
        scope = {"tether": tether, "model": Counter()}
        exec("@tether.jit\ndef step(x):\n    def inner():\n        return model(x)\n    return inner()", scope)
        self.check(scope["step"], scope["model"], X)
        scope["model"] = Counter(3 * W)
        assert float(scope["step"](X)) == pytest.approx(expected(1, 3 * W))

    def test_attribute_of_another_modules_attribute(self):
        class Outer(tether.Module):
            def __init__(self):
                self.parts = {"net": Counter()}

            @property
            def net(self):
                return self.parts["net"]

        outer = Outer()
        self.check(tether.jit(lambda x: outer.net(x)), outer.net, X)

    def test_helper_functions_and_wrappers(self):
        model = Counter()

        def helper(x):
            return model(x)

        @functools.wraps(helper)
        def wrapper(*args):
            return helper(*args)

        self.check(tether.jit(lambda x: wrapper(x)), model, X)

    def test_chosen_at_run_time(self):
        models = [Counter(), Counter(2 * W)]
        step = tether.jit(lambda i, x: models[i](x), static_argnums=0)
        assert float(step(0, X)) == expected(1)
        assert float(step(1, X)) == expected(1, 2 * W)
        assert float(step(0, X)) == expected(2)
        assert [int(model.count) for model in models] == [2, 1]

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_missed_read_is_traced_again_and_said(self, count):
        models = [Counter((i + 1) * W) for i in range(count)]
        hidden = types.MappingProxyType(dict(enumerate(models)))  # discovery doesn't look behind proxies

        step = tether.jit(lambda x: sum(hidden[i](x) for i in range(count)))
        with pytest.warns(MissedReadWarning, match="weight"):
            first = float(step(X))
        assert first == pytest.approx(sum(expected(1, (i + 1) * W) for i in range(count)))
        for model in models:
            model.weight = 2 * model.weight
        assert float(step(X)) == pytest.approx(sum(expected(2, 2 * (i + 1) * W) for i in range(count)))
        assert [int(model.count) for model in models] == [2] * count

    def test_missed_reads_of_two_equal_models_do_not_cross(self):
        table = types.MappingProxyType(store := {})
        first, second = Counter(), Counter(2 * W)

        class Key(tether.Module):
            def __init__(self, seed):
                self.scale = tether.Param(jnp.float32(seed))

        one, two = Key(1.0), Key(1.0)
        store[id(one)], store[id(two)] = first, second
        step = tether.jit(lambda key, x: table[id(key)](x) * key.scale)
        with pytest.warns(MissedReadWarning):
            assert float(step(one, X)) == expected(1)
        with pytest.warns(MissedReadWarning):
            assert float(step(two, X)) == expected(1, 2 * W)
        assert float(step(one, X)) == expected(2)
        assert (int(first.count), int(second.count)) == (2, 1)


class TestMethods:
    def test_descriptor_on_a_module_class(self):
        class Net(tether.Module):
            def __init__(self, size):
                self.scale = tether.Param(jnp.full(size, 2.0))
                self.calls = tether.State(0)

            @tether.jit
            def step(self, x, power=1):
                self.calls = self.calls + 1
                return (self.scale**power * x).sum()

        one, two = Net(3), Net(3)
        assert [float(net.step(jnp.ones(3))) for net in (one, two, one)] == [6.0, 6.0, 6.0]
        assert float(one.step(jnp.ones(3), power=2)) == 12.0
        assert (int(one.calls), int(two.calls)) == (3, 1)
        assert Net.step.traces == 2  # power as a default, and as an argument
        assert float(Net.step(two, jnp.ones(3))) == 6.0

    def test_call_of_a_module_compiled_in_its_class_keeps_training_and_key(self):
        class Net(tether.Module):
            def __init__(self):
                self.dropout = nn.Dropout(0.5)

            @tether.jit
            def __call__(self, x):
                return self.dropout(x)

        net, x = Net(), jnp.ones(64)
        np.testing.assert_array_equal(net(x, training=False), x)
        np.testing.assert_array_equal(net(x, key=jax.random.key(1)), net(x, key=jax.random.key(1)))
        assert set(np.unique(net(x))) == {0.0, 2.0}

    def test_static_and_class_methods(self):
        model = Counter()

        class Holder:
            net = model

            @staticmethod
            @tether.jit
            def static(x):
                return model(x)

            @classmethod
            def by_class(cls, x):
                return cls.net(x)

        assert float(Holder.static(X)) == expected(1)
        assert float(Holder().static(X)) == expected(2)
        step = tether.jit(Holder.by_class)
        with pytest.warns(MissedReadWarning):  # discovery looks into objects, not into the attributes of classes
            assert float(step(X)) == expected(3)
        assert float(step(X)) == expected(4)
        assert int(model.count) == 4

    def test_name_and_documentation_are_kept(self):
        @tether.jit
        def train_step(x):
            """Says what it does."""
            return x

        assert (train_step.__name__, train_step.__doc__) == ("train_step", "Says what it does.")
        assert "train_step" in repr(train_step)
        assert "jit_train_step" in train_step.lower(1.0).as_text()


def test_nested_jit_traces_once_and_counts_every_call():
    model = Counter()
    inner = tether.jit(model)
    outer = tether.jit(lambda x: inner(x) + inner(x))
    assert float(outer(X)) == expected(1) + expected(2)
    assert float(outer(X)) == expected(3) + expected(4)
    assert float(inner(X)) == expected(5)
    assert (inner.traces, outer.traces) == (1, 1)


def test_tracer_of_an_outer_trace_is_not_kept_in_a_program():
    inner = None

    def make(y):
        nonlocal inner
        inner = tether.jit(lambda x: x * y)  # y is a tracer of the trace around
        return inner(2.0)

    outer = tether.jit(make)
    assert float(outer(3.0)) == 6.0
    assert float(outer(5.0)) == 10.0
    assert float(tether.grad(lambda y: tether.jit(lambda x: x * y)(2.0))(3.0)) == 2.0


@pytest.mark.filterwarnings("error")
def test_no_leaks():
    model = Counter()
    step = tether.jit(lambda x: tether.grad(lambda v: model(v))(x))
    with jax.checking_leaks():
        step(X), step(X[:2])
        tether.jit(tether.vmap(lambda x: model.weight @ x))(X)
    assert int(model.count) == 2
