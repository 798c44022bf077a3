# SPDX-License-Identifier: Apache-2.0
"""Modules, lists of them, functions, forced arguments, and what can be found from a function."""

from __future__ import annotations

import functools
import types

import jax.numpy as jnp
import pytest

import tether.compat.objax as objax
from tether.compat.objax._objects import discovered

MODEL = objax.nn.Linear(2, 1)
REGISTRY = {"model": MODEL}


class Pair(objax.Module):
    def __init__(self):
        self.first = objax.TrainVar(jnp.zeros(1))
        self.inner = objax.nn.Linear(1, 2, use_bias=False)
        self.name = "text"


class TestVars:
    def test_names_are_paths_of_classes_and_attributes(self):
        assert list(Pair().vars().keys()) == ["(Pair).first", "(Pair).inner(Linear).w"]
        assert list(Pair().vars("x").keys()) == ["x(Pair).first", "x(Pair).inner(Linear).w"]

    def test_containers_are_searched(self):
        module = objax.Module()
        linear = lambda: objax.nn.Linear(1, 1, use_bias=False)
        module.rows = [linear(), (linear(), "text"), objax.TrainVar(jnp.zeros(1))]  # a variable alone: as in Objax, not
        module.by_name = {"a": [Pair()]}
        assert list(module.vars().keys()) == [
            "(Module).rows[0](Linear).w",
            "(Module).rows[1][0](Linear).w",
            "(Module).by_name['a'][0](Pair).first",
            "(Module).by_name['a'][0](Pair).inner(Linear).w",
        ]

    def test_a_collection_that_a_module_keeps_gives_no_names(self):
        module = Pair()
        module.vc = module.vars()
        assert len(module.vars()) == 2

    def test_wrapped_has_no_level(self):
        module = objax.Module()
        module.__wrapped__ = Pair()
        assert next(iter(module.vars().keys())) == "(Module)(Pair).first"

    def test_call_must_be_written(self):
        with pytest.raises(NotImplementedError):
            objax.Module()()


class TestModuleList:
    def test_is_a_list(self):
        parts = objax.ModuleList([Pair(), objax.TrainVar(jnp.zeros(1)), 3])
        parts.ignored = objax.TrainVar(jnp.zeros(1))
        assert list(parts.vars().keys()) == [
            "(ModuleList)[0](Pair).first",
            "(ModuleList)[0](Pair).inner(Linear).w",
            "(ModuleList)[1]",
        ]
        assert isinstance(parts[:2], objax.ModuleList) and len(parts[:2]) == 2
        parts.append(Pair())
        assert len(parts.vars()) == 5

    def test_representation(self):
        assert repr(objax.ModuleList([objax.ModuleList([1]), objax.functional.relu])) == (
            "objax.ModuleList(\n  [0] objax.ModuleList(\n    [0] 1\n  )\n  [1] relu\n)"
        )


class TestFunction:
    def test_names(self):
        v = objax.TrainVar(jnp.ones(1))

        @objax.Function.with_vars(objax.VarCollection(v=v))
        def f(x):
            return x * v.value

        assert list(f.vars().keys()) == ["{f}v"] and list(f.vars("s.").keys()) == ["s.{f}v"]
        assert f(jnp.ones(1)).tolist() == [1] and repr(f) == "objax.Function(f=f)"
        partial = objax.Function(functools.partial(f, jnp.ones(1)), f.vars())
        assert list(partial.vars().keys()) == ["{f}v"]

    def test_auto_vars(self):
        f = objax.Function.auto_vars(lambda x: MODEL(x))
        assert [v is w for v, w in zip(f.vars().values(), (MODEL.b, MODEL.w), strict=True)] == [True, True]


class TestForceArgs:
    def test_forces_by_position_and_by_name(self):
        class Net(objax.Module):
            def __call__(self, x, training, scale=1):
                return x, training, scale

        forced = objax.ForceArgs(Net(), training=True, scale=3)
        assert forced(1, False) == (1, True, 3) and forced(1, training=False, scale=2) == (1, True, 3)
        assert repr(forced) == "objax.ForceArgs(module=Net, training=True, scale=3)"

    def test_undo(self):
        outer = objax.ModuleList([objax.ForceArgs(objax.ForceArgs(Pair(), a=1), b=2), Pair()])
        outer[1].inner = objax.ForceArgs(outer[1].inner, a=2, c=3)
        objax.ForceArgs.undo(outer, a=1)
        assert outer[1].inner.forced_kwargs == {"a": 2, "c": 3}
        objax.ForceArgs.undo(outer, a=objax.ForceArgs.ANY)
        assert outer[1].inner.forced_kwargs == {"c": 3} and outer[0].forced_kwargs == {"b": 2}
        objax.ForceArgs.undo(outer)
        assert isinstance(outer[1].inner, objax.nn.Linear)


class TestDiscovered:
    def found(self, f):
        return {id(v) for v in discovered(f)}

    @pytest.mark.parametrize("way", ["global", "registry", "partial", "method", "closure", "call", "default", "object"])
    def test_ways(self, way):
        model = objax.nn.Linear(2, 1)
        holder = types.SimpleNamespace(model=model)

        class Trainer:
            def __init__(self):
                self.nets = [model]

            def step(self, x):
                return self.nets[0](x)

        helper = lambda x: model(x)
        f, wanted = {
            "global": (lambda x: MODEL(x), MODEL),
            "registry": (lambda x: REGISTRY["model"](x), MODEL),
            "partial": (functools.partial(lambda m, x: m(x), model), model),
            "method": (Trainer().step, model),
            "closure": (lambda x: model(x), model),
            "call": (lambda x: helper(x) + 1, model),
            "default": (lambda x, m=model: m(x), model),
            "object": (lambda x: holder.model(x), model),
        }[way]
        assert self.found(f) == {id(model_var) for model_var in wanted.vars()}

    def test_a_module_has_its_own_names(self):
        assert list(discovered(MODEL).keys()) == list(MODEL.vars().keys())
