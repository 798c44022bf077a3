# SPDX-License-Identifier: Apache-2.0
"""explain: what a compiled function reads and writes, and the reason of each compilation."""

from __future__ import annotations

import functools
import gc
import re
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tether
from tests.transforms.jit_models import Counter, W, X
from tether import nn
from tether.errors import ArgumentError, MissedReadWarning

V = jnp.ones((4, 3))


class Net(tether.Module):
    def __init__(self, p=0.5, width=3, bias=None):
        self.layers = [nn.Linear(3, width, key=jax.random.key(0)), nn.Dropout(p)]
        self.head = nn.Linear(3, width, key=jax.random.key(1))
        self.bias = bias

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scale(tether.Module):
    def __init__(self, fun=None):
        self.weight = tether.Param(2.0)
        self.fun = fun or (lambda x: x)

    def __call__(self, x):
        return self.fun(x) * self.weight


def tied():
    net = Net()
    return tether.replace(net, {"head.weight": tether.cell(net.layers[0], "weight")})


def last(step):
    """The reasons of the last compilation."""
    return tether.explain(step).compilations[-1].reasons


def scaled(factor):
    return lambda x: x * factor


@pytest.mark.parametrize(
    ("first", "second", "reasons"),
    [
        (lambda: V, lambda: V[:2], ["x: float32[4, 3] -> float32[2, 3]"]),
        (lambda: V, lambda: V.astype(jnp.bfloat16), ["x: float32[4, 3] -> bfloat16[4, 3]"]),
        (lambda: {"a": V, "b": [V]}, lambda: {"a": V, "b": [V[0]]}, ["x['b'][0]: float32[4, 3] -> float32[3]"]),
        (lambda: {"a": V}, lambda: {"a": V, "b": V}, ["x['b']: absent -> float32[4, 3]"]),
        (lambda: [V], lambda: (V,), ["the container x: PyTreeDef([*]) -> PyTreeDef((*,))"]),
        (lambda: None, lambda: V, ["x: None -> float32[4, 3]"]),
        (lambda: True, lambda: False, ["x: True -> False"]),
        (lambda: "sum", lambda: "mean", ["x: 'sum' -> 'mean'"]),
        (lambda: 1, lambda: 2.0, ["x: int32[] (a Python int) -> float32[] (a Python float)"]),
        (lambda: jnp.float32(1), lambda: jnp.asarray(1.0), ["x: float32[] -> float32[] (weakly typed)"]),
        (lambda: jax.random.key(0), lambda: jax.random.key(0, impl="rbg"), ["x: key<fry>[] -> key<rbg>[]"]),
        (Net, lambda: Net(0.1), ["x.layers[1].p: 0.5 -> 0.1"]),
        (Net, lambda: Net(bias="b"), ["x.bias: None -> 'b'"]),
        (Net, lambda: Net().eval(), [r"x.training, .*x.head.training: True -> False"]),
        (
            Net,
            lambda: tether.view(Net(), nn.Dropout, training=False),
            [r"x.layers\[1\].training: True -> False, set for it alone"],
        ),
        (Net, lambda: tether.freeze(Net(), "head.bias"), ["x.head.bias: Param -> Param, frozen"]),
        (Net, tied, ["x.head.weight: Param -> the same as layers[0].weight"]),
        (
            Net,
            lambda: tether.replace(Net(), {"layers[1]": nn.Linear(3, 3)}),
            ["x.layers[1]: Dropout -> Linear"],
        ),
        (lambda: [Net(), Net()], lambda: 2 * [Net()], ["x[1]: Net -> the same as x[0]"]),
        (Counter, lambda: Counter(np.ones(5, np.float32)), ["x.weight: float32[3] -> float32[5]"]),
        (Counter, lambda: Counter(W.astype(jnp.bfloat16)), ["x.weight: float32[3] -> bfloat16[3]"]),
        (lambda: tether.State(0.0), lambda: tether.Param(0), ["x: State -> Param", "x: float32[] -> int32[]"]),
        (
            lambda: Scale(scaled(2)),
            lambda: Scale(scaled(3)),
            [r"x.fun: <lambda> \(test_explain.py:\d+, factor=2\) -> <lambda> \(test_explain.py:\d+, factor=3\)"],
        ),
        (
            lambda: Scale(scaled((2,))),
            lambda: Scale(scaled((3,))),
            [r"x.fun: <lambda> \(test_explain.py:\d+\) -> another, not equal"],
        ),
    ],
    ids=[
        *("shape", "dtype", "path", "added", "container", "None", "bool", "string", "number", "weak", "key"),
        *("setting", "string-setting", "eval", "view", "freeze", "tie", "class", "one-twice", "cell-shape"),
        *("cell-dtype", "kind", "captured", "captured-tuple"),
    ],
)
def test_reason(first, second, reasons):
    step = tether.jit(lambda x: 0)
    step.lower(first()), step.lower(second())
    assert step.traces == 2
    found = last(step)
    assert len(found) == len(reasons)
    for text, expected in zip(found, reasons, strict=True):
        assert text == expected or re.fullmatch(expected, text), text


class TestReasons:
    def test_static_arguments_by_number_and_name(self):
        step = tether.jit(lambda n, x, *, mode: x, static_argnums=0, static_argnames="mode")
        step(2, V, mode="a"), step(3, V, mode="a"), step(3, V, mode="b")
        found = tether.explain(step).compilations
        assert [c.reasons for c in found[1:]] == [("n: 2 -> 3",), ("mode: 'a' -> 'b'",)]
        assert [c.like for c in found] == [None, 1, 2]

    def test_arguments_by_name(self):
        step = tether.jit(lambda x, y=None: x)
        step(V, V), step(V, y=V), step(V)
        found = tether.explain(step).compilations
        assert found[1].reasons == ("arguments given by name: none -> y",)
        assert found[2].reasons == ("y: float32[4, 3] -> absent",)

    def test_the_nearest_is_compared(self):
        step = tether.jit(lambda model, x: x)
        step(Net(), V), step(Net(0.1), V[:2]), step(Net(0.2), V)
        found = tether.explain(step).compilations[-1]
        assert (found.like, found.reasons) == (1, ("model.layers[1].p: 0.5 -> 0.2",))

    def test_another_class_stands_for_all_below_it_and_is_far_away(self):
        step = tether.jit(lambda model: 0)
        half = lambda net: jax.tree.map(lambda v: v.astype(jnp.bfloat16), net)
        step(Net()), step(Counter()), step(half(Net()))
        found = tether.explain(step).compilations
        assert found[1].reasons == ("model: Net -> Counter",)
        assert found[2].like == 1
        assert all("float32" in reason and "bfloat16" in reason for reason in found[2].reasons)

    def test_mode_and_key_of_the_call_around(self):
        class Outer(tether.Module):
            def __init__(self):
                self.drop = nn.Dropout(0.5)

            @tether.jit
            def inner(self, x):
                return self.drop(x)

            def __call__(self, x):
                return self.inner(x)

        outer = Outer()
        outer(V), outer(V, training=False), outer(V, key=jax.random.key(0))
        assert [c.reasons for c in tether.explain(outer.inner).compilations] == [
            ("the first call",),
            ("training= of the call around: None -> False",),
            ("key= of the call around: none -> a stream",),
        ]

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda: jax.default_matmul_precision("highest"), "jax_default_matmul_precision: None -> highest"),
            (lambda: jax.enable_x64(True), "jax_enable_x64: False -> True"),
            (lambda: jax.threefry_partitionable(False), "jax_threefry_partitionable: True -> False"),
        ],
        ids=["precision", "x64", "option"],
    )
    def test_configuration(self, change, reason):
        step = tether.jit(lambda x: x + 1)
        step(V)
        with change():
            step(V)
        assert last(step) == (reason,)

    def test_a_mesh(self):
        step = tether.jit(lambda x: x + 1)
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        step(V), step(jax.device_put(V, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))))
        (reason,) = last(step)
        assert reason.startswith("sharding of x: absent -> ") and "'d'" in reason and reason.endswith("(d: 2)")

    def test_a_missed_read_and_its_identity(self):
        table = types.MappingProxyType(store := {})
        step = tether.jit(lambda scale, x: table[id(scale)](x) * scale(x))
        for scale in (scales := [Scale(abs), Scale(abs)]):
            store[id(scale)] = Counter()
            with pytest.warns(MissedReadWarning):
                step(scale, X)
        first, second = tether.explain(step).compilations
        missed = "found only by reading, so traced 2 times, for these objects alone: "
        names = {"count  (State)", "weight  (Param)"}
        assert set(first.reasons[1].removeprefix(missed).split(", ")) == names
        assert second.reasons[0].startswith("nothing differs from compilation 1, which could not be used: " + missed)
        assert second.reasons[1] == first.reasons[1]
        assert tether.explain(step).traces == step.traces == 4
        assert len(scales) == 2

    def test_a_value_of_a_trace_around(self):
        inner = []

        def outer(y):
            inner.append(tether.jit(lambda x: x * y))
            return inner[-1](2.0)

        tether.jit(outer)(3.0)
        assert last(inner[0]) == (
            "the first call",
            "a value of the trace around is a part of it, so it serves this call alone",
        )

    def test_lanes_around(self):
        step = tether.jit(lambda x: tether.random.draw())
        step.lower(V[0]), tether.vmap(step)(V)
        assert last(step) == ("tether.random.default in a lane of vmap: absent -> Rng",)


class TestReport:
    def test_text(self):
        model = Counter()

        @tether.jit
        def train_step(model, x):
            return model(x)

        assert str(tether.explain(train_step)) == "tether.jit(train_step): not compiled yet"
        train_step(model, X), train_step(model, X), train_step(model, X[:2])
        assert repr(tether.explain(train_step)) == (
            "tether.jit(train_step): 2 compilations, 2 traces\n"
            "  reads:  model.count, model.weight\n"
            "  writes: model.count\n"
            "  compilation 1:\n"
            "    the first call\n"
            "  compilation 2, compared with 1:\n"
            "    x: float32[4, 3] -> float32[2, 3]"
        )

    def test_reads_and_writes(self):
        step = tether.jit(lambda model, x: model(x))
        step(Counter(), X)
        found = tether.explain(step)
        assert (found.reads, found.writes) == (("model.count", "model.weight"), ("model.count",))
        assert (found.traces, [c.number for c in found.compilations]) == (1, [1])

    def test_long_lists_are_cut_in_print_alone(self):
        step = tether.jit(lambda xs: 0)
        for size in (1, 2):
            step.lower([np.ones((size, i), np.float32) for i in range(12)])
        assert len(last(step)) == 12
        assert str(tether.explain(step)).endswith("and 4 more")

    def test_lowering_is_a_trace(self):
        step = tether.jit(lambda x: x)
        step.lower(V), step(V), step.lower(V[:2])
        assert last(step) == ("x: float32[4, 3] -> float32[2, 3]",)

    def test_what_is_made_of_a_compiled_function(self):
        class Net(tether.Module):
            def __init__(self):
                self.scale = tether.Param(1.0)

            @tether.jit
            def __call__(self, x):
                return x * self.scale

            @tether.jit
            def step(self, x):
                return x + self.scale

        net, x = Net(), jnp.float32(1)
        net(x), net.step(x), net.step(x[None])

        @functools.wraps(net.step)
        def logged(*args):
            return net.step(*args)

        for same in (Net.step, net.step, functools.partial(net.step, x), logged):
            assert last(same) == ("x: float32[] -> float32[1]",)
        assert last(net) == last(Net.__call__) == ("the first call",)

    @pytest.mark.parametrize("what", [3, len, jax.jit(lambda x: x), Counter()], ids=["int", "len", "jax.jit", "module"])
    def test_not_compiled_by_tether(self, what):
        with pytest.raises(ArgumentError, match=r"not made by tether\.jit.*\n.*got:.*\n.*\n.*tether\.explain\(step\)"):
            tether.explain(what)


class TestRecords:
    def test_bounded(self):
        step = tether.jit(lambda x: x)
        for size in range(40):
            step.lower(np.ones(size, np.float32))
        found = tether.explain(step).compilations
        assert [c.number for c in found] == list(range(9, 41))
        assert found[0].reasons == ("those before it are not kept any more",)
        assert found[-1].reasons == ("x: float32[38] -> float32[39]",)

    def test_no_model_and_no_array_is_kept(self):
        hidden = types.MappingProxyType({"net": Counter()})

        def build():
            table = np.ones(3)
            model = Scale(lambda x: x * table.sum())
            step = tether.jit(lambda model, x: model(x) * hidden["net"](X))
            with pytest.warns(MissedReadWarning):
                step(model, 1.0)
            return step, weakref.ref(model), weakref.ref(table)

        step, *references = build()
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        assert last(step)[0] == "the first call"


class TestNumberOfCompilations:
    def test_a_thousand_alternations(self):
        model = Net()
        modes = model.train(), model.eval()
        step = tether.jit(lambda model, x: model(x))
        for i in range(1000):
            step(modes[i % 2], V)
        assert step.traces == 2
        assert "training: True -> False" in last(step)[0]

    def test_learning_rates(self):
        model = nn.Linear(3, 2, key=jax.random.key(0))
        optimizer = tether.Optimizer(model, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
        step = tether.jit(lambda: optimizer.update(tether.grad(lambda model: model(V).sum())(model)))
        before = np.asarray(model.bias)
        for rate in (0.1, 0.2, 0.3):
            tether.update(optimizer, {"state.hyperparams['learning_rate']": rate})
            step()
        assert step.traces == 1
        np.testing.assert_allclose(model.bias, before - 4 * 0.6, rtol=1e-5)

    def test_a_counter_and_control_flow(self):
        class Stepped(tether.Module):
            def __init__(self):
                self.steps = tether.State(0)

            def __call__(self, x):
                self.steps = self.steps + 1
                x = jax.lax.cond(x.sum() > 0, lambda v: v + 1, lambda v: v, x)
                return jax.lax.scan(lambda c, v: (c + v, c), x[0], x)[0]

        step = tether.jit(lambda model, x: model(x))
        for model in (one := Stepped(), one, Stepped()):
            step(model, V)
        assert (step.traces, int(one.steps)) == (1, 2)
