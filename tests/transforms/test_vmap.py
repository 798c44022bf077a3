# SPDX-License-Identifier: Apache-2.0
"""vmap: shared and stacked modules, writes that differ from lane to lane, random lanes, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, ShapeError, StackedError, VmapWriteError

X = np.arange(15, dtype=np.float32).reshape(5, 3)


class Total(tether.Module):
    def __init__(self, reduce=None, shape=()):
        self.total = tether.State(jnp.zeros(shape), reduce=reduce)
        self.calls = tether.State(0)

    def __call__(self, x):
        self.calls = self.calls + 1
        self.total = self.total + x.sum()
        return self.total


class TestShared:
    def test_same_write_in_every_lane(self):
        class Net(tether.Module):
            def __init__(self):
                self.calls, self.w = tether.State(0), tether.Param(jnp.ones(3))

            def __call__(self, x):
                self.calls = self.calls + 1
                return x @ self.w

        net = Net()
        for f in (tether.vmap(net), tether.jit(tether.vmap(net)), tether.vmap(tether.jit(net))):
            before = int(net.calls)
            for calls in (1, 2):
                np.testing.assert_array_equal(f(X), X.sum(1))
                assert int(net.calls) == before + calls
                assert net.calls.shape == ()
        assert tether.vmap(tether.vmap(net))(np.ones((2, 4, 3), np.float32)).shape == (2, 4)
        assert net.calls.shape == () and int(net.calls) == 7

    @pytest.mark.parametrize("size", [3, 5, 1])
    def test_undeclared_write_is_an_error_whatever_the_size(self, size):
        net = Total(shape=(size,))
        for f in (tether.vmap(net, axis_name="rows"), tether.jit(tether.vmap(net, axis_name="rows"))):
            for _ in range(2):
                with pytest.raises(VmapWriteError, match=r"(?s)total.*float32\[\d\].*'rows'.*mean.*stack.*discard"):
                    f(X)
                assert net.total.shape == (size,) and float(jnp.abs(net.total).sum()) == 0 and int(net.calls) == 0

    @pytest.mark.parametrize("rule", ["mean", "sum", "discard"])
    def test_rule_at_the_declaration_and_at_the_call(self, rule):
        right = {"mean": X.sum() / 5, "sum": X.sum(), "discard": 0.0}[rule]
        for net, options in [(Total(rule), {}), (Total(), {"writes": {"total": rule}})]:
            out = tether.vmap(net, **options)(X)
            np.testing.assert_allclose(out, X.sum(1))  # a lane reads its own
            assert float(net.total) == pytest.approx(right)
            assert int(net.calls) == 1 and net.total.shape == ()

    def test_rule_at_the_call_goes_first(self):
        net = Total("sum")
        tether.vmap(net, writes={tether.State: "mean"})(X)
        assert float(net.total) == pytest.approx(X.sum() / 5)

    def test_stack_gives_each_lane_its_row(self):
        net = Total(shape=(5,))
        f = tether.vmap(net, writes={"total": "stack"})
        for calls in (1, 2, 3):
            np.testing.assert_allclose(f(X), calls * X.sum(1))
            np.testing.assert_allclose(net.total, calls * X.sum(1))

    def test_rules_find_a_closed_over_model(self):
        net = Total()
        tether.jit(tether.vmap(lambda x: net(x), writes={"total": "sum"}))(X)
        assert float(net.total) == X.sum()

    def test_wrong_rule(self):
        with pytest.raises(ArgumentError, match="average"):
            tether.vmap(Total(), writes={"total": "average"})

    def test_combined_over_the_axis_by_hand(self):
        net = Total()

        def f(x):
            net.total = net.total + jax.lax.psum(x.sum(), "rows")
            return x

        tether.vmap(f, axis_name="rows")(X)
        assert float(net.total) == X.sum()

    def test_batchnorm_over_a_named_axis(self):
        norm = nn.BatchNorm(3, axis_name="batch")
        f = tether.vmap(norm, axis_name="batch")
        mean, var = np.zeros(3), np.ones(3)
        for g in (f, tether.jit(f), f):
            y = g(X)
            np.testing.assert_allclose(y, (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5), rtol=1e-4, atol=1e-5)
            mean, var = 0.9 * mean + 0.1 * X.mean(0), 0.9 * var + 0.1 * X.var(0)
            np.testing.assert_allclose(norm.mean, mean, rtol=1e-5)
            np.testing.assert_allclose(norm.var, var, rtol=1e-5)
        assert norm.eval()(X[0]).shape == (3,)

    def test_batchnorm_over_both_axes_of_a_nested_vmap(self):
        norm = nn.BatchNorm(3, axis_name=("a", "b"))
        x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
        y = tether.vmap(tether.vmap(norm, axis_name="b"), axis_name="a")(x)
        right = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-5)
        np.testing.assert_allclose(y, right, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(norm.mean, 0.1 * x.mean((0, 1)), rtol=1e-4, atol=1e-6)

    def test_gradient_through_a_shared_write(self):
        ema = tether.State(0.0)

        def f(w):
            def lane(x):
                ema.value = w * jax.lax.pmean(x.sum(), "rows")
                return ema.value * x.sum()

            return tether.vmap(lane, axis_name="rows")(X).sum()

        right = X.sum() ** 2 / 5
        assert float(tether.grad(f)(2.0)) == pytest.approx(right)
        assert float(ema.value) == pytest.approx(2 * X.sum() / 5)


class TestEnsemble:
    def members(self):
        return [nn.Sequential([nn.Linear(3, 2, key=jax.random.key(i)), nn.BatchNorm(2)]) for i in range(4)]

    def test_members_equal_models_trained_alone(self):
        single, rng = self.members(), np.random.default_rng(0)
        stacked = tether.stack(self.members())
        xs = rng.normal(size=(4, 6, 3)).astype(np.float32)
        c = rng.normal(size=(6, 2)).astype(np.float32)

        def train(model, x):
            gradient = tether.grad(lambda m: (m(x) * c).sum())(model)
            model[0].weight = model[0].weight - 0.1 * gradient[0].weight

        step = tether.jit(tether.vmap(train))
        for _ in range(3):
            for model, x in zip(single, xs, strict=True):
                train(model, x)
            step(stacked, xs)
        assert step.traces == 1
        for i, model in enumerate(single):
            member = tether.index(stacked, i)
            for path, variable in tether.variables(model).items():
                np.testing.assert_allclose(
                    tether.variables(member)[path].value, variable.value, rtol=2e-5, atol=1e-5, err_msg=path
                )

    def test_vmapped_constructor(self):
        keys = jax.random.split(jax.random.key(0), 4)
        for make in (tether.vmap(lambda key: nn.Linear(3, 2, key=key)),) * 2:
            stacked = make(keys)
            assert stacked.weight.shape == (4, 2, 3)
            alone = nn.Linear(3, 2, key=keys[2])
            np.testing.assert_allclose(tether.index(stacked, 2).weight, alone.weight, rtol=1e-6)
            out = tether.vmap(lambda member, x: member(x), in_axes=(0, None))(stacked, X)
            np.testing.assert_allclose(out[2], alone(X), rtol=1e-5, atol=1e-5)
        stacked = tether.jit(tether.vmap(lambda key: nn.Linear(3, 2, key=key)))(keys)
        np.testing.assert_allclose(tether.index(stacked, 2).weight, alone.weight, rtol=1e-6)
        assert tether.vmap(lambda m, x: m(x), in_axes=(0, None))(stacked, X).shape == (4, 5, 2)

    def test_gradients_are_stacked(self):
        stacked = tether.stack(self.members())
        gradients = tether.vmap(lambda m, x: tether.grad(lambda m: m(x).sum())(m), in_axes=(0, None))(stacked, X)
        assert gradients[0].weight.shape == (4, 2, 3) and gradients[1].mean is None
        total = tether.grad(lambda s: tether.vmap(lambda m: m(X).sum())(s).sum())(stacked)
        assert total[0].weight.shape == (4, 2, 3)

    def test_stacked_module_called_as_a_single_one(self):
        stacked = tether.stack([nn.Linear(3, 2), nn.Linear(3, 2)])
        with pytest.raises(StackedError, match="vmap"):
            stacked(X[0])

    def test_unstacked_module_asked_to_be_mapped(self):
        with pytest.raises(StackedError, match=r"in_axes"):
            tether.vmap(lambda m, x: m(x), in_axes=(0, 0))(nn.Linear(3, 2), X)

    def test_stacked_module_comes_back_as_itself(self):
        stacked = tether.stack([nn.Linear(3, 2), nn.Linear(3, 2)])
        assert tether.vmap(lambda m: m)(stacked) is stacked
        assert tether.jit(tether.vmap(lambda m: m))(stacked) is stacked

    def test_axes_by_selection(self):
        norm = nn.BatchNorm(3)
        is_state = lambda keys: keys[-1].name in ("mean", "var")
        batched = jax.tree_util.tree_map_with_path(lambda k, v: jnp.stack([v, v]) if is_state(k) else v, norm)
        xs = np.stack([X, X + 1])
        y = tether.vmap(lambda m, x: m(x), in_axes=({tether.State: 0, tether.Param: None}, 0))(batched, xs)
        assert y.shape == (2, 5, 3)
        np.testing.assert_allclose(batched.mean, 0.1 * xs.mean(1), rtol=1e-5)
        assert norm.mean.shape == (3,)

    def test_nested_ensembles(self):
        inner = [tether.stack([nn.Linear(3, 2, key=jax.random.key(2 * i + j)) for j in range(2)]) for i in range(3)]
        outer = tether.stack(inner)
        y = tether.vmap(tether.vmap(lambda m: m(X)))(outer)
        assert y.shape == (3, 2, 5, 2)
        np.testing.assert_allclose(y[2, 1], nn.Linear(3, 2, key=jax.random.key(5))(X), rtol=1e-5, atol=1e-5)


class TestRandom:
    def masks(self, f, *args):
        out = np.concatenate([np.asarray(f(*args)).reshape(-1, 32) for _ in range(2)])
        assert set(np.unique(out)) == {0.0, 2.0}
        return out

    def test_masks_differ_in_every_lane_and_call(self):
        dropout, x = nn.Dropout(0.5), np.ones((2, 4, 32), np.float32)
        nested = tether.vmap(tether.vmap(dropout))
        for f, inputs in ((tether.vmap(dropout), x[0]), (tether.jit(nested), x), (nested, x)):
            masks = self.masks(f, inputs)
            assert len(np.unique(masks, axis=0)) == len(masks)

    def test_outer_stream_advances_once(self):
        dropout = nn.Dropout(0.5)
        tether.vmap(lambda x: dropout(dropout(x)))(np.ones((4, 32), np.float32))
        after = jax.random.key_data(tether.random.draw())
        tether.seed(0)
        tether.random.draw()
        np.testing.assert_array_equal(after, jax.random.key_data(tether.random.draw()))

    def test_two_draws_in_a_lane_differ(self):
        out = tether.vmap(
            lambda x: (jax.random.uniform(tether.random.draw()), jax.random.uniform(tether.random.draw()))
        )(np.ones(4, np.float32))
        assert len(np.unique(np.concatenate(out))) == 8

    def test_jitted_lanes_draw_what_eager_ones_do(self):
        dropout, x = nn.Dropout(0.5), np.ones((4, 32), np.float32)
        eager = [np.asarray(tether.vmap(dropout)(x)) for _ in range(2)]
        for wrap in (lambda f: tether.jit(tether.vmap(f)), lambda f: tether.vmap(tether.jit(f))):
            tether.seed(0)
            f = wrap(dropout)
            for mask in eager:
                np.testing.assert_array_equal(f(x), mask)

    def test_evaluation_leaves_the_stream_alone(self):
        model = nn.Dropout(0.5).eval()
        for f in (tether.vmap(model), tether.vmap(tether.jit(model)), tether.vmap(tether.checkpoint(model))):
            f(np.ones((4, 32), np.float32))
        after = jax.random.key_data(tether.random.draw())
        tether.seed(0)
        np.testing.assert_array_equal(after, jax.random.key_data(tether.random.draw()))

    def test_stacked_streams_are_the_members_own(self):
        class Noisy(tether.Module):
            def __init__(self, seed):
                self.rng = tether.Rng(seed)

            def __call__(self):
                return jax.random.uniform(tether.random.draw(tether.cell(self, "rng")))

        alone = [float(Noisy(i)()) for i in range(3)]
        stacked = tether.stack([Noisy(i) for i in range(3)])
        np.testing.assert_allclose(tether.vmap(lambda m: m())(stacked), alone)


class TestAxes:
    def test_in_and_out_axes(self):
        f = lambda x, y: (x * y, x.sum())
        out = tether.vmap(f, in_axes=(1, None), out_axes=(1, 0))(X, jnp.ones(5))
        np.testing.assert_array_equal(out[0], X)
        np.testing.assert_array_equal(out[1], X.sum(0))

    def test_trees_of_axes(self):
        f = lambda tree, y: tree["a"] + tree["b"] + y
        out = tether.vmap(f, in_axes=({"a": 0, "b": None}, 0))({"a": X, "b": jnp.ones(3)}, X)
        np.testing.assert_array_equal(out, 2 * X + 1)

    def test_keywords_are_mapped_over_axis_0(self):
        np.testing.assert_array_equal(tether.vmap(lambda x, *, y: x + y)(X, y=X), 2 * X)

    def test_axis_size_alone(self):
        assert tether.vmap(lambda: tether.random.draw(), axis_size=3)().shape == (3,)

    def test_negative_axes(self):
        np.testing.assert_array_equal(tether.vmap(lambda x: x.sum(), in_axes=-1)(X), X.sum(0))

    def test_errors(self):
        with pytest.raises(ShapeError, match=r"x: 5.*y: 2"):
            tether.vmap(lambda x, y: x)(X, X[:2])
        with pytest.raises(ArgumentError, match="in_axes"):
            tether.vmap(lambda x, y: x, in_axes=(0,))(X, X)
        with pytest.raises(ArgumentError, match="nothing is mapped"):
            tether.vmap(lambda x: x, in_axes=None)(X)
        with pytest.raises(ShapeError, match="axis 2"):
            tether.vmap(lambda x: x, in_axes=2)(X)
        with pytest.raises(ArgumentError, match="out_axes"):
            tether.vmap(lambda x: x, out_axes=None)(X)

    def test_unmapped_result(self):
        assert tether.vmap(lambda x: 3.0, out_axes=None)(X) == 3.0


def test_failure_writes_nothing():
    net, fail = Total("sum"), [True]

    def f(x):
        y = net(x)
        if fail:
            raise ValueError("stop")
        return y

    for call in (tether.vmap(f), tether.jit(tether.vmap(f)), tether.vmap(tether.vmap(f))):
        with pytest.raises(ValueError, match="stop"):
            call(np.ones((2, 2, 3), np.float32))
        assert (float(net.total), int(net.calls)) == (0.0, 0)
    fail.clear()
    tether.vmap(f)(X)
    assert (float(net.total), int(net.calls)) == (float(X.sum()), 1)


class TestAxesByLeaf:
    def test_what_is_no_array_is_shared(self):
        f = tether.vmap(lambda x, word, tree: x * len(word) + tree["y"], in_axes=tether.if_array(0))
        x = jnp.arange(3.0)
        assert f(x, "ab", {"y": 10 * x, "name": "z"}).tolist() == (12 * x).tolist()

    def test_for_one_argument_another_axis(self):
        x = jnp.arange(6.0).reshape(2, 3)
        f = tether.vmap(lambda pair, y: pair[0].sum() * pair[1] + y, in_axes=(tether.if_array(1), 0))
        assert f((x, 2), jnp.zeros(3)).tolist() == (2 * x.sum(0)).tolist()

    def test_stacked_modules_are_mapped_and_others_shared(self, key):
        stack = tether.vmap(lambda key: nn.Linear(2, 3, key=key))(jax.random.split(key, 4))
        alone, x = nn.Linear(2, 3, key=key), jnp.ones((4, 2))
        f = tether.vmap(lambda layer, x: layer(x), in_axes=(tether.if_array(0), 0))
        assert jnp.allclose(f(stack, x), jnp.einsum("noi,ni->no", stack.weight, x) + stack.bias)
        assert jnp.allclose(f(alone, x), x @ alone.weight.T + alone.bias[None])
