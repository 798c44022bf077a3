# SPDX-License-Identifier: Apache-2.0
"""Averages of variables: their numbers, and that calls with them leave the variables as they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax

RNG = np.random.default_rng(0)


def one(value: object, **options: object) -> tuple[objax.TrainVar, objax.optimizer.ExponentialMovingAverage]:
    v = objax.TrainVar(jnp.asarray(value, jnp.float32))
    return v, objax.optimizer.ExponentialMovingAverage(objax.VarCollection(v=v), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_jitted", [False, True], ids=["plain", "jit"])
@pytest.mark.parametrize("debias", [False, True])
def test_averages_are_those_of_the_formula(debias: bool, is_jitted: bool):
    values = RNG.normal(size=(6, 3))
    v, ema = one(values[0], momentum=0.8, debias=debias, eps=1e-3)
    update = objax.Jit(ema) if is_jitted else ema
    average = np.zeros(3)
    for step, value in enumerate(values, 1):
        v.assign(jnp.asarray(value, jnp.float32))
        update()
        average = 0.8 * average + 0.2 * value
        scale = 1 / (1 - (1 - 1e-3) * 0.8**step) if debias else 1
        refs, found = ema.refs_and_values()
        assert next(iter(refs)).ref is v
        np.testing.assert_allclose(found[0], average * scale, rtol=1e-5)
        np.testing.assert_allclose(ema.replace_vars(lambda: v.value)(), average * scale, rtol=1e-5)
        np.testing.assert_allclose(v.value, value, rtol=1e-6)
    assert ema.step.value == 6 and ema.step.dtype == jnp.uint32


def test_debiased_before_any_step():
    v, ema = one([5.0], debias=True)
    assert ema.replace_vars(lambda: v.value)().tolist() == [0]


class TestWhatIsAveraged:
    def test_states_first_each_once_and_no_random_states(self):
        w, s = objax.TrainVar(jnp.ones(2)), objax.StateVar(jnp.zeros(3))
        vc = objax.VarCollection(
            {"w": w, "key": objax.RandomState(0), "s": s, "again": w, "ref": objax.TrainRef(w), "s2": s}
        )
        ema = objax.optimizer.ExponentialMovingAverage(vc)
        assert ema.refs[0] is s and ema.refs[1].ref is w and len(ema.refs) == 2
        name = "(ExponentialMovingAverage)"
        assert list(ema.vars().keys()) == [
            f"{name}.step",
            f"{name}.refs(ModuleList)[0]",
            f"{name}.refs(ModuleList)[1]",
            f"{name}.m(ModuleList)[0]",
            f"{name}.m(ModuleList)[1]",
        ]

    def test_a_variable_known_only_by_its_reference(self):
        w = objax.TrainVar(jnp.array([4.0]))
        ema = objax.optimizer.ExponentialMovingAverage(objax.VarCollection(ref=objax.TrainRef(w)), momentum=0.5)
        ema()
        assert ema.replace_vars(lambda: w.value)().tolist() == [2]

    def test_whole_numbers_have_a_float_as_average(self):
        count = objax.StateVar(jnp.array(4, jnp.uint32))
        ema = objax.optimizer.ExponentialMovingAverage(objax.VarCollection(count=count), momentum=0.75)
        ema()
        assert float(ema.replace_vars(lambda: count.value)()) == 1.0
        assert count.dtype == jnp.uint32 and count.value == 4

    def test_half_precision_stays(self):
        w = objax.TrainVar(jnp.array([4.0], jnp.bfloat16))
        ema = objax.optimizer.ExponentialMovingAverage(objax.VarCollection(w=w), momentum=0.75, debias=True)
        ema()
        average = ema.replace_vars(lambda: w.value)()
        assert average.dtype == jnp.bfloat16 and average.tolist() == [4.0]

    def test_repr(self):
        _, ema = one([1.0], momentum=0.5, debias=True)
        assert repr(ema) == "objax.optimizer.ExponentialMovingAverage(momentum=0.5, debias=True, eps=1e-06)"


class TestReplaceVars:
    def test_after_an_error(self):
        v, ema = one([4.0], momentum=0.5)
        ema()

        def fail() -> None:
            v.assign(jnp.array([9.0]))
            raise ZeroDivisionError(v.value.tolist())

        with pytest.raises(ZeroDivisionError):
            ema.replace_vars(fail)()
        assert v.value.tolist() == [4]

    def test_if_the_averages_can_not_be_assigned(self):
        v, w = objax.TrainVar(jnp.array([4.0])), objax.TrainVar(jnp.array([1.0, 2.0]))
        ema = objax.optimizer.ExponentialMovingAverage(objax.VarCollection(v=v, w=w))
        ema.m[1].value = jnp.zeros(3)
        with pytest.raises(AssertionError, match="Assign can not change shape"):
            ema.replace_vars(lambda: None)()
        assert v.value.tolist() == [4] and w.value.tolist() == [1, 2]

    def test_what_the_function_writes_is_taken_back(self):
        v, ema = one([4.0], momentum=0.5)
        ema.replace_vars(lambda: v.assign(jnp.array([7.0])))()
        assert v.value.tolist() == [4]

    def test_arguments_and_results(self):
        v, ema = one([4.0], momentum=0.5)
        ema()
        assert ema.replace_vars(lambda x, *, y: (x, y + v.value[0]))(1, y=2.0) == (1, 4.0)

    @pytest.mark.parametrize("with_vars", [False, True])
    def test_in_jit(self, with_vars: bool):
        v, ema = one([4.0], momentum=0.5)
        f = ema.replace_vars(lambda x: x * v.value)
        call = objax.Jit(f, objax.VarCollection(v=v) + ema.vars()) if with_vars else objax.Jit(f)
        assert call(1.0).tolist() == [0]
        ema()
        assert call(1.0).tolist() == [2]
        ema()
        assert call(2.0).tolist() == [6]
        assert v.value.tolist() == [4]

    def test_no_tracer_stays_if_jit_fails(self):
        v, ema = one([4.0], momentum=0.5)
        ema()

        def fail(x: jax.Array) -> None:
            v.assign(v.value * x)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            objax.Jit(ema.replace_vars(fail), objax.VarCollection(v=v) + ema.vars())(2.0)
        values = [*ema.vars().tensors(), v.value]
        assert not any(isinstance(x, jax.core.Tracer) for x in values)
        assert v.value.tolist() == [4] and ema.m[0].value.tolist() == [2]

    def test_gradients_at_the_averages(self):
        v, ema = one([4.0], momentum=0.5)
        ema()
        gradients = objax.Grad(lambda: (v.value**2).sum(), objax.VarCollection(v=v))
        assert ema.replace_vars(gradients)()[0].tolist() == [4]  # 2 * 2
        assert v.value.tolist() == [4]

    def test_names_of_its_variables_in_a_module(self):
        v, ema = one([4.0])
        call = objax.Jit(ema.replace_vars(lambda: v.value), objax.VarCollection(v=v))
        assert list(call.vars().keys()) == ["(Jit){wrap}v"]


class TestModule:
    def test_it_computes_with_averages_of_weights_and_statistics(self):
        layer = objax.nn.Linear(2, 1)
        layer.w.assign(jnp.array([[2.0], [4.0]]))
        module = objax.optimizer.ExponentialMovingAverageModule(layer, momentum=0.5)
        module.update_ema()
        x = jnp.ones((1, 2))
        assert module(x).tolist() == [[3]] and layer(x).tolist() == [[6]]
        call = objax.Jit(module)
        assert call(x).tolist() == [[3]]
        module.update_ema()
        assert call(x).tolist() == [[4.5]] and layer(x).tolist() == [[6]]

    def test_names_and_repr(self):
        module = objax.optimizer.ExponentialMovingAverageModule(objax.nn.Linear(2, 1), debias=True)
        name = "(ExponentialMovingAverageModule)"
        assert list(module.vars().keys())[:4] == [
            f"{name}(Linear).b",
            f"{name}(Linear).w",
            f"{name}.ema(ExponentialMovingAverage).step",
            f"{name}.ema(ExponentialMovingAverage).refs(ModuleList)[0]",
        ]
        assert repr(module) == (
            "objax.optimizer.ExponentialMovingAverageModule(momentum=0.999, debias=True, eps=1e-06)"
        )
