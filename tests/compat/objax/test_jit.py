# SPDX-License-Identifier: Apache-2.0
"""Jit: variables listed or found, arguments traced, writes that land once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax


class Counter(objax.Module):
    def __init__(self):
        self.calls, self.scale = objax.StateVar(jnp.zeros(())), objax.TrainVar(jnp.full((), 2.0))

    def __call__(self, x):
        self.calls.value += 1
        return self.scale.value * x + self.calls.value


class TestVariables:
    @pytest.mark.parametrize("listed", [True, False], ids=["listed", "found"])
    def test_reads_and_writes(self, listed):
        counter = Counter()
        call = objax.Jit(counter, counter.vars() if listed else None)
        assert [float(call(3.0)) for _ in range(2)] == [7, 8]
        counter.scale.assign(jnp.full((), 10.0))
        assert float(call(3.0)) == 33 and float(counter.calls.value) == 3
        assert list(call.vars().keys()) == ["(Jit)(Counter).calls", "(Jit)(Counter).scale"]

    def test_functions_of_what_they_come_by(self):
        counter = Counter()
        call = objax.Jit(lambda x: counter(x) + 1)
        assert [float(call(3.0)) for _ in range(2)] == [8, 9] and len(call.vars()) == 2

    def test_others_than_those_listed_are_constants(self):
        counter = Counter()
        read = objax.Jit(lambda x: counter.scale.value * x, objax.VarCollection())
        assert float(read(3.0)) == 6
        counter.scale.assign(jnp.full((), 10.0))
        assert float(read(3.0)) == 6

    def test_what_transformations_inside_take_is_constant_too(self):
        w, c = objax.TrainVar(jnp.full((), 3.0)), objax.StateVar(jnp.full((), 2.0))
        inner = objax.Jit(lambda x: w.value * c.value * x)
        gradient = objax.Grad(lambda x: w.value**2 * x, objax.VarCollection(w=w))
        calls = objax.Jit(inner, objax.VarCollection(w=w)), objax.Jit(gradient, objax.VarCollection())
        assert float(calls[0](1.0)) == 6 and float(calls[1](1.0)[0]) == 6
        w.assign(jnp.full((), 4.0)), c.assign(jnp.full((), 10.0))
        assert float(calls[0](1.0)) == 8 and float(calls[1](1.0)[0]) == 6
        assert [call._call.traces for call in calls] == [1, 1]

    def test_a_write_to_another_is_an_error_and_changes_nothing(self):
        counter = Counter()
        call = objax.Jit(counter, counter.vars().subset(objax.TrainVar))
        for _ in range(2):
            with pytest.raises(AssertionError, match=r"at: +\(Counter\)\.calls") as caught:
                call(1.0)
            assert "Jit(f), which finds what f uses" in str(caught.value)
            assert "a VarCollection of 1 variables" in str(caught.value)
            assert float(counter.calls.value) == 0

    @pytest.mark.parametrize("listed", [True, False], ids=["listed", "found"])
    def test_random_states_are_found_so_that_draws_differ(self, listed):
        objax.random.DEFAULT_GENERATOR.seed(0)
        drop = objax.nn.Dropout(0.5)
        call = objax.Jit(lambda x: drop(x, training=True), objax.VarCollection() if listed else None)
        x = jnp.ones((1, 64))
        first, second = np.asarray(call(x)), np.asarray(call(x))
        assert not np.array_equal(first, second)
        objax.random.DEFAULT_GENERATOR.seed(0)
        np.testing.assert_array_equal(first, drop(x, training=True))
        np.testing.assert_array_equal(second, drop(x, training=True))

    def test_a_failure_inside_changes_nothing(self):
        counter = Counter()

        def f(x):
            counter(x)
            raise KeyError("stop")

        with pytest.raises(KeyError):
            objax.Jit(f)(1.0)
        assert float(counter.calls.value) == 0

    def test_jit_of_jit_of_a_gradient(self):
        counter = Counter()
        step = objax.Jit(objax.Jit(objax.GradValues(lambda x: counter(x) ** 2, counter.vars())))
        gradients, values = step(3.0)
        assert (float(gradients[0]), float(values[0])) == (2 * 7 * 3, 49) and float(counter.calls.value) == 1
        assert list(step.vars().keys()) == ["(Jit)(Jit)(Counter).calls", "(Jit)(Jit)(Counter).scale"]


class TestArguments:
    def test_all_are_traced_but_the_static_ones(self):
        branch = lambda x, training: x if training else -x
        for call in (objax.Jit(branch), objax.Jit(branch, objax.VarCollection())):
            for args, kwargs in (((1.0, True), {}), ((1.0,), {"training": True})):
                with pytest.raises(jax.errors.ConcretizationTypeError):
                    call(*args, **kwargs)
        static = objax.Jit(branch, static_argnums=(1,))
        assert float(static(1.0, True)) == 1 and float(static(1.0, False)) == -1

    def test_one_compilation_for_all_values(self):
        traces = []

        @objax.Jit
        def f(x, flag):
            traces.append(1)
            return jnp.where(flag["a"], x, -x)

        assert [float(f(2.0, {"a": flag})) for flag in (True, False, True)] == [2, -2, 2] and len(traces) == 1

    def test_a_static_argument_may_be_left_at_its_default(self):
        flip = lambda x, negative=False: -x if negative else x
        for call in (objax.Jit(flip, static_argnums=(1,)), objax.Jit(flip, objax.VarCollection(), (1,))):
            assert [float(call(1.0)), float(call(1.0, True))] == [1, -1]

    def test_any_name_of_an_argument(self):
        assert float(objax.Jit(lambda _: 2 * _)(_=3.0)) == 6

    def test_a_variable_goes_in_as_its_value(self):
        v = objax.StateVar(jnp.arange(3.0))
        call = objax.Jit(lambda pair: (pair["v"] * 2).sum())
        assert float(call({"v": v})) == 6
        v.value = v.value + 1
        assert float(call({"v": v})) == 12 and call._call.traces == 1

    def test_representation(self):
        call = objax.Jit(objax.nn.Linear(2, 3, w_init=objax.nn.init.identity), static_argnums=None)
        assert repr(call).startswith("objax.Jit(f=objax.nn.Linear(nin=2, nout=3,") and "static_argnums=None" in repr(
            call
        )
