# SPDX-License-Identifier: Apache-2.0
"""fori_loop and while_loop, against jax.lax and Python loops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.loop_models import WAYS, XS, Net, advanced, close, distinct, number, same, stream, values
from tether import nn
from tether.errors import ArgumentError, DtypeError, GradientError, ShapeError, VmapWriteError

X = XS[0]

BOUNDS = {
    "ints": (0, 4, {}),
    "negative": (-2, 1, {}),
    "empty": (3, 1, {}),
    "unroll": (0, 5, {"unroll": 2}),
    "unroll-all": (0, 3, {"unroll": True}),
    "arrays": (jnp.int32(1), jnp.int32(4), {}),
    "unsigned": (jnp.uint8(1), jnp.uint8(4), {}),
    "array-and-int": (jnp.int32(1), 4, {}),
}


@pytest.mark.parametrize("case", list(BOUNDS))
def test_bounds_are_those_of_jax(case):
    lower, upper, options = BOUNDS[case]

    def body(i, c):
        return {"s": c["s"] * 2 + i.astype(jnp.float32), "n": c["n"] + i.astype(jnp.int8), "w": c["w"] + 1}

    init = {"s": jnp.float32(1), "n": jnp.int8(0), "w": 0.0}
    found = tether.fori_loop(lower, upper, body, init, **options)
    same(found, jax.lax.fori_loop(lower, upper, body, init, **options))
    traced = tether.jit(lambda lower, upper: tether.fori_loop(lower, upper, body, init))
    close(traced(jnp.asarray(lower), jnp.asarray(upper)), found)


def test_index_is_typed_as_in_jax():
    """Weakly where the bounds are Python ints, so that it takes the type of what it meets."""
    for init in (jnp.int8(3), jnp.bfloat16(3), 0):
        body = lambda i, c: c + i
        same(tether.fori_loop(0, 4, body, init), jax.lax.fori_loop(0, 4, body, init))
    seen = []
    for lower, upper in ((0, jnp.int8(2)), (np.uint8(0), 2), (jnp.int32(0), jnp.int32(2))):
        tether.fori_loop(lower, upper, lambda i, c: (seen.append((i.dtype.name, i.weak_type)), c)[1], 0)
    assert seen == [("int8", False), ("uint8", False), ("int32", False)]


@pytest.mark.parametrize("way", list(WAYS))
class TestState:
    def test_turns_are_those_of_a_python_loop(self, way):
        """fori_loop with bounds known late, then while_loop whose test reads the model: one model, as a carry."""
        net, loop = Net().eval(), Net().eval()

        def run(n):
            h = tether.fori_loop(0, n, lambda i, h: net(h) + i.astype(h.dtype), X)
            again, h = tether.while_loop(lambda c: c[0].calls < 5, lambda c: (c[0], net(c[1])), (net, h))
            return again, h

        step = WAYS[way](run)
        again, found = step(jnp.int32(3))
        h = jnp.asarray(X)
        for i in range(5):
            h = loop(h) + (i if i < 3 else 0)
        assert again is net
        close(found, h, rtol=1e-4)
        close(values(net), values(loop))
        assert step(jnp.int32(0))[0] is net and int(net.calls) == 5  # no turns: nothing changes

    def test_a_test_that_writes_and_draws(self, way):
        """It runs once more than the body; all draws differ; the stream advances once."""
        tests, turns = tether.State(0), tether.State(0)

        def test(c):
            tests.value = tests.value + 1
            return (c[0] < 3) & (number(tether.random.draw()) < 2)

        def body(c):
            turns.value = turns.value + tests.value
            return c[0] + 1, c[1].at[c[0]].set(number(tether.random.draw()))

        run = WAYS[way](lambda start: tether.while_loop(test, body, (start, jnp.zeros(3))))
        count, drawn = run(jnp.int32(0))
        assert (int(count), int(tests.value), int(turns.value)) == (3, 4, 1 + 2 + 3) and stream() == advanced(1)
        assert distinct(drawn)
        key, expected = jax.random.split(jax.random.key(0))[1], []
        for _ in range(3):
            key = jax.random.split(key)[0]  # the test
            key, draw = jax.random.split(key)
            expected.append(number(draw))
        close(drawn, jnp.stack(expected))
        assert int(run(jnp.int32(3))[0]) == 3 and (int(tests.value), int(turns.value)) == (5, 6)
        assert stream() == advanced(2)

    def test_no_turns(self, way):
        net = Net()
        before = values(net)
        run = lambda x: (
            tether.while_loop(lambda h: h.sum() < 0, net, x),
            tether.fori_loop(2, 2, lambda i, h: net(h), x),
        )
        found = WAYS[way](run)(jnp.ones((2, 3)))
        same(found, (jnp.ones((2, 3)),) * 2)
        same(values(net), before)
        assert stream() == advanced(0)

    def test_modules_as_values(self, way):
        """Newton's iteration for the square root of 2 in a weight; the module at the entry is left alone."""
        one = nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
        one.weight = jnp.ones((1, 1))
        newton = lambda layer: jax.tree.map(lambda w: (w + 2 / w) / 2, layer)
        run = lambda: (
            tether.while_loop(lambda layer: jnp.abs(layer.weight**2 - 2).max() > 1e-4, newton, one),
            tether.fori_loop(0, 4, lambda i, layer: newton(layer), one),
        )
        for layer in WAYS[way](run)():
            assert layer is not one and float(layer.weight[0, 0]) == pytest.approx(2**0.5, abs=1e-5)
        assert float(one.weight[0, 0]) == 1


class TestGradients:
    def test_fori_loop_with_fixed_bounds(self):
        """h = w * h, three times: 3 w^2, 6 w; forward through both loops."""
        h, w = tether.State(1.0), tether.Param(2.0)

        def body(i, c):
            h.value = h.value * w.value
            return c

        def run(bounds=(0, 3)):
            h.value = 1.0
            tether.fori_loop(*bounds, body, None)
            return h.value

        assert float(tether.grad(run, wrt=w)()) == 12
        assert float(tether.grad(lambda: tether.grad(run, wrt=w)(), wrt=w)()) == 12
        assert float(tether.grad(lambda: run((jnp.int32(0), 3)), wrt=w)()) == 12
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            tether.jit(lambda n: tether.grad(lambda: run((0, n)), wrt=w)())(3)
        assert float(h.value) == 8
        cube = lambda x: tether.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, 1.0))[1]
        np.testing.assert_allclose(jax.jvp(cube, (2.0,), (1.0,)), (8, 12))


KINDS = {
    "lax": {"kind": "lax"},
    "checkpointed": {"kind": "checkpointed", "checkpoints": 2},
    "bounded": {"kind": "bounded", "max_steps": 9, "base": 3},
}
REVERSIBLE = ["checkpointed", "bounded"]


class TestKinds:
    """What is carried is carried by each; all but the first have gradients."""

    @pytest.mark.parametrize("kind", list(KINDS))
    @pytest.mark.parametrize("way", ["jit", "disable_jit"])
    def test_state_and_draws(self, kind, way):
        """A test that writes and draws, too; the keys are those of a Python loop."""
        net, tests, drawn = Net().eval(), tether.State(0), tether.State(jnp.zeros(4))

        def test(c):
            tests.value = tests.value + 1
            return (c[0] < 3) & (number(tether.random.draw()) < 2)

        def body(c):
            drawn.value = drawn.value.at[c[0]].set(number(tether.random.draw()))
            return c[0] + 1, net(c[1])

        run = WAYS[way](lambda: tether.while_loop(test, body, (jnp.int32(0), X), **KINDS[kind]))
        count, found = run()
        loop, h, key, expected = Net().eval(), jnp.asarray(X), jax.random.split(jax.random.key(0))[1], []
        for _ in range(3):
            key, draw = jax.random.split(jax.random.split(key)[0])
            expected.append(number(draw))
            h = loop(h)
        assert (int(count), int(tests.value)) == (3, 4) and stream() == advanced(1)
        close((found, drawn.value[:3]), (h, jnp.stack(expected)), rtol=1e-4)
        close(values(net), values(loop))

    @pytest.mark.parametrize("kind", REVERSIBLE)
    def test_gradients_through_what_is_closed_over_and_written(self, kind):
        """h = w h, n times: n w^(n - 1), by a Param that is closed over and a State that is written and read."""
        h, w, count = tether.State(1.0), tether.Param(2.0), tether.State(0)

        def body(i):
            h.value, count.value = h.value * w.value, count.value + 1
            return i + 1

        def power(n):
            h.value = 1.0
            last = tether.while_loop(lambda i: i < n, body, jnp.int32(0), **KINDS[kind])
            return h.value, last

        compiled = tether.jit(tether.value_and_grad(power, wrt=w, has_aux=True))
        for n in (5, 0, 7):
            (value, last), grad = compiled(jnp.int32(n))
            assert (float(value), int(last), float(grad)) == (2.0**n, n, n * 2.0 ** max(n - 1, 0))
            assert (float(h.value), int(count.value)) == (2.0**n, n)
            count.value = 0
        with jax.disable_jit():
            assert float(tether.grad(lambda: power(3)[0], wrt=w)()) == 12
        assert float(tether.jacfwd(tether.grad(lambda: power(jnp.int32(5))[0], wrt=w), wrt=w)()) == 20 * 2.0**3

    @pytest.mark.parametrize("kind", REVERSIBLE)
    def test_gradients_of_a_model(self, kind):
        """Dropout in each turn, a hidden state, a module as the carry; against a loop written out."""
        turns = 4

        def loss(net, x):
            step = lambda c: (c[0] + 1, c[1], c[1](c[2]))
            out = tether.while_loop(lambda c: c[0] < turns, step, (0, net, x), **KINDS[kind])
            return (out[2] ** 2).sum()

        def by_hand(params, x):
            key, hidden = jax.random.split(jax.random.key(0))[1], jnp.ones(3)
            for _ in range(turns):
                key, draw = jax.random.split(key)
                hidden = hidden * params["scale"]
                y = x @ params["linear.weight"].T + params["linear.bias"][None]
                x = jnp.where(jax.random.bernoulli(draw, 0.5, y.shape), 2 * y, 0) * hidden[None] + x
            return (x**2).sum()

        net = Net()
        params = {path: variable.value for path, variable in tether.variables(net, tether.Param).items()}
        expected = jax.value_and_grad(by_hand, (0, 1))(params, jnp.asarray(X))
        value, (of_net, of_x) = tether.jit(tether.value_and_grad(loss, argnums=(0, 1)))(net, X)
        close((value, ({path: values(of_net)[path] for path in params}, of_x)), expected, rtol=1e-4, atol=1e-4)
        assert int(net.calls) == turns and stream() == advanced(1)

    @pytest.mark.parametrize("kind", REVERSIBLE)
    def test_modules_as_values(self, kind):
        """Gradient descent as a loop, differentiated by where it begins: w = 0.9^n w."""
        layer = nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))

        def run(layer):
            shrink = lambda c: (c[0] + 1, jax.tree.map(lambda w: 0.9 * w, c[1]))
            return tether.while_loop(lambda c: c[0] < 6, shrink, (0, layer), **KINDS[kind])[1].weight.sum()

        assert float(tether.jit(tether.grad(run))(layer).weight[0, 0]) == pytest.approx(0.9**6)

    @pytest.mark.parametrize("kind", REVERSIBLE)
    def test_lanes(self, kind):
        """A gradient in each lane, of loops of different length; private state stops where its lane does."""
        nets, turns = tether.stack([Net(seed).eval() for seed in range(3)]), jnp.array([0, 2, 4])

        def loss(net, n):
            step = lambda c: (c[0] + 1, (net(X), c[1] * net.hidden.sum())[1])
            return tether.while_loop(lambda c: c[0] < n, step, (0, 1.0), **KINDS[kind])[1]

        scales = np.float64(nets.scale)
        found = tether.jit(tether.vmap(tether.grad(loss)))(nets, turns)
        assert nets.calls.tolist() == turns.tolist()

        def by_hand(scale, n):
            out, hidden = 1.0, jnp.ones(3)
            for _ in range(n):
                hidden = hidden * scale
                out = out * hidden.sum()
            return out

        expected = [jax.grad(by_hand)(jnp.float32(scale), n) for scale, n in zip(scales, turns.tolist(), strict=True)]
        np.testing.assert_allclose(found.scale, expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("kind", list(KINDS))
    def test_at_most_so_many_steps(self, kind):
        """What the loop has then is returned; without steps, what it begins with, bit for bit."""
        tests, turns = tether.State(0), tether.State(0)

        def test(c):
            tests.value = tests.value + 1
            return True

        def body(c):
            turns.value = turns.value + 1
            return jax.tree.map(lambda x: x + x, c)

        nan = jax.lax.bitcast_convert_type(jnp.uint32(0x7FC12345), jnp.float32)
        init = {"x": jnp.array([1.0, -0.0]), "nan": nan, "n": jnp.int8(3)}
        bits = lambda c: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(c)]
        options = {"kind": kind, "checkpoints": 2}
        run = lambda most: tether.while_loop(test, body, init, **options, max_steps=most)
        count = lambda: tether.while_loop(lambda c: c < 4, lambda c: c + 1, 0, **options, max_steps=9)
        for way in (WAYS["jit"], WAYS["disable_jit"]):
            tests.value = turns.value = 0
            assert bits(way(functools.partial(run, 0))()) == bits(init)
            assert (int(tests.value), int(turns.value)) == (1, 0)
            found = way(functools.partial(run, 3))()
            assert found["x"].tolist() == [8, 0] and found["n"] == 24 and found["n"].dtype == jnp.int8
            assert (int(tests.value), int(turns.value)) == (1 + 4, 3)
            same(way(count)(), jnp.asarray(4))
        lanes = jax.vmap(lambda n: tether.while_loop(lambda c: c < n, lambda c: c + 1, 0, **options, max_steps=3))
        assert lanes(jnp.array([1, 2, 5])).tolist() == [1, 2, 3]

    @pytest.mark.parametrize("kind", list(KINDS))
    def test_nothing_is_compiled_where_jit_is_disabled(self, kind):
        seen = []
        with jax.disable_jit():
            tether.while_loop(lambda x: x < 5, lambda x: (seen.append(float(x)), 2 * x)[1], 1.0, **KINDS[kind])
        assert seen == [1, 2, 4]

    def test_what_there_is_not(self):
        run = lambda kind: (
            lambda x: tether.while_loop(lambda x: x > 0.2, jnp.sin, x, **{**KINDS[kind], "checkpoints": 3})
        )
        for call in (tether.grad, lambda f: tether.jit(tether.jacrev(f))):
            with pytest.raises(
                GradientError, match=r"(?s)while_loop: .* in reverse mode.*kind='checkpointed'.*kind='bounded'"
            ):
                call(run("lax"))(1.0)
        for call in (tether.jacfwd, lambda f: tether.jit(tether.jacfwd(f))):
            with pytest.raises(GradientError, match=r"(?s)while_loop: .* in forward mode.*kind='bounded'"):
                call(run("checkpointed"))(1.0)
        with pytest.raises(GradientError, match=r"(?s)while_loop: .* twice.*hessian.*kind='bounded'"):
            tether.grad(tether.grad(run("checkpointed")))(1.0)
        assert tether.jacfwd(run("lax"))(0.1) == 1  # no step is made


class TestLanes:
    def test_private_state_stops_where_its_lane_does(self):
        turns = jnp.array([0, 2, 4])
        loops = {
            "fori": lambda m, n: tether.fori_loop(0, n, lambda i, c: (m(X), c + i)[1], 0),
            "while": lambda m, n: tether.while_loop(lambda c: c < n, lambda c: (m(X), c + 1)[1], 0),
            "test": lambda m, n: tether.while_loop(lambda c: (m(X), c < n - 1)[1], lambda c: c + 1, -1),
        }
        for name, run in loops.items():
            for way in (WAYS["jit"], WAYS["disable_jit"]):
                nets = tether.stack([Net().eval() for _ in range(3)])
                found = way(tether.vmap(run))(nets, turns)
                assert found.tolist() == ([0, 1, 6] if name == "fori" else [-1, 1, 3] if name == "test" else [0, 2, 4])
                count = turns + 1 if name == "test" else turns
                assert nets.calls.tolist() == count.tolist()
                np.testing.assert_allclose(nets.hidden, nets.scale ** np.array(count)[:, None].astype("f"), rtol=1e-5)

    def test_shared_state_must_go_on_as_long_in_every_lane(self):
        count = tether.State(0)

        def body(c):
            count.value = count.value + 1
            return c + 1

        tether.vmap(lambda n: tether.while_loop(lambda c: c < 3, body, 0))(jnp.arange(3))
        assert int(count.value) == 3
        for disabled in (False, True):
            with pytest.raises(VmapWriteError), jax.disable_jit(disabled):
                tether.vmap(lambda n: tether.while_loop(lambda c: c < n, body, 0))(jnp.arange(3))
            assert int(count.value) == 3


def test_errors():
    net, identity = Net(), lambda *c: c[-1]
    two = jnp.int8(2)
    for error, message, call in (
        (
            ArgumentError,
            r"fori_loop: lower is no integer.\n +got: +0.0\n",
            lambda: tether.fori_loop(0.0, 2, identity, 0),
        ),
        (
            ArgumentError,
            r"fori_loop: upper is no integer.\n +got: +int32\[2\]\n",
            lambda: tether.fori_loop(0, jnp.zeros(2, jnp.int32), identity, 0),
        ),
        (
            ArgumentError,
            r"fori_loop: upper is no integer.\n +got: +'2'\n",
            lambda: tether.fori_loop(0, "2", identity, 0),
        ),
        (
            ArgumentError,
            r"of two dtypes.\n +got: +int32\[\] to int8\[\]\n",
            lambda: tether.fori_loop(jnp.int32(0), two, identity, 0),
        ),
        (
            ArgumentError,
            r"while_loop: cond_fun returns no truth value.\n +got: +int32\[\]",
            lambda: tether.while_loop(lambda c: c, identity, 0),
        ),
        (
            ArgumentError,
            r"cond_fun returns no truth value.\n +got: +bool\[2\]",
            lambda: tether.while_loop(lambda c: c > 0, identity, jnp.ones(2)),
        ),
        (
            ArgumentError,
            r"cond_fun returns no truth value.\n +got: +Net object",
            lambda: tether.while_loop(lambda c: net, identity, 0),
        ),
        (
            ShapeError,
            r"fori_loop: the body changes the shape of the carry.\n +at: +carry\[0\]",
            lambda: tether.fori_loop(0, 2, lambda i, c: [X], [0.0]),
        ),
        (
            DtypeError,
            r"while_loop: the body changes the dtype of the carry.\n",
            lambda: tether.while_loop(lambda c: c < 1, lambda c: c.astype(jnp.int8), jnp.int32(0)),
        ),
        (
            ArgumentError,
            r"while_loop: no such kind.\n +got: +'scan'\n +expected: +\"lax\", \"checkpointed\" or \"bounded\"",
            lambda: tether.while_loop(identity, identity, 0, kind="scan"),
        ),
        (
            ArgumentError,
            r"while_loop: kind='bounded' needs max_steps=.\n +fix: +max_steps=n",
            lambda: tether.while_loop(identity, identity, 0, kind="bounded", checkpoints=3),
        ),
        (
            ArgumentError,
            r"(?s)kind='checkpointed' needs checkpoints= or max_steps=.*1. checkpoints=n.*2. max_steps=n",
            lambda: tether.while_loop(identity, identity, 0, kind="checkpointed"),
        ),
        (
            ArgumentError,
            r"while_loop: no such max_steps.\n +got: +-1\n +expected: +a whole number, at least 0",
            lambda: tether.while_loop(identity, identity, 0, max_steps=-1),
        ),
        (
            ArgumentError,
            r"while_loop: no such checkpoints.\n +got: +0\n",
            lambda: tether.while_loop(identity, identity, 0, kind="checkpointed", checkpoints=0),
        ),
        (
            ArgumentError,
            r"while_loop: no such base.\n +got: +True\n +expected: +a whole number, at least 2",
            lambda: tether.while_loop(identity, identity, 0, base=True),
        ),
    ):
        for disabled in (False, True):
            with pytest.raises(error, match=message), jax.disable_jit(disabled):
                call()
