# SPDX-License-Identifier: Apache-2.0
"""fori_loop and while_loop, against jax.lax and Python loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.loop_models import WAYS, XS, Net, advanced, close, distinct, number, same, stream, values
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError, VmapWriteError

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
    ):
        for disabled in (False, True):
            with pytest.raises(error, match=message), jax.disable_jit(disabled):
                call()
