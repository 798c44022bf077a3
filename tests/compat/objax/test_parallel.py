# SPDX-License-Identifier: Apache-2.0
"""Parallel on four devices: parts of the batch, variables of each device, collectives, wrong batches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


class Sum(objax.Module):
    def __init__(self):
        self.w, self.total = objax.TrainVar(jnp.arange(3.0)), objax.StateVar(jnp.zeros(()))

    def __call__(self, x):
        self.total.value = self.total.value + x.sum()
        return x * self.w.value[None]


class TestVariables:
    @pytest.mark.parametrize("listed", [True, False], ids=["listed", "found"])
    @pytest.mark.parametrize("replicated", [True, False], ids=["replicated", "by itself"])
    def test_each_device_has_its_own(self, listed, replicated):
        module = Sum()
        call = objax.Parallel(module, module.vars() if listed else None)
        if replicated:
            with call.vars().replicate():
                out = [call(X), call(X)]
                np.testing.assert_allclose(module.total.value, 2 * X.reshape(4, 6).sum(1), rtol=1e-5)
            total = 2 * X.reshape(4, 6).sum(1).mean()
        else:
            out, total = [call(X)], X.reshape(4, 6).sum(1).mean()
        for y in out:
            np.testing.assert_allclose(y, X * np.arange(3.0), rtol=1e-6)
        np.testing.assert_allclose(module.total.value, total, rtol=1e-5)
        assert module.w.shape == (3,)

    def test_gradients_that_are_averaged_train_alike(self):
        w = objax.TrainVar(jnp.zeros(3))
        vc = objax.VarCollection(w=w)
        sgd = objax.optimizer.SGD(vc)
        gradient = objax.Grad(lambda x: ((x @ w.value - 1) ** 2).mean(), vc)

        def step(x):
            sgd(0.1, objax.functional.parallel.pmean(gradient(x)))
            return w.value

        call = objax.Parallel(step, vc + sgd.vars(), reduce=lambda x: x)
        with call.vars().replicate():
            rows = np.asarray(call(X))
        np.testing.assert_allclose(rows, np.broadcast_to(0.1 * 2 * X.mean(0), (4, 3)), rtol=1e-5)
        np.testing.assert_allclose(w.value, rows[0], rtol=1e-6)

    def test_by_itself_it_leaves_what_nobody_wrote(self):
        count, flag = objax.StateVar(jnp.array(3)), objax.StateVar(jnp.array(True))
        large, apart = objax.TrainVar(jnp.array(3e38)), objax.StateVar(jnp.ones(()), None)

        def f(x):
            apart.value = apart.value + 1
            return jnp.where(flag.value & (large.value > 0), x * count.value.astype(float), 0)

        call = objax.Parallel(f)
        for _ in range(2):
            np.testing.assert_allclose(call(X), 3 * X, rtol=1e-6)
        assert (count.dtype, flag.dtype, float(large.value)) == (jnp.int32, bool, float(np.float32(3e38)))
        assert float(apart.value) == 1 and call._call.traces == 1

    def test_by_itself_an_error_leaves_all(self):
        count = objax.StateVar(jnp.array(3))

        def f(x):
            count.value = count.value + 1
            raise KeyError

        with pytest.raises(KeyError):
            objax.Parallel(f)(X)
        assert (int(count.value), count.dtype, count.shape) == (3, jnp.int32, ())

    def test_draws_differ_from_device_to_device(self):
        objax.random.DEFAULT_GENERATOR.seed(0)
        call = objax.Parallel(lambda x: objax.random.normal((1,)) + 0 * x[0])
        draws = [np.asarray(call(X[:, 0])) for _ in range(2)]
        assert len(np.unique(draws)) == 8

    def test_within_each_other(self):
        module = Sum()
        call = objax.Parallel(module)
        with objax.VarCollection(w=module.w).replicate():
            with module.vars().replicate():
                call(X), call(X)
                assert module.w.shape == (4, 3) and module.total.shape == (4,)
            assert module.w.shape == (4, 3) and module.total.shape == ()
        assert module.w.shape == (3,)
        np.testing.assert_allclose(module.total.value, 2 * X.reshape(4, 6).sum(1).mean(), rtol=1e-5)

    def test_an_error_at_the_start_leaves_all_as_they_were(self):
        module, text = Sum(), objax.StateVar("text")
        with pytest.raises(AttributeError), (module.vars() + objax.VarCollection(text=text)).replicate():
            pass
        assert module.w.shape == (3,) and text.value == "text"

    def test_after_a_plain_transformation_of_jax(self):
        module = Sum()
        plain = jax.jit(lambda: module.w.value.sum())
        assert float(plain()) == 3
        call = objax.Parallel(module)
        with module.vars().replicate():
            np.testing.assert_allclose(call(X), X * np.arange(3.0), rtol=1e-6)
            module.w.assign(2 * module.w.value)
        assert module.w.value.tolist() == [0, 2, 4] and float(plain()) == 6


class TestArguments:
    def test_trees_scalars_and_results(self):
        call = objax.Parallel(lambda pair, y: [pair["x"] + y, -y], reduce=lambda x: x)
        sums, minus = call({"x": X}, jnp.float32(2))
        np.testing.assert_allclose(sums, X.reshape(4, 2, 3) + 2)
        assert minus.tolist() == [-2] * 4 and call.ndevices == 4

    def test_static_arguments_are_never_mapped(self):
        call = objax.Parallel(
            lambda x, axis, mode: x.sum(axis) if mode == "sum" else x.max(axis), static_argnums=(1, 2)
        )
        np.testing.assert_allclose(call(X, 1, "sum"), X.sum(1), rtol=1e-5)
        np.testing.assert_allclose(call(X, 1, "max"), X.max(1))

    def test_a_static_argument_may_be_left_at_its_default(self):
        call = objax.Parallel(lambda x, n=2: n * x, static_argnums=(1,))
        np.testing.assert_allclose(call(X), 2 * X)

    def test_a_variable_goes_in_as_its_value(self):
        np.testing.assert_allclose(objax.Parallel(lambda x: 2 * x)(objax.TrainVar(jnp.asarray(X))), 2 * X)

    def test_results_go_in_again(self):
        call = objax.Parallel(lambda x: x + 1)
        np.testing.assert_allclose(call(call(X)), X + 2, rtol=1e-6)

    def test_another_axis_name(self):
        total = functools.partial(objax.functional.parallel.psum, axis_name="d")
        assert objax.Parallel(lambda x: total(x), axis_name="d")(jnp.ones(4)).tolist() == [4] * 4

    def test_wrong_batches(self):
        call = objax.Parallel(lambda x: x)
        with pytest.raises(AssertionError) as caught:
            call(X[:6])
        assert "batch (6, 3) among 4 devices" in str(caught.value) and "a batch of 6" in str(caught.value)
        with pytest.raises(AssertionError, match="static_argnums"):
            call("text")

    def test_representation(self):
        assert repr(objax.Parallel(objax.Function(jax.nn.relu, objax.VarCollection()))).startswith(
            "objax.Parallel(f=objax.Function(f=relu), reduce=concatenate(*, axis=0, dtype=None), axis_name='device'"
        )
