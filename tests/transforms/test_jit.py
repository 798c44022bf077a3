# SPDX-License-Identifier: Apache-2.0
"""jit: one trace, one compilation, every Variable found, all writes or none, buffers given away safely."""

from __future__ import annotations

import collections
import functools
import gc
import threading
import types
import weakref
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, MissedReadWarning, StateLostError, StaticError

X = np.arange(12, dtype=np.float32).reshape(4, 3)
W = np.array([1.0, -2.0, 0.5], np.float32)
COMPILED = "/jax/core/compile/backend_compile_duration"


class Counter(tether.Module):
    """y = sum(x @ weight) * count, after count has grown by one."""

    def __init__(self, weight=W):
        self.weight = tether.Param(weight)
        self.count = tether.State(0.0)

    def __call__(self, x):
        self.count = self.count + 1
        return (x @ self.weight).sum() * self.count


def expected(calls: int, weight=W, x=X) -> float:
    return float((np.asarray(x, np.float64) @ np.asarray(weight, np.float64)).sum() * calls)


class Slots(tether.Module):
    def __init__(self):
        self.a = tether.State(jnp.ones(3))
        self.b = tether.State(jnp.full(3, 2.0))
        self.p = tether.Param(jnp.full(3, 5.0))


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of what XLA compiled since the test began."""
    found: list[str] = []

    def listen(event: str, _: float, **details) -> None:
        if event == COMPILED:
            found.append(str(details.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


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


class TestDonation:
    def test_buffers_are_reused(self):
        model = Slots()

        @tether.jit(donate_state=True)
        def step(model):
            model.a = model.a + 1
            return model.p.sum()

        step(model)  # the first call of a key runs undonated
        old, kept = model.a, model.p
        pointer = old.unsafe_buffer_pointer()
        step(model)
        assert old.is_deleted() and not kept.is_deleted()
        assert model.a.unsafe_buffer_pointer() == pointer
        np.testing.assert_array_equal(model.a, np.full(3, 3.0))

    def test_off_by_default(self):
        model = Slots()
        step = tether.jit(lambda model: setattr(model, "a", model.a + 1))
        step(model)
        old = model.a
        step(model)
        np.testing.assert_array_equal(old, np.full(3, 2.0))

    def test_snapshot_and_clone_stay_valid(self):
        model = Slots()
        step = tether.jit(lambda model: setattr(model, "a", model.a + 1), donate_state=True)
        step(model)
        snapshot, clone, state = tether.snapshot(model), tether.clone(model), tether.State(model.a)
        for _ in range(3):
            step(model)
        for copy in (snapshot.a, clone.a, state.value):
            np.testing.assert_array_equal(copy, np.full(3, 2.0))
        np.testing.assert_array_equal(model.a, np.full(3, 5.0))

    def test_first_call_keeps_what_was_read_before(self):
        model = Slots()
        before = model.a
        tether.jit(lambda model: setattr(model, "a", model.a + 1), donate_state=True)(model)
        np.testing.assert_array_equal(before, np.ones(3))

    @pytest.mark.parametrize("share", ["value", "alias"])
    @pytest.mark.parametrize("source", ["b", "p"])
    def test_two_cells_that_share_a_buffer(self, source, share):
        model = Slots()

        @tether.jit(donate_state=True)
        def step(model):
            model.a = model.a + model.p
            model.b = model.b * 2
            return model.a.sum()

        step(model)
        shared = getattr(model, source)
        model.a = shared if share == "value" else jax.device_put(shared, next(iter(shared.devices())))
        a, b = np.asarray(model.a).copy(), np.asarray(model.b).copy()
        for _ in range(3):
            step(model)
            a, b = a + 5.0, b * 2
        np.testing.assert_array_equal(model.a, a)
        np.testing.assert_array_equal(model.b, b)
        np.testing.assert_array_equal(model.p, np.full(3, 5.0))

    def test_cells_written_with_one_value(self):
        model = Slots()

        @tether.jit(donate_state=True)
        def step(model):
            model.a = model.b = model.a + model.b
            return model.p

        for total in (3.0, 6.0, 12.0, 24.0):
            step(model)
            np.testing.assert_array_equal(model.a, np.full(3, total))
            np.testing.assert_array_equal(model.b, np.full(3, total))

    def test_cell_written_with_a_kept_one(self):
        model = Slots()

        @tether.jit(donate_state=True)
        def step(model):
            model.b = model.a + model.b
            model.a = model.p

        for b in (3.0, 8.0, 13.0):
            step(model)
            np.testing.assert_array_equal(model.b, np.full(3, b))
            np.testing.assert_array_equal(model.a, np.full(3, 5.0))
            np.testing.assert_array_equal(model.p, np.full(3, 5.0))

    def test_an_argument_that_is_the_donated_array(self):
        model = Slots()
        step = tether.jit(lambda model, x: setattr(model, "a", model.a + x), donate_state=True)
        step(model, jnp.ones(3))
        for value in (4.0, 8.0):
            step(model, model.a)
            np.testing.assert_array_equal(model.a, np.full(3, value))

    def test_deleted_array_gives_an_error_with_the_path(self):
        first = nn.Sequential([Slots()])
        shared = jax.tree.map(lambda value: value, first)  # shares buffers, and says so
        step = tether.jit(lambda model: setattr(model[0], "a", model[0].a + 1), donate_state=True)
        step(first), step(shared), step(first)
        shared = jax.tree.map(lambda value: value, first)
        step(first)
        for call in (lambda: step(shared), lambda: tether.jit(lambda m: m[0].a.sum())(shared)):
            with pytest.raises(StateLostError, match=r"\[0\]\.a"):
                call()
        np.testing.assert_array_equal(first[0].a, np.full(3, 4.0))
        step(first)
        np.testing.assert_array_equal(first[0].a, np.full(3, 5.0))

    def test_runtime_failure_after_donation(self):
        model, fail = Slots(), [False]

        def check(value):
            if fail[0]:
                raise ValueError("on purpose")
            return value

        @tether.jit(donate_state=True)
        def step(model):
            y = model.a + 1
            model.a = jax.pure_callback(check, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
            model.b = model.b + 1
            return model.p.sum()

        step(model), step(model)
        snapshot = tether.snapshot(model)
        fail[0] = True
        with pytest.raises((StateLostError, jax.errors.JaxRuntimeError), match="on purpose|state was lost"):
            step(model)
            jax.block_until_ready([model.a, model.b])  # where the failure shows is the runtime's business
        fail[0] = False
        np.testing.assert_array_equal(snapshot.a, np.full(3, 3.0))
        tether.update(model, snapshot)
        step(model)
        np.testing.assert_array_equal(model.a, np.full(3, 4.0))

    def test_donation_inside_another_transformation_is_none(self):
        model = Slots()
        step = tether.jit(lambda model: (setattr(model, "a", model.a + 1), model.a.sum())[1], donate_state=True)
        outer = tether.jit(lambda model: step(model) + step(model))
        assert [float(outer(model)) for _ in range(2)] == [15.0, 27.0]
        np.testing.assert_array_equal(model.a, np.full(3, 5.0))


class TestFailures:
    @pytest.mark.parametrize("stop", [ValueError("stop"), KeyboardInterrupt()], ids=["error", "interrupt"])
    @pytest.mark.parametrize("donate", [False, True])
    def test_nothing_is_written_and_the_next_call_works(self, stop, donate):
        model = Counter()
        stopping = [stop]

        def body(x):
            y = model(x)
            model.weight = model.weight * 2
            if stopping:
                raise stopping[0]
            return y

        step = tether.jit(body, donate_state=donate)
        for _ in range(2):
            with pytest.raises(type(stop)):
                step(X)
            assert int(model.count) == 0
            np.testing.assert_array_equal(model.weight, W)
        stopping.clear()
        assert float(step(X)) == expected(1)
        assert float(step(X)) == expected(2, 2 * W)
        assert step.traces == 1

    def test_after_a_good_call(self):
        model, fail = Counter(), [False]

        def body(x):
            y = model(x)
            if fail[0]:
                raise ValueError("stop")
            return y

        step = tether.jit(body)
        step(X)
        fail[0] = True
        with pytest.raises(ValueError, match="stop"):
            step(X[:2])
        assert int(model.count) == 1
        fail[0] = False
        assert float(step(X[:2])) == expected(2, x=X[:2])

    def test_bad_write_names_path(self):
        model = nn.Sequential([Counter()])
        step = tether.jit(lambda m: setattr(m[0], "count", 2.7j))
        with pytest.raises(DtypeError, match=r"\[0\]\.count"):
            step(model)
        assert int(model[0].count) == 0

    def test_not_a_function(self):
        with pytest.raises(ArgumentError, match="jit"):
            tether.jit(3)

    def test_wrong_arguments_are_pythons_error(self):
        with pytest.raises(TypeError):
            tether.jit(lambda x: x)()


class TestConfiguration:
    @pytest.mark.mixed_dtypes
    def test_x64_between_two_calls(self):
        model = Counter()
        step = tether.jit(model)
        third = np.float64(1) / 3
        assert step(X).dtype == jnp.float32
        with jax.enable_x64(True):
            y = step(np.full((4, 3), third))
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(float(y), 2 * 4 * third * -0.5, rtol=1e-12)
        assert float(step(X)) == expected(3)
        assert (int(model.count), model.count.dtype, model.weight.dtype) == (3, jnp.float32, jnp.float32)

    def test_matmul_precision_between_two_calls(self):
        model = Counter()
        step = tether.jit(model)
        texts = []
        for calls, precision in enumerate(["default", "highest", "default", "highest"], 1):
            with jax.default_matmul_precision(precision):
                assert float(step(X)) == expected(calls)
                texts.append("HIGHEST" in step.lower(X).as_text())
        assert texts == [False, True, False, True]
        assert int(model.count) == 4

    def test_alternating_configuration_compiles_once_for_each(self):
        model = Counter()
        step = tether.jit(model)
        for i in range(6):
            with jax.default_matmul_precision("highest" if i % 2 else "default"):
                step(X)
        assert step.traces == 2

    @pytest.mark.parametrize("donate", [False, True])
    def test_debug_nans_between_two_calls(self, donate):
        total = tether.State(0.0)

        @tether.jit(donate_state=donate)
        def step(x):
            total.value = total.value + 1
            return jnp.log(x) * total.value

        assert float(step(1.0)) == 0.0
        with jax.debug_nans(True):
            assert float(step(1.0)) == 0.0
            before = float(total.value)
            with pytest.raises((FloatingPointError, StateLostError) if donate else FloatingPointError):
                step(-1.0)
        if not donate:
            assert float(total.value) == before
        total.value = 5.0
        assert np.isnan(float(step(-1.0)))
        assert float(total.value) == 6.0

    def test_disable_jit(self):
        model = Counter()
        step = tether.jit(model)
        step(X)
        with jax.disable_jit():
            assert float(step(X)) == expected(2)
        assert float(step(X)) == expected(3)
        assert int(model.count) == 3


class TestMemory:
    def freed(self, *references) -> bool:
        gc.collect()
        return all(reference() is None for reference in references)

    def test_model_as_argument(self):
        step = tether.jit(lambda model, x: model(x))
        model = Counter()
        step(model, X)
        references = weakref.ref(model), weakref.ref(tether.cell(model, "weight"))
        live = len(jax.live_arrays())
        del model
        assert self.freed(*references)
        assert len(jax.live_arrays()) <= live - 2
        step(Counter(), X)
        assert step.traces == 1

    def test_many_models_leave_nothing(self):
        step = tether.jit(lambda model, x: model(x))
        step(Counter(), X)
        gc.collect()
        live = len(jax.live_arrays())
        for i in range(10):
            step(Counter(W + np.float32(i)), X)
        gc.collect()
        assert len(jax.live_arrays()) <= live + 1
        assert len(step._plans) <= 1

    def test_views_leave_nothing(self):
        model = Counter()
        step = tether.jit(lambda model, x: model(x))
        for _ in range(10):
            step(model.eval(), X), step(model.train(), X)
        assert step.traces == 2
        references = weakref.ref(model), weakref.ref(tether.cell(model, "weight"))
        del model
        assert self.freed(*references)

    def test_closed_over_model_dies_with_its_function(self):
        def build():
            model = Counter()
            step = tether.jit(lambda x: model(x))
            step(X)
            return weakref.ref(model), weakref.ref(step)

        assert self.freed(*build())

    def test_model_of_a_plain_object(self):
        class Trainer:
            def __init__(self):
                self.model = Counter()

            @tether.jit
            def step(self, x):
                return self.model(x)

        trainer = Trainer()
        trainer.step(X)
        references = weakref.ref(trainer), weakref.ref(trainer.model)
        del trainer
        assert self.freed(*references)

    def test_global_model_that_is_let_go(self):
        scope = {"model": Counter()}
        exec("def step(x):\n    return model(x)", scope)
        step = tether.jit(scope["step"])
        step(X)
        reference = weakref.ref(scope["model"])
        scope["model"] = None
        assert self.freed(reference)

    def test_a_failed_trace_leaves_nothing(self):
        def build():
            model = Counter()

            def body(m, x):
                m(x)
                raise ValueError("stop")

            step = tether.jit(body)
            with pytest.raises(ValueError, match="stop"):
                step(model, X)
            return weakref.ref(model), step

        reference, _ = build()
        assert self.freed(reference)


class TestThreads:
    def test_evaluation_sees_a_whole_step(self):
        class Pair(tether.Module):
            def __init__(self):
                self.parts = [tether.State(jnp.zeros(4)) for _ in range(8)]

        model = Pair()

        @tether.jit
        def train(model):
            model.parts = tuple(part + 1 for part in model.parts)

        @tether.jit
        def evaluate(model):
            stacked = jnp.stack(model.parts)
            return stacked.max() - stacked.min(), stacked.max()

        train(model), evaluate(model)
        spreads, seen, done, faults = [], [], threading.Event(), []

        def watch():
            try:
                with jax.numpy_dtype_promotion("strict"):  # as the main thread, which compiled it
                    while not done.is_set():
                        spread, top = evaluate(model)
                        spreads.append(float(spread))
                        seen.append(float(top))
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=watch) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(300):
                train(model)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not faults
        assert spreads and set(spreads) == {0.0}
        assert float(model.parts[0][0]) == 301.0
        assert (train.traces, evaluate.traces) == (1, 1)

    def test_two_threads_trace_one_function(self):
        step = tether.jit(lambda model, x: model(x))
        models, results = [Counter() for _ in range(4)], {}
        barrier = threading.Barrier(4)

        def work(i):
            barrier.wait()
            try:
                results[i] = [float(step(models[i], X[: i + 1])) for _ in range(3)]
            except BaseException as error:
                results[i] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(4):
            assert results[i] == [expected(calls, x=X[: i + 1]) for calls in (1, 2, 3)]

    def test_two_threads_race_to_the_first_trace_of_one_program(self):
        step = tether.jit(lambda model, x: model(x))
        models, results = [Counter() for _ in range(4)], {}
        barrier = threading.Barrier(4)

        def work(i):
            barrier.wait()
            try:
                results[i] = [float(step(models[i], X)) for _ in range(3)]
            except BaseException as error:
                results[i] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {i: [expected(calls) for calls in (1, 2, 3)] for i in range(4)}


class TestRandom:
    def test_dropout_under_jit_of_vmap_of_jit(self):
        dropout = nn.Dropout(0.5)
        inner = tether.jit(lambda x: dropout(x))
        outer = tether.jit(tether.vmap(inner))
        masks = np.stack([outer(jnp.ones((8, 32))) for _ in range(3)]).reshape(24, 32)
        assert set(np.unique(masks)) == {0.0, 2.0}
        assert len(np.unique(masks, axis=0)) == 24
        assert outer.traces == 1

    def test_jitted_draws_are_those_of_eager_code(self):
        draw = lambda: jax.random.uniform(tether.random.draw())
        eager = [float(draw()) for _ in range(3)]
        tether.seed(0)
        step = tether.jit(draw)
        assert [float(step()) for _ in range(3)] == eager
        assert len(set(eager)) == 3
        assert step.traces == 1

    def test_scope_and_key_argument(self):
        dropout, x = nn.Dropout(0.5), jnp.ones(64)
        step = tether.jit(lambda x: dropout(x))
        masks = []
        for seed in (0, 1, 0):
            with tether.random.scope(seed):
                masks.append(np.asarray(step(x)))
        assert step.traces == 1
        np.testing.assert_array_equal(masks[0], masks[2])
        assert (masks[0] != masks[1]).any()
        keyed = tether.jit(dropout)
        key = jax.random.key(3)
        np.testing.assert_array_equal(keyed(x, key=key), keyed(x, key=key))
        np.testing.assert_array_equal(keyed(x, key=key), dropout(x, key=key))
        assert (np.asarray(keyed(x, key=key)) != np.asarray(keyed(x, key=jax.random.key(4)))).any()
        assert keyed.traces == 1

    def test_evaluation_draws_nothing(self):
        dropout = nn.Dropout(0.5).eval()
        step = tether.jit(dropout)
        step(jnp.ones(3))
        assert step.writes == ()


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
