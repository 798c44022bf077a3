# SPDX-License-Identifier: Apache-2.0
"""scan against jax.lax.scan, Python loops, and state threaded by hand."""

from __future__ import annotations

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.laws.kinds import KINDS, LOG, Boom, Task, loss_by_hand
from tests.transforms.loop_models import XS, Net, Noisy, advanced, close, same, stream, values
from tether import nn
from tether.errors import ArgumentError, GradientError, PlainTransformError

TURNS, ROWS = len(XS), XS[:, 0]


class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array


ARGUMENTS = {
    "trees": (
        lambda c, x: ({"s": c["s"] + x["a"], "p": Pair(c["p"].b, x["b"])}, [c["p"].a, None]),
        {"s": jnp.zeros(3), "p": Pair(jnp.float32(1), jnp.float32(2))},
        {"a": ROWS, "b": ROWS[:, 0]},
        {},
    ),
    "length": (lambda c, x: (c * 2, x), jnp.float32(1), None, {"length": 4}),
    "reverse": (lambda c, x: (c * x[0] + 1, c), jnp.float32(1), ROWS, {"reverse": True}),
    "unroll": (lambda c, x: (c * x[0] + 1, c), jnp.float32(1), ROWS, {"unroll": 2, "length": TURNS}),
    "unroll-all": (lambda c, x: (c * x[0] + 1, c), jnp.float32(1), ROWS, {"unroll": True}),
    "no-turns": (lambda c, x: (c + x, c * x), jnp.ones(3), ROWS[:0], {}),
    "positions": (lambda c, x: (c * 2, x), jnp.float32(1), None, (4, True, 2)),
    "weak": (lambda c, x: (c + 1, c * x), 0.0, ROWS.astype(jnp.bfloat16), {}),
    "weak-int-to-float": (lambda c, x: (c + x, c), 0, ROWS[:, 0], {}),
    "weak-to-bfloat16": (lambda c, x: (c + x, c), 0.0, ROWS[:, 0].astype(jnp.bfloat16), {}),
    "bfloat16": (lambda c, x: (c + x, c * x), jnp.zeros(3, jnp.bfloat16), ROWS.astype(jnp.bfloat16), {}),
    "keys": (
        lambda c, x: (jax.random.fold_in(c, 1), jax.random.normal(c, (2,)) + x[0]),
        jax.random.key(3),
        ROWS,
        {},
    ),
    "keys-in-xs": (lambda c, x: (c, x), jnp.int32(0), jax.random.split(jax.random.key(1), 2), {}),
}


@pytest.mark.parametrize("case", list(ARGUMENTS))
def test_arguments_are_those_of_jax(case):
    body, init, xs, options = ARGUMENTS[case]
    args, kwargs = (options, {}) if isinstance(options, tuple) else ((), options)
    same(tether.scan(body, init, xs, *args, **kwargs), jax.lax.scan(body, init, xs, *args, **kwargs))


def test_no_turns_change_nothing():
    net = Net()
    before = values(net)
    for disabled in (False, True):
        with jax.disable_jit(disabled):
            carry, ys = tether.scan(lambda c, x: (net(c), x), jnp.ones((2, 3)), ROWS[:0])
        same((carry, ys), (jnp.ones((2, 3)), jnp.zeros((0, 3))))
        same(values(net), before)
        assert stream() == advanced(0)


class TestState:
    def by_hand(self, kind, task, xs):
        """Loss, state after it, and gradients of a loop over state in a dict; the stream inside is a child."""
        state = {**values(task), "rng": jax.random.split(jax.random.key(0))[1]}
        stopped = [n for n in ("net.mean", "net.var") if kind == "batchnorm-ema"]  # BatchNorm stops what it stores

        def total(params, xs):
            def body(carry, x):
                state = {**carry[1], **{n: jax.lax.stop_gradient(carry[1][n]) for n in stopped}}
                loss, state = loss_by_hand(KINDS[kind], state, x)
                return (carry[0] * 0.5 + loss, state), loss

            (total, new), losses = jax.lax.scan(body, (jnp.float32(0), {**state, **params}), xs)
            return total, (losses, new)

        params = {name: variable.value for name, variable in tether.variables(task, tether.Param).items()}
        (value, (losses, new)), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(params, xs)
        new.pop("rng")
        return (value, losses), new, grads

    @pytest.mark.parametrize("kind", list(KINDS))
    def test_turns_are_sequential_updates(self, kind):
        """Value, state, gradients, runs of the Python, and the stream, compiled and not."""
        make = lambda: Task(KINDS[kind].make())
        (value, losses), state, (wrt_params, wrt_xs) = self.by_hand(kind, make(), XS)

        def total(task, xs):
            def body(carry, x):
                loss = task.loss(x)
                return carry * 0.5 + loss, loss

            return tether.scan(body, 0.0, xs)

        def checked(task, found, runs):
            close(found, (value, losses))
            close(values(task), state, atol=1e-5)
            assert LOG[1:] == ["run"] * runs
            assert stream() == advanced(1 if kind == "dropout" else 0)
            tether.seed(0)
            LOG[1:] = []

        LOG[:] = ["go"]
        with jax.disable_jit():
            task = make()
            checked(task, total(task, XS), TURNS)
        task = make()
        step = tether.jit(tether.value_and_grad(total, argnums=(0, 1), has_aux=True))
        found, (of_task, of_xs) = step(task, XS)
        checked(task, found, 1)
        close({name: values(of_task)[name] for name in wrt_params}, wrt_params, rtol=1e-4, atol=1e-4)
        close(of_xs, wrt_xs, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(("kind", "checkpoints"), [("batchnorm", 1), ("dropout", None), ("tied", "all")])
    def test_checkpointed(self, kind, checkpoints):
        """The same values, state, draws and gradients from fewer copies of the carry, of which State is a part."""
        (value, losses), state, (wrt_params, wrt_xs) = self.by_hand(kind, task := Task(KINDS[kind].make()), XS)

        def total(task, xs):
            turn = lambda carry, x: (carry * 0.5 + (loss := task.loss(x)), loss)
            return tether.scan(turn, 0.0, xs, kind="checkpointed", checkpoints=checkpoints)

        LOG[:] = ["go"]
        found, (of_task, of_xs) = tether.jit(tether.value_and_grad(total, argnums=(0, 1), has_aux=True))(task, XS)
        close(found, (value, losses))
        close(values(task), state, atol=1e-5)
        assert LOG[1:] == ["run"] and stream() == advanced(1 if kind == "dropout" else 0)
        close({name: values(of_task)[name] for name in wrt_params}, wrt_params, rtol=1e-4, atol=1e-4)
        close(of_xs, wrt_xs, rtol=1e-4, atol=1e-4)

    def test_checkpointed_over_a_stacked_module(self):
        """Rows are Params, too; y = w_3 w_2 w_1 w_0 x, and a count in each row."""

        class Times(tether.Module):
            def __init__(self, w):
                self.w, self.calls = tether.Param(w), tether.State(0)

            def __call__(self, x):
                self.calls = self.calls + 1
                return self.w * x

        layers = tether.stack([Times(float(w)) for w in (2, 3, 5, 7)])
        run = lambda layers, x: tether.scan(
            lambda x, layer: (layer(x), x), x, layers, reverse=True, kind="checkpointed", checkpoints=2
        )
        (of_layers, of_x), seen = tether.jit(tether.grad(run, argnums=(0, 1), has_aux=True))(layers, 1.0)
        assert (of_layers.w.tolist(), float(of_x)) == ([105, 70, 42, 30], 210)
        assert seen.tolist() == [105, 35, 7, 1] and layers.calls.tolist() == [1] * 4
        assert tether.jit(run)(layers, 1.0)[0] == 210
        with jax.disable_jit():
            assert run(layers, 1.0)[0] == 210
        assert tether.scan(lambda c, x: (c + x, c), 1.0, jnp.zeros(0), kind="checkpointed")[0] == 1

    def test_gradients_flow_through_state_and_recomputation(self):
        """h = w * h in each of 4 turns: w^4, 4 w^3, 12 w^2."""
        h, w, runs = tether.State(1.0), tether.Param(3.0), []

        def turn(carry, _):
            runs.append(1)
            h.value = w.value * h.value
            return carry, h.value

        def last(w_value):
            h.value, w.value = 1.0, w_value
            return tether.scan(tether.checkpoint(turn), None, length=4)[1][-1]

        for order, expected in enumerate([81.0, 108.0, 108.0]):
            f = last
            for _ in range(order):
                f = tether.grad(f)
            runs.clear()
            assert float(f(3.0)) == pytest.approx(expected)
            assert len(runs) == 1
            assert float(h.value) == 81.0
        f = tether.jit(tether.vmap(lambda x: tether.grad(last)(x), writes={tether.Variable: "discard"}))
        np.testing.assert_allclose(f(jnp.arange(1.0, 3.0)), [4.0, 32.0])
        f(jnp.arange(3.0, 5.0))
        assert len(runs) == 2
        jvp = jax.jvp(lambda x: tether.scan(lambda c, _: (c * x, None), 1.0, length=3)[0], (2.0,), (1.0,))
        np.testing.assert_allclose(jvp, (8.0, 12.0))

    @pytest.mark.parametrize("depth", [0, 1, 2])
    def test_depths(self, depth):
        """In a module in a module; statistics as in a loop, and nothing to declare in evaluation."""

        class Inner(tether.Module):
            def __init__(self, inner):
                self.inner = inner

            def __call__(self, xs):
                if isinstance(self.inner, Inner):
                    return self.inner(xs)
                return tether.scan(lambda c, x: (c + 1, self.inner(x)), 0, xs)

        norm = model = nn.BatchNorm(3, eps=0)
        for _ in range(depth + 1):
            model = Inner(model)
        structure, apply, mean, var = jax.tree.structure(model), tether.jit(model), np.zeros(3), np.ones(3)
        for _ in range(2):
            turns, found = apply(XS)
            assert int(turns) == TURNS
            close(found, (XS - XS.mean(1, keepdims=True)) / XS.std(1, keepdims=True), rtol=1e-4, atol=1e-5)
            for x in np.float64(XS):
                mean, var = 0.9 * mean + 0.1 * x.mean(0), 0.9 * var + 0.1 * x.var(0)
        evaluated = apply(XS, training=False)[1]
        close(evaluated, np.float32((XS - mean) / np.sqrt(var)), rtol=1e-4, atol=1e-5)
        close((norm.mean, norm.var), (np.float32(mean), np.float32(var)), rtol=1e-4)
        assert jax.tree.structure(model) == structure and apply.traces == 2

    def test_training(self):
        """Steps of an optimizer with momentum, against float64 by hand."""
        momentum = types.SimpleNamespace(
            init=lambda params: jax.tree.map(jnp.zeros_like, params),
            update=lambda grads, speed, params: (lambda new: (jax.tree.map(lambda v: -0.1 * v, new), new))(
                jax.tree.map(lambda g, v: g + 0.5 * v, grads, speed)
            ),
        )
        layer = nn.Linear(3, 1, use_bias=False, key=jax.random.key(0))
        optimizer = tether.Optimizer(layer, momentum)

        def step(_, x):
            value, grads = tether.value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)
            optimizer.update(grads)
            return _, value

        weight, speed, expected = np.float64(layer.weight), 0.0, []
        for x in (*np.float64(XS), *np.float64(XS)):
            y = x @ weight.T
            expected.append((y**2).mean())
            speed = (2 * y * x).mean(0)[None] + 0.5 * speed
            weight = weight - 0.1 * speed
        train = tether.jit(lambda xs: tether.scan(step, None, xs)[1])
        np.testing.assert_allclose(jnp.concatenate([train(XS), train(XS)]), expected, rtol=1e-4)
        np.testing.assert_allclose(layer.weight, weight, rtol=1e-4)
        assert train.traces == 1

    def test_over_an_ensemble(self):
        """scan of vmap: member i is a model that runs alone, masks and state."""
        nets, noises = tether.stack([Net(0), Net(1)]), tether.stack([Noisy(0), Noisy(1)])
        alone = list(zip(tether.unstack(nets), tether.unstack(noises), strict=True))
        run = lambda net, noise, x: noise(net(x, training=False))
        found = tether.jit(
            lambda xs: tether.scan(lambda c, x: (c, tether.vmap(run, (0, 0, None))(nets, noises, x)), 0, xs)
        )
        found = found(XS)[1]
        run_alone = tether.jit(lambda net, noise, xs: tether.scan(lambda c, x: (c, run(net, noise, x)), 0, xs))
        for i, (net, noise) in enumerate(alone):
            expected = run_alone(net, noise, XS)[1]
            close(found[:, i], expected)
            close({name: value[i] for name, value in values(nets).items()}, values(net))
            same(noises.rng[i], noise.rng)

    def test_in_itself_in_branches_and_in_lanes(self):
        """scan in scan in cond in scan; counted by hand."""
        inner, outer, other = (tether.State(0) for _ in range(3))

        def small(c, x):
            inner.value = inner.value + 1
            return c + x, inner.value

        def branch(c):
            outer.value = outer.value + 10
            return tether.scan(small, c, jnp.arange(3))

        def rest(c):
            other.value = other.value + inner.value
            return c, jnp.zeros(3, jnp.int32)

        def turn(c, x):
            return tether.cond(x > 1, branch, rest, c)

        for wrap in (lambda f: f, tether.jit):
            inner.value = outer.value = other.value = 0
            with jax.checking_leaks():
                total, seen = wrap(lambda: tether.scan(turn, 0, jnp.array([0, 2, 1, 3])))()
            assert int(total) == 6 and seen.tolist() == [[0, 0, 0], [1, 2, 3], [0, 0, 0], [4, 5, 6]]
            assert [int(v.value) for v in (inner, outer, other)] == [6, 20, 3]


class TestFailures:
    def test_arguments(self):
        for message, options in (
            (r'scan: no such kind.\n +got: +\'bounded\'\n +expected: +"lax" or "checkpointed"', {"kind": "bounded"}),
            (r"scan: no such checkpoints.\n +got: +0\n", {"kind": "checkpointed", "checkpoints": 0}),
            (
                r"scan: no such checkpoints.\n +got: +'most'\n",
                {"kind": "checkpointed", "checkpoints": "most"},
            ),
        ):
            with pytest.raises(ArgumentError, match=message):
                tether.scan(lambda c, x: (c, x), 0.0, length=3, **options)
        run = lambda x: tether.scan(lambda c, _: (jnp.sin(c), None), x, length=3, kind="checkpointed")[0]
        with pytest.raises(GradientError, match=r"(?s)scan: a checkpointed loop .* forward mode.*kind='lax'"):
            tether.jit(tether.jacfwd(run))(1.0)

    def test_everything_is_as_before_and_the_next_call_works(self):
        task, layers = Task(KINDS["batchnorm"].make()), tether.stack([nn.BatchNorm(3) for _ in range(TURNS)])
        before = values(task), values(layers)
        fault: list[BaseException] = [Boom(), KeyboardInterrupt()]

        def body(c, x):
            layer, x = x
            tether.random.draw()
            y = layer(x)
            c = c + task.loss(y)
            if fault:
                raise fault[0]
            return c, y

        def run():
            return tether.scan(body, 0.0, (layers, XS))[0]

        LOG[:] = ["go"]
        step = tether.jit(run)
        while fault:
            for call in (
                run,
                step,
                tether.grad(run, wrt=task),
                lambda: tether.scan(lambda c, _: (run(), None), 0.0, length=2),
            ):
                for disabled in (False, True):
                    with jax.disable_jit(disabled), pytest.raises(type(fault[0])):
                        call()
                    same((values(task), values(layers)), before)
                    assert stream() == advanced(0)
            fault.pop(0)
        run(), step()
        assert int(task.calls) == 2 * TURNS and not np.allclose(layers.mean, before[1]["mean"])

    def test_plain_scan(self):
        """By itself as tether.scan; in a transformation of Tether reads work, and a write is refused."""

        def made(scan):
            norm, layer = nn.BatchNorm(3), nn.Linear(3, 3, key=jax.random.key(0))
            return norm, lambda: scan(lambda c, x: (c, norm(layer(x))), 0, XS)[1]

        (plain, plain_call), (ours, our_call) = made(jax.lax.scan), made(tether.scan)
        close((plain_call(), values(plain)), (our_call(), values(ours)), rtol=1e-4, atol=1e-5)
        evaluated = lambda scan, norm: lambda: scan(lambda c, x: (c, norm.eval()(x)), 0, XS)[1]
        right = evaluated(tether.scan, ours)()
        for run in (tether.jit, lambda call: lambda: tether.cond(True, call, call)):
            close(run(evaluated(jax.lax.scan, plain))(), right, rtol=1e-4, atol=1e-5)
            with pytest.raises(PlainTransformError, match=r"(?s)mean.*tether\.scan in place of jax\.lax\.scan"):
                run(plain_call)()
