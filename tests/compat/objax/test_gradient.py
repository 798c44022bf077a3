# SPDX-License-Identifier: Apache-2.0
"""Grad, GradValues, Jacobian, Hessian: order, state, nesting, and the report that this home answers."""

from __future__ import annotations

import inspect
from typing import Dict, List, Tuple  # noqa: UP035

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax.typing import JaxArray


def is_plain(module) -> bool:
    return not any(isinstance(value, jax.core.Tracer) for value in module.vars().tensors())


class TestReport158:
    """A gradient with respect to the input, no variables listed, through BatchNorm, twice."""

    def test_it_runs_and_the_statistics_move_twice(self):
        norm = objax.nn.BatchNorm0D(3)

        def ell(x):
            return (norm(x, training=True) ** 2).sum()

        means = [norm.running_mean.value]
        for _ in range(2):
            objax.Grad(ell, {}, (0,))(np.ones((4, 3)))
            assert is_plain(norm)
            means.append(norm.running_mean.value)
        np.testing.assert_allclose(means[1], np.full((1, 3), 0.001), rtol=1e-4)
        np.testing.assert_allclose(means[2], np.full((1, 3), 0.001 + 0.001 * 0.999), rtol=1e-4)

    def test_within_jit(self):
        norm = objax.nn.BatchNorm0D(3)
        grad = objax.Jit(objax.Grad(lambda x: (norm(x, training=True) * x).sum(), {}, (0,)))
        x = np.random.default_rng(0).normal(size=(4, 3))
        first, second = grad(x)[0], grad(x)[0]
        np.testing.assert_array_equal(first, second)
        assert is_plain(norm) and float(norm.running_var.value[0, 0]) != 1


class TestOrder:
    def make(self):
        self.a, self.b = objax.TrainVar(jnp.array(2.0)), objax.TrainVar(jnp.array(3.0))
        self.s = objax.StateVar(jnp.array(5.0))
        return lambda x, y: (self.a.value * x + self.b.value * self.s.value * y, "more")

    def test_inputs_as_asked_then_train_vars_once(self):
        f = self.make()
        vc = objax.VarCollection({"b": self.b, "s": self.s, "a": self.a, "again": self.b})
        gradients, values = objax.GradValues(f, vc, (1, 0))(7.0, 11.0)
        assert list(map(float, gradients)) == [15, 2, 55, 7]
        assert float(values[0]) == 2 * 7 + 15 * 11 and values[1] == "more"
        assert list(map(float, objax.Grad(f, None, (0,))(7.0, 11.0))) == [2]

    def test_without_lists_all_that_is_used(self):
        f, unused = self.make(), objax.TrainVar(jnp.array(1.0))
        g = lambda x, y: (f(x, y)[0], unused if False else x)
        grad = objax.GradValues(g, None)
        gradients, _ = grad(7.0, 11.0)
        assert list(map(float, gradients)) == [7, 55] and [
            v is w for v, w in zip(grad.vars(), (self.a, self.b), strict=True)
        ]

    def test_a_single_result_comes_in_a_list(self):
        self.make()
        _, values = objax.GradValues(lambda x: self.a.value * x, objax.VarCollection(a=self.a))(3.0)
        assert isinstance(values, list) and list(map(float, values)) == [6]

    def test_variables_that_only_running_finds(self):
        hidden = {id(self): objax.TrainVar(jnp.array(4.0))}
        gradients, _ = objax.GradValues(lambda x: dict.get(hidden, id(self)).value * x, None)(3.0)
        assert list(map(float, gradients)) == [3]

    def test_inputs_of_trees_and_float64(self):
        gradients = objax.Grad(lambda x: x["a"] ** 2 + x["b"].sum(), None, (0,))({"a": 3.0, "b": np.ones(2)})
        assert float(gradients[0]["a"]) == 6 and gradients[0]["b"].tolist() == [1, 1]

    def test_an_input_that_is_a_variable_is_its_value(self):
        v = objax.TrainVar(jnp.array([1.0, 2.0]))
        assert objax.Grad(lambda x: (x**2).sum(), None, (0,))(v)[0].tolist() == [2, 4]

    @pytest.mark.parametrize("wrong", [0, [0]])
    def test_numbers_of_inputs_must_be_a_tuple(self, wrong):
        with pytest.raises(AssertionError, match="Must pass a tuple"):
            objax.Grad(lambda x: x, None, wrong)


class TestState:
    def test_assignments_last_and_the_gradient_is_that_at_entry(self):
        v, s = objax.TrainVar(jnp.array(3.0)), objax.StateVar(jnp.array(1.0))

        def f():
            y = v.value**2 * s.value
            v.assign(v.value * 0 + 100.0)
            s.value = s.value + 1
            return y

        for variables in (objax.VarCollection(v=v, s=s), objax.VarCollection(v=v, ref=objax.TrainRef(v), s=s)):
            v.assign(jnp.array(3.0)), s.assign(jnp.array(1.0))
            assert float(objax.Grad(f, variables)()[0]) == 6
            assert (float(v.value), float(s.value)) == (100, 2)

    def test_gradient_of_a_step_of_a_gradient(self):
        w = objax.TrainVar(jnp.array(1.5))
        vc, sgd = objax.VarCollection(w=w), objax.optimizer.SGD(objax.VarCollection(w=w))
        inner = objax.GradValues(lambda x: (w.value * x) ** 2, vc)

        def outer(x):
            before = w.value
            sgd(0.1, inner(x)[0])
            loss = (w.value * x) ** 2
            w.assign(before)
            return loss

        by_hand = jax.grad(lambda w: ((w - 0.1 * 2 * w * 9.0) * 3.0) ** 2)
        for call in (objax.Grad(outer, vc), objax.Jit(objax.Grad(outer, vc))):
            np.testing.assert_allclose(call(3.0)[0], by_hand(1.5), rtol=1e-5)
            assert float(w.value) == 1.5


class TestSecond:
    def test_jacobian_and_hessian(self):
        w = objax.TrainVar(jnp.array([1.0, 2.0]))
        f = lambda x: w.value**2 * x
        x = jnp.array([3.0, 4.0])
        by_x, by_w = objax.Jacobian(f, objax.VarCollection(w=w), (0,))(x)
        np.testing.assert_allclose(by_x, np.diag([1.0, 4.0]))
        np.testing.assert_allclose(by_w, np.diag([6.0, 16.0]))
        hessian = objax.Jit(objax.Hessian(lambda x: f(x).sum(), objax.VarCollection(w=w), (0,)))(x)
        np.testing.assert_allclose(hessian[0][0], np.zeros((2, 2)))
        np.testing.assert_allclose(hessian[0][1], np.diag([2.0, 4.0]))
        np.testing.assert_allclose(hessian[1][0], np.diag([2.0, 4.0]))
        np.testing.assert_allclose(hessian[1][1], np.diag([6.0, 8.0]))


def test_signatures_and_representations():
    def f(x, y):
        return x, {"x": x, "y": y}

    f.__annotations__ = {"x": JaxArray, "return": Tuple[JaxArray, Dict[str, JaxArray]]}  # noqa: UP006  (not as text)
    values = objax.GradValues(f, objax.VarCollection())
    returned = Tuple[List[JaxArray], Tuple[JaxArray, Dict[str, JaxArray]]]  # noqa: UP006
    assert inspect.signature(values).return_annotation == returned
    assert inspect.signature(objax.Grad(f, None)).return_annotation == List[JaxArray]  # noqa: UP006
    assert list(inspect.signature(values).parameters) == ["x", "y"]
    assert repr(objax.Grad(f, None, (0,))) == "objax.Grad(f=f, input_argnums=(0,))"
    assert repr(objax.Hessian(f, {})) == "objax.Hessian(f=f, input_argnums=None)"
