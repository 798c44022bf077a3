# SPDX-License-Identifier: Apache-2.0
"""shard_map: what each shard reads and writes, data and tensor parallel steps, random draws, rules for writes."""

from __future__ import annotations

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tether
from tests.transforms.shard_models import BLOCKS, GRID, LINE, SEEN_ONCE, Net, Total, X, is_clean, spec_of
from tether import nn
from tether.errors import MissedReadWarning, VmapWriteError

WEIGHTS = np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32)  # of the loss, else BatchNorm's gradient is 0

WAYS = {
    "argument": lambda net: (lambda net, x: net(x), (net,)),
    "closure": lambda net: (lambda x: net(x), ()),
    "self": lambda net: (net, ()),
    "method": lambda net: (net.step, ()),
    "partial": lambda net: (functools.partial(lambda net, x: net(x), net), ()),
    "default": lambda net: (lambda x, net=net: net(x), ()),
}


class TestReadAndWrite:
    @pytest.mark.parametrize(("way", "compiled"), [*((way, True) for way in WAYS), ("method", False)])
    def test_counter_in_common_and_cache_of_each_shard(self, way, compiled):
        net = Net()
        tether.place(net, NamedSharding(LINE, P("d")), "seen")
        fun, first = WAYS[way](net)
        specs = (None,) * len(first) + (P("d"),)
        f = tether.shard_map(fun, mesh=LINE, in_specs=specs, out_specs=P("d"))
        f = tether.jit(f) if compiled else f
        for calls in (1, 2):
            y = f(*first, X)
            np.testing.assert_allclose(
                y, (BLOCKS * calls + calls * BLOCKS.sum(1, keepdims=True)).reshape(8, 3), rtol=1e-5
            )
            np.testing.assert_allclose(net.seen, calls * BLOCKS.sum(1), rtol=1e-5)
            assert int(net.calls) == calls and net.calls.shape == ()
            assert (spec_of(tether.cell(net, "seen")), y.sharding.spec) == (P("d"), P("d"))
            assert spec_of(tether.cell(net, "calls")) == P() and net.calls.sharding.is_fully_replicated
            assert is_clean(net)

    def test_python_runs_once_a_call_and_collectives_work_in_it(self):
        net, log = Net(), []

        def f(x):
            log.append(jax.lax.axis_size("d"))
            return jax.lax.psum(net(x), "d"), jax.lax.axis_index("d")[None]

        call = tether.shard_map(f, mesh=LINE, in_specs=P("d"), out_specs=(P(), P("d")), states={"seen": P("d")})
        total, index = call(X)
        np.testing.assert_allclose(total, (BLOCKS + BLOCKS.sum(1, keepdims=True)).sum(0), rtol=1e-5)
        np.testing.assert_array_equal(index, range(4))
        tether.jit(call)(X)
        assert log == [4, 4]

    def test_failure_in_the_body_changes_nothing(self):
        net = Net()

        def f(x, fail):
            y = net(x)
            if fail:
                raise KeyError("stop")
            return y

        call = tether.jit(tether.shard_map(f, mesh=LINE, in_specs=P("d"), out_specs=P("d"), states={"seen": P("d")}))
        for _ in range(2):
            with pytest.raises(KeyError):
                call(X, True)
            assert int(net.calls) == 0 and float(jnp.abs(net.seen).sum()) == 0 and is_clean(net)
        call(X, False)
        assert int(net.calls) == 1

    def test_nothing_leaks(self):
        net = Net()
        with jax.checking_leaks():
            for _ in range(2):
                call = tether.shard_map(net, mesh=LINE, in_specs=P("d"), out_specs=P("d"), states={"seen": P("d")})
                tether.jit(call)(X)
        gc.collect()
        assert int(net.calls) == 2

    def test_declared_spec_goes_before_in_specs_and_the_sharding(self):
        net = Net()
        tether.place(net, NamedSharding(LINE, P("d")), "seen")
        module_of_specs = jax.tree.map(lambda leaf: P("d") if leaf.ndim else P(), net)
        shapes = []

        def f(net, x):
            shapes.append(net.seen.shape)
            return x

        for spec, states in (
            (None, None),
            (P(), None),
            (P(), {"seen": P("d"), tether.State: P()}),
            ({"seen": P("d"), tether.State: P()}, None),
            ({"seen": P("d")}, {net: P()}),
            (module_of_specs, None),
        ):
            call = tether.shard_map(f, mesh=LINE, in_specs=(spec, P("d")), out_specs=P("d"), states=states)
            tether.eval_shape(call, net, X)
        assert shapes == [(1, 3), (4, 3), (1, 3), (1, 3), (4, 3), (1, 3)]

    @pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
    def test_variable_stays_where_it_was_whatever_the_spec(self, compiled):
        net = Net()
        tether.place(net, NamedSharding(LINE, P("d")), "seen")

        def f(x):
            net.seen = net.seen + jnp.arange(4.0)[:, None]
            return x

        f = tether.shard_map(f, mesh=LINE, in_specs=P(), out_specs=P(), states={"seen": P()})
        (tether.jit(f) if compiled else f)(X)
        assert spec_of(tether.cell(net, "seen")) == P("d")
        np.testing.assert_array_equal(net.seen[:, 0], range(4))

    def test_missed_read_runs_the_function_again(self):
        hidden = [Net()]
        tether.place(hidden[0], NamedSharding(LINE, P("d")), "seen")

        class Registry:
            __slots__ = ()

            def __getattr__(self, name):
                return hidden[0]

        registry, log = Registry(), []

        def f(x):
            log.append(registry.net.seen.shape)
            return registry.net(x)

        call = tether.shard_map(f, mesh=LINE, in_specs=P("d"), out_specs=P("d"))
        with pytest.warns(MissedReadWarning, match="shard_map: f reads Variables"):
            y = call(X)
        assert log == [(4, 3), (1, 3)]
        np.testing.assert_allclose(y, SEEN_ONCE, rtol=1e-5)
        assert int(hidden[0].calls) == 1

    def test_unread_state_does_not_count_as_read(self):
        net = Net()
        f = tether.jit(tether.shard_map(lambda x: x * net.calls, mesh=LINE, in_specs=P("d"), out_specs=P("d")))
        f(jnp.ones(4, jnp.int32))
        assert f.reads == ("net.calls",) and f.writes == ()


class Parallel(tether.Module):
    """BatchNorm over the axis of the data, then two layers whose hidden features may be split over another axis."""

    def __init__(self, data, model=None):
        k1, k2 = jax.random.split(jax.random.key(0))
        self.norm, self.first = nn.BatchNorm(3, axis_name=data, channel_axis=1), nn.Linear(3, 4, key=k1)
        self.second = tether.Param(jax.random.normal(k2, (4, 4)))
        self.calls, self.model = tether.State(0), model

    def __call__(self, x):
        self.calls = self.calls + 1
        y = jnp.tanh(self.first(self.norm(x))) @ self.second
        return y if self.model is None else jax.lax.psum(y, self.model)


SPLIT = {"first": P("j"), "second": P("j")}  # column parallel, then row parallel


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def by_hand(params, x):
    mean, var = x.mean(0), x.var(0)
    h = (x - mean[None]) / jnp.sqrt(var[None] + 1e-5) * params["norm.weight"][None] + params["norm.bias"][None]
    y = jnp.tanh(h @ params["first.weight"].T + params["first.bias"][None]) @ params["second"]
    return (y * WEIGHTS).sum(), {"norm.mean": 0.1 * mean, "norm.var": 0.9 + 0.1 * var}


def loss(net, x, weights, axis):
    return jax.lax.psum((net(x) * weights).sum(), axis)


def params_of(net):
    return {path: np.asarray(v.value) for path, v in tether.variables(net, tether.Param).items()}


def check(net, before, value, grads):
    (right, state), right_grads = by_hand(before, X)
    np.testing.assert_allclose(value, right, rtol=1e-4)
    found = {path: v.value for path, v in tether.variables(grads, tether.Param).items()}
    assert found.keys() == right_grads.keys()
    for path, value in right_grads.items():
        np.testing.assert_allclose(found[path], value, rtol=2e-3, atol=2e-4, err_msg=path)
    for path, value in state.items():
        np.testing.assert_allclose(tether.cell(net, path).value, value, rtol=1e-4, atol=1e-6)
    assert int(net.calls) == 1 and is_clean(net)


class TestParallel:
    def test_data(self):
        net = Parallel("d")
        before = params_of(net)
        f = functools.partial(loss, axis="d")
        f = tether.shard_map(f, mesh=LINE, in_specs=(P(), P("d"), P("d")), out_specs=P())
        check(net, before, *tether.jit(tether.value_and_grad(f))(net, X, WEIGHTS))

    def test_gradient_inside_the_shards(self):
        net = Parallel("d")
        before = params_of(net)
        f = tether.value_and_grad(functools.partial(loss, axis="d"))
        f = tether.shard_map(f, mesh=LINE, in_specs=(P(), P("d"), P("d")), out_specs=P())
        check(net, before, *tether.jit(f)(net, X, WEIGHTS))

    @pytest.mark.parametrize("placed", [True, False], ids=["placed", "declared"])
    def test_data_and_tensor(self, placed):
        net = Parallel("i", "j")
        before = params_of(net)
        if placed:
            for select, spec in SPLIT.items():
                tether.place(net, NamedSharding(GRID, spec), select)
        shapes = []

        def f(net, x, weights):
            shapes.append((net.first.weight.shape, net.first.bias.shape, net.second.shape))
            return loss(net, x, weights, "i")

        specs = None if placed else SPLIT
        f = tether.shard_map(f, mesh=GRID, in_specs=(specs, P("i"), P("i")), out_specs=P())
        value, grads = tether.jit(tether.value_and_grad(f))(net, X, WEIGHTS)
        assert shapes == [((2, 3), (2,), (2, 4))]
        check(net, before, value, grads)
        assert grads.first.weight.sharding.spec == P("j") and grads.norm.weight.sharding.is_fully_replicated

    def test_training_steps_compile_once_and_leave_the_layout(self, compiled):
        net = Parallel("d")
        optimizer = tether.Optimizer(net, tx := optax.adam(1e-2))
        f = functools.partial(loss, axis="d")
        f = tether.shard_map(f, mesh=LINE, in_specs=(None, P("d"), P("d")), out_specs=P())

        @tether.jit(donate_state=True)
        def step(x, weights):
            value, grads = tether.value_and_grad(f)(net, x, weights)
            optimizer.update(grads)
            return value

        @jax.jit
        def step_by_hand(params, moments):
            (value, _), gradient = by_hand(params, X)
            updates, moments = tx.update(gradient, moments)
            return value, optax.apply_updates(params, updates), moments

        params = params_of(net)
        moments = tx.init(params)
        for count in range(3):
            right, params, moments = step_by_hand(params, moments)
            compiled.clear()
            np.testing.assert_allclose(step(X, WEIGHTS), right, rtol=1e-3)
            assert [name for name in compiled if "step" in name] == ["jit(step)"] * (count == 0)
            held = tether.variables([net, optimizer], ~tether.Rng).values()
            assert all(v.value.sharding == NamedSharding(LINE, P()) for v in held)
        assert step.traces == 1
        for path, value in params.items():
            np.testing.assert_allclose(tether.cell(net, path).value, value, rtol=1e-2, atol=1e-3)

    @pytest.mark.parametrize("donate", [True, False], ids=["donated", "kept"])
    def test_jit_follows_a_variable_that_is_laid_out_anew(self, donate):
        net = Net()
        tether.place(net, NamedSharding(LINE, P()))
        shapes = []

        @tether.jit(donate_state=donate)
        @tether.shard_map(mesh=LINE, in_specs=P("d"), out_specs=P("d"), writes={"seen": "discard"})
        def f(x):
            shapes.append(net.seen.shape)
            net.calls, net.seen = net.calls + 1, net.seen + x.sum(0, keepdims=True)
            return x

        for spec in (P(), P(), P("d"), P("d"), P()):
            tether.place(net, NamedSharding(LINE, spec), "seen")
            f(X)
            assert spec_of(tether.cell(net, "seen")) == spec
        assert shapes == [(4, 3), (1, 3)] and f.traces == 2 and int(net.calls) == 5
        np.testing.assert_allclose(net.seen, 2 * BLOCKS.sum(1), rtol=1e-5)


@jax.jit
def drawn(stream, index):
    """The first key that a shard draws, and the stream after it, by hand."""
    after, here = jax.random.split(stream)
    return jax.random.split(jax.random.fold_in(here, index))[1], after


def assert_same_key(key, right):
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(right))


class TestRandom:
    def test_masks_differ_and_the_stream_advances_once(self):
        dropout = nn.Dropout(0.5)
        f = tether.shard_map(dropout, mesh=GRID, in_specs=P(("i", "j")), out_specs=P(("i", "j")))
        f, stream, ones = tether.jit(f), jax.random.key(0), jnp.ones((4, 6))
        mask = jax.jit(lambda key: jnp.where(jax.random.bernoulli(key, 0.5, (1, 6)), 2.0, 0.0))
        for _ in range(2):
            keys = [drawn(stream, index) for index in range(4)]
            np.testing.assert_array_equal(f(ones), np.concatenate([mask(key) for key, _ in keys]))
            stream = keys[0][1]
        assert_same_key(tether.random.draw(), jax.random.split(stream)[1])

    def test_who_does_not_draw_does_not_advance(self):
        rng = tether.Rng(3)
        f = lambda x, draws: x + (jax.random.uniform(tether.random.draw(rng), (1,)) if draws else 0.0)
        f = tether.jit(tether.shard_map(f, mesh=LINE, in_specs=(P("d"), None), out_specs=P("d")))
        f(jnp.zeros(4), False)
        assert_same_key(rng.value, jax.random.key(3))
        out = f(jnp.zeros(4), True)
        right = [jax.random.uniform(drawn(jax.random.key(3), i)[0], (1,))[0] for i in range(4)]
        np.testing.assert_array_equal(out, right)
        assert_same_key(rng.value, drawn(jax.random.key(3), 0)[1])

    def test_split_stream_is_each_shards_own(self):
        keys = jax.random.split(jax.random.key(5), 4)
        rng = tether.Rng(keys)
        f = lambda x: x + jax.random.uniform(tether.random.draw(rng), (1,))
        f = tether.jit(tether.shard_map(f, mesh=LINE, in_specs=P("d"), out_specs=P("d"), states={rng: P("d")}))
        for _ in range(2):
            pairs = jax.vmap(jax.random.split)(keys)
            right = jnp.stack([jax.random.uniform(key) for key in pairs[:, 1]])
            np.testing.assert_array_equal(f(jnp.zeros(4)), right)
            keys = pairs[:, 0]
            assert_same_key(rng.value, keys)

    def test_shards_in_lanes(self):
        f = lambda x: x + jax.random.uniform(tether.random.draw(), x.shape)
        f = tether.vmap(tether.shard_map(f, mesh=LINE, in_specs=P("d"), out_specs=P("d")))
        out = np.asarray(tether.jit(f)(jnp.zeros((3, 4))))
        assert len(np.unique(out)) == 12
        assert_same_key(tether.random.draw(), jax.random.split(jax.random.split(jax.random.key(0))[0])[1])


class TestRules:
    @pytest.mark.parametrize("rule", ["mean", "sum", "discard"])
    def test_at_the_declaration_and_at_the_call(self, rule):
        values = 1 + BLOCKS.sum((1, 2))
        right = {"mean": values.mean(), "sum": values.sum(), "discard": 1.0}[rule]
        for net, writes in [
            (Total(rule), None),
            (Total(), {"total": rule}),
            (Total("sum"), {"total": rule, tether.State: "sum"}),
        ]:
            f = tether.jit(tether.shard_map(net, mesh=LINE, in_specs=P("d"), out_specs=P("d"), writes=writes))
            f(X)
            assert float(net.total) == pytest.approx(right, rel=1e-5) and net.total.shape == ()

    def test_over_the_axes_that_the_value_differs_along(self):
        net = Net()

        def f(x):
            net.calls = net.calls + jax.lax.axis_index("i")
            net.seen = net.seen + jax.lax.axis_index("i") + 10.0 * jax.lax.axis_index("j")
            return x

        f = tether.shard_map(
            f,
            mesh=GRID,
            in_specs=P("i"),
            out_specs=P("i"),
            states={"seen": P("j")},
            writes={tether.State: "sum"},
        )
        tether.jit(f)(X)
        assert int(net.calls) == 1  # not 2: the shards along j agree
        np.testing.assert_array_equal(net.seen[:, 0], [1.0, 1.0, 21.0, 21.0])

    @pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
    def test_undeclared_write_that_differs_is_an_error(self, compiled):
        net = Total()
        f = tether.shard_map(lambda x: net(x), mesh=LINE, in_specs=P("d"), out_specs=P("d"))
        for _ in range(2):
            words = r"(?s)net.total  \(State\).*float32\[\].*axis 'd'.*reduce='mean'.*\{'total': 'discard'\}"
            with pytest.raises(VmapWriteError, match=words):
                (tether.jit(f) if compiled else f)(X)
            assert float(net.total) == 1.0

    def test_split_is_what_an_error_advises_where_there_are_axes(self):
        net = Net()
        f = tether.shard_map(net, mesh=LINE, in_specs=P("d"), out_specs=P("d"), states={"seen": P(None, None)})
        with pytest.raises(VmapWriteError, match=r"tether.shard_map\(f, states=\{'seen': PartitionSpec\('d'\)\}\)"):
            tether.eval_shape(f, jnp.ones((16, 3)))

    def test_without_the_check_a_write_is_taken_on_trust(self):
        net = Total()

        def f(x):
            net.total = net.total + jax.lax.psum(x.sum(), "d")
            return x

        f = tether.shard_map(f, mesh=LINE, in_specs=P("d"), out_specs=P("d"), check_vma=False)
        tether.jit(f)(X)
        assert float(net.total) == pytest.approx(1 + X.sum(), rel=1e-5)
        ruled = Total("mean")
        tether.jit(tether.shard_map(ruled, mesh=LINE, in_specs=P("d"), out_specs=P("d"), check_vma=False))(X)
        assert float(ruled.total) == pytest.approx(1 + X.sum() / 4, rel=1e-5)
