# SPDX-License-Identifier: Apache-2.0
"""Vectorize: axes, scalars, keys of their own, what becomes of writes, and wrong batches."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax.variable import reduce_mean

X = np.arange(12.0, dtype=np.float32).reshape(4, 3)


class TestAxes:
    def test_axes_of_several_arguments(self):
        f = objax.Vectorize(lambda x, y, z: (x * y).sum() + z, batch_axis=(0, 1, None))
        np.testing.assert_allclose(f(X, X.T, jnp.array(5.0)), (X * X).sum(1) + 5)

    def test_a_scalar_is_the_same_for_all(self):
        f = objax.Vectorize(lambda x, y: x.sum() * y, batch_axis=(0, 0))
        for two in (2.0, jnp.array(2.0), np.float32(2)):
            np.testing.assert_allclose(f(X, two), X.sum(1) * 2)

    def test_trees(self):
        f = objax.Vectorize(lambda pair: {"sum": pair[0] + pair[1]})
        np.testing.assert_allclose(f((X, X))["sum"], 2 * X)

    def test_wrong_numbers_of_axes(self):
        with pytest.raises(AssertionError, match=r"fix: +batch_axis=\(0, 0\)"):
            objax.Vectorize(lambda x, y: x, batch_axis=(0,))
        with pytest.raises(AssertionError, match="a number or None for each argument"):
            objax.Vectorize(lambda x: x, batch_axis=((0, None),))
        with pytest.raises(AssertionError, match="No arguments"):
            objax.Vectorize(lambda x: x, batch_axis=(None,))
        with pytest.raises(AssertionError, match="passed 2 must match batched 1"):
            objax.Vectorize(lambda *a: a[0])(X, X)

    def test_wrong_batches(self):
        f = objax.Vectorize(lambda x, y: x, batch_axis=(0, 1))
        with pytest.raises(AssertionError) as caught:
            f(X, np.ones((4, 5), np.float32))
        assert "argument 0, axis 0: 4, argument 1, axis 1: 5" in str(caught.value)
        with pytest.raises(AssertionError, match="at: +argument 1") as caught:
            f(X, np.ones(4, np.float32))
        assert "float32[4], mapped over axis 1" in str(caught.value)
        with pytest.raises(AssertionError, match="no argument is mapped"):
            f(1.0, 2.0)


class TestVariables:
    def test_written_values_are_reduced(self):
        first = lambda x: x[0]
        mean, head, none = (objax.StateVar(jnp.zeros(()), reduce) for reduce in (reduce_mean, first, None))
        train = objax.TrainVar(jnp.zeros(()))

        def f(x):
            for v in (mean, head, none, train):
                v.assign(v.value + x[0])
            return x[0] + mean.value

        out = objax.Vectorize(f, objax.VarCollection(mean=mean, head=head, none=none, train=train))(X + 1)
        np.testing.assert_allclose(out, 2 * (X[:, 0] + 1))
        assert [float(v.value) for v in (mean, head, none, train)] == [5.5, 1, 0, 5.5]

    def test_a_variable_that_none_wrote_is_not_reduced(self):
        total = objax.StateVar(jnp.array(3.0), reduce=lambda x: x.sum(0))
        np.testing.assert_allclose(objax.Vectorize(lambda x: x * total.value)(X), 3 * X)
        assert float(total.value) == 3

    def test_a_variable_goes_in_as_its_value(self):
        v = objax.TrainVar(jnp.asarray(X))
        np.testing.assert_allclose(objax.Vectorize(lambda x: x.sum())(v), X.sum(1))

    def test_keys_of_a_copy_that_no_list_names(self):
        generator = objax.random.Generator(7)
        generator()

        class Registry:  # nobody looks for variables in a class
            other = copy.deepcopy(generator)

        call = objax.Vectorize(lambda x: objax.random.normal((), generator=Registry.other) + x)
        before = np.asarray(generator.key.value)
        assert len(np.unique(call(jnp.zeros(6)))) == 6
        np.testing.assert_array_equal(generator.key.value, before)
        np.testing.assert_array_equal(Registry.other.key.value, jax.random.split(before, 7)[0])

    def test_each_example_has_a_key_of_its_own(self):
        generator = objax.random.Generator(7)
        f = lambda x: objax.random.normal((), generator=generator) + 0 * x
        found, listed = objax.Vectorize(f), objax.Vectorize(f, generator.vars())
        keys = jax.random.split(jax.random.PRNGKey(7), 5)
        wanted = [jax.random.normal(jax.random.split(key, 2)[1]) for key in keys[1:]]
        for call in (listed, found):
            generator.seed(7)
            np.testing.assert_allclose(call(jnp.zeros(4)), wanted, rtol=1e-6)
            np.testing.assert_array_equal(generator.key.value, keys[0])

    def test_keys_that_no_list_names(self):
        objax.random.DEFAULT_GENERATOR.seed(0)
        call = objax.Vectorize(lambda x: objax.random.normal(()) + x, objax.VarCollection())
        assert len(np.unique(call(jnp.zeros(6)))) == 6
        assert len(np.unique([call(jnp.zeros(6)), call(jnp.zeros(6))])) == 12

    def test_a_failure_leaves_the_states(self):
        generator = objax.random.Generator(7)

        def f(x):
            objax.random.normal((), generator=generator)
            raise KeyError

        before = generator.key.value
        with pytest.raises(KeyError):
            objax.Vectorize(f)(X)
        np.testing.assert_array_equal(generator.key.value, before)

    def test_per_example_gradients(self):
        w = objax.TrainVar(jnp.array([1.0, 2.0, 3.0]))
        each = objax.Vectorize(
            objax.Grad(lambda x: (w.value * x).sum() ** 2, objax.VarCollection(w=w)), batch_axis=(0,)
        )
        wanted = 2 * (X @ np.array([1.0, 2.0, 3.0]))[:, None] * X
        np.testing.assert_allclose(each(X)[0], wanted, rtol=1e-6)
        np.testing.assert_allclose(objax.Jit(each)(X)[0], wanted, rtol=1e-6)


def test_representation():
    assert repr(objax.Vectorize(lambda x: x)) == "objax.Vectorize(f=objax.Function(f=<lambda>), batch_axis=(0,))"
