# SPDX-License-Identifier: Apache-2.0
"""Checkpointed loops against Python loops in float64, and jax.lax.scan."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transforms.test_treeverse import least_runs
from tether._transforms._checkpointed import checkpointed_scan, checkpointed_while
from tether._transforms._treeverse import NEVER, default_checkpoints
from tether.errors import GradientError

XS = np.random.default_rng(3).normal(size=(7, 2))


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def step(x, w):
    return jnp.sin(w * x) + x[::-1]


def looped(x, w, steps, most=NEVER, checkpoints=None):
    """A number of steps known late; what is closed over is differentiated; an integer and a key go along."""
    init = (jnp.int32(0), x, jax.random.key(0))
    turn = lambda c: (c[0] + 1, step(c[1], w), jax.random.split(c[2])[0])
    return checkpointed_while(lambda c: c[0] < steps, turn, init, most=most, checkpoints=checkpoints)[1]


def by_hand(x, w, steps):
    for _ in range(steps):
        x = step(x, w)
    return x


X, W = np.array([0.3, -1.2]), 1.7
SEED = np.array([1.0, -2.0])


def gradients(fun, steps):
    return jax.grad(lambda x, w: fun(x, w, steps) @ SEED, (0, 1))(X, W)


def close(found, expected, rtol=1e-10):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-12), found, expected)


@pytest.mark.parametrize(
    ("checkpoints", "most"), [(1, NEVER), (2, NEVER), (5, NEVER), (40, NEVER), (None, 30), (3, 30), (30, 30)]
)
def test_gradients_are_those_of_a_python_loop(checkpoints, most):
    """Fewer slots than steps and more, all three ways to fill them; the value, too; no steps at all."""
    run = functools.partial(looped, most=most, checkpoints=checkpoints)
    grad = jax.jit(lambda steps: (run(X, W, steps), gradients(run, steps)))
    for steps in (0, 1, 2, 7, 30):
        close(grad(steps), (by_hand(X, W, steps), gradients(by_hand, steps)))
    close(jax.jit(run)(X, W, 7), by_hand(X, W, 7))


def test_at_most_so_many_steps():
    for most in (1, 6):
        run = functools.partial(looped, most=most)
        close((run(X, W, 9), gradients(run, 9)), (by_hand(X, W, most), gradients(by_hand, most)))


class Counter:
    """How often a compiled body runs."""

    def __init__(self):
        self.runs = collections.Counter()

    def __call__(self, step):
        jax.debug.callback(lambda step: self.runs.update([int(step)]), step)

    def backward(self, call, steps):
        """The runs of the backward pass, after a forward pass that runs each step once."""
        self.runs.clear()
        jax.block_until_ready(call())
        jax.effects_barrier()
        assert set(self.runs) == set(range(steps))
        return self.runs.total() - steps


class TestRuns:
    @pytest.mark.parametrize("slots", [1, 2, 3, 6])
    def test_least_number_while_the_triangle_is_not_full(self, slots):
        count = Counter()

        def loss(x, steps):
            turn = lambda c: (count(c[0]), (c[0] + 1, jnp.sin(c[1])))[1]
            return checkpointed_while(lambda c: c[0] < steps, turn, (0, x), most=NEVER, checkpoints=slots)[1]

        grad = jax.jit(jax.grad(loss))
        triangle = (slots + 1) * (slots + 2) // 2 - 1
        for steps in range(1, triangle + 1):
            assert (
                count.backward(lambda steps=steps: grad(0.5, steps), steps) == least_runs(steps + 1, slots) - steps - 1
            )
        for steps in (triangle + 1, 2 * triangle, 60):
            least = least_runs(steps + 1, slots) - steps - 1
            assert least <= count.backward(lambda steps=steps: grad(0.5, steps), steps) <= 1.4 * least

    @pytest.mark.parametrize(("most", "checkpoints"), [(20, None), (20, 20), (20, 2)])
    def test_where_the_most_is_known(self, most, checkpoints):
        count = Counter()
        turn = lambda c: (count(c[0]), (c[0] + 1, jnp.sin(c[1])))[1]
        loss = lambda x: checkpointed_while(lambda c: True, turn, (0, x), most=most, checkpoints=checkpoints)[1]
        runs = count.backward(lambda: jax.jit(jax.grad(loss))(0.5), most)
        least = least_runs(most + 1, checkpoints or default_checkpoints(most)) - most - 1
        assert least <= runs <= (1.4 * least if checkpoints == 2 else least)

    @pytest.mark.parametrize("checkpoints", [None, 2, 3, 20])
    def test_scan_always_makes_the_least(self, checkpoints):
        count = Counter()
        turn = lambda x, i: (count(i), (jnp.sin(x), None))[1]
        loss = lambda x: checkpointed_scan(turn, x, jnp.arange(20), 20, checkpoints=checkpoints)[0]
        runs = count.backward(lambda: jax.jit(jax.grad(loss))(0.5), 20)
        assert runs == least_runs(21, checkpoints or default_checkpoints(20)) - 21

    def test_without_a_gradient_nothing_runs_twice(self):
        count = Counter()
        turn = lambda c: (count(c[0]), (c[0] + 1, jnp.sin(c[1]), c[2] * c[1]))[1]
        run = lambda x: checkpointed_while(lambda c: c[0] < 9, turn, (0, 0.5, x), most=NEVER, checkpoints=2)
        assert count.backward(lambda: jax.jit(run)(1.0), 9) == 0
        assert count.backward(lambda: jax.jit(jax.grad(lambda x: run(x)[1]))(1.0), 9) == 0  # it doesn't depend on x


def temporaries(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_the_checkpoints():
    """1000 steps: in copies of the carry, beside a scan, which keeps what its derivative needs of each step."""
    x = jnp.ones(4096)
    body = lambda x: jnp.sin(x) * x
    plain = lambda x: jax.lax.scan(lambda x, _: (body(x), None), x, length=1000)[0].sum()
    copies = {"plain": temporaries(jax.grad(plain), x) / x.nbytes}
    turn = lambda c: (c[0] + 1, body(c[1]))
    run = lambda x, k: checkpointed_while(lambda c: True, turn, (0, x), most=1000, checkpoints=k)[1].sum()
    for checkpoints in (10, None, 1000):
        copies[checkpoints] = temporaries(jax.grad(functools.partial(run, k=checkpoints)), x) / x.nbytes
    row = lambda x, _: (body(x), x)  # the rows are results, not copies of the carry
    stacked = lambda x: checkpointed_scan(row, x, None, 1000, checkpoints=10)
    copies["scan"] = temporaries(lambda x: jax.vjp(stacked, x)[1](stacked(x)), x) / x.nbytes - 1000
    assert copies["plain"] >= 1000
    assert 10 <= copies[10] <= 15
    assert 44 <= copies[None] <= 49
    assert 1000 <= copies[1000] <= 1005
    assert copies["scan"] <= 1020


class TestLanes:
    def test_lanes_of_different_length(self):
        """A gradient in each lane, and one for all; lanes in lanes; the others go on without those that are done."""
        xs, steps = jnp.stack([X, 2 * X, X + 1]), np.array([7, 0, 3], np.int32)
        run = functools.partial(looped, checkpoints=3)
        one = lambda fun, x, n: jax.grad(lambda x, w: fun(x, w, n) @ SEED, (0, 1))(x, W)
        expected = [one(by_hand, x, n) for x, n in zip(xs, steps, strict=True)]
        expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected)
        lanes = jax.vmap(functools.partial(one, run))
        close(jax.jit(lanes)(xs, steps), expected)
        both = jax.jit(jax.vmap(lanes))(jnp.stack([xs, xs[::-1]]), np.stack([steps, steps[::-1]]))
        close(both, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), expected))
        total = lambda xs, w: (jax.vmap(run, (0, None, 0))(xs, w, steps) @ SEED).sum()
        close(jax.jit(jax.grad(total, (0, 1)))(xs, W), (expected[0], expected[1].sum()))

    def test_one_test_for_all_lanes(self):
        xs = jnp.stack([X, 2 * X])
        lanes = jax.vmap(lambda x: looped(x, W, 5, checkpoints=2))
        close(jax.jacrev(lanes)(xs), jax.jacrev(jax.vmap(lambda x: by_hand(x, W, 5)))(xs))

    def test_cotangents_in_lanes(self):
        run = lambda x: looped(x, W, 5, checkpoints=2)
        close(jax.jit(jax.jacrev(run))(X), jax.jacrev(lambda x: by_hand(x, W, 5))(X))

    def test_a_lane_that_is_done_has_no_part_in_it(self):
        """Its carry is 0, where the root has no derivative, and step 5 would divide by 0."""

        def run(x, n):
            turn = lambda c: (c[0] + 1, jnp.sqrt(c[1]) * (1 / (2.0 - c[0])))
            return checkpointed_while(lambda c: c[0] < n, turn, (0.0, x), most=9, checkpoints=2)[1]

        found = jax.jit(jax.vmap(jax.grad(run)))(jnp.array([0.0, 4.0]), jnp.array([0.0, 2.0]))
        close(found, [1.0, 0.25 * 4 ** (-0.75) * 0.5**0.5])


class TestOperands:
    def test_every_kind_of_leaf(self):
        """Integers, booleans, keys and what no cotangent reaches have none; types are those of jax.lax.while_loop."""
        init = {"n": 0, "flag": jnp.array(True), "key": jax.random.key(0), "none": jnp.zeros((0, 3), "f"), "weak": 2.0}
        init |= {"half": jnp.bfloat16(1), "z": jnp.complex64(1 + 2j), "byte": jnp.int8(3), "free": jnp.float32(2)}

        def turn(c):
            new = {"n": c["n"] + 1, "flag": ~c["flag"], "key": jax.random.split(c["key"])[0], "none": c["none"] + 1}
            new |= {"weak": c["weak"] * 2, "half": c["half"] * 2, "z": c["z"] ** 2, "byte": c["byte"] + jnp.int8(1)}
            return {**new, "free": jnp.sin(c["free"])}

        go_on = lambda c: c["n"] < 4
        run = lambda init: checkpointed_while(go_on, turn, init, most=9, checkpoints=2)
        for found, expected in zip(
            *map(jax.tree.leaves, (run(init), jax.lax.while_loop(go_on, turn, init))), strict=True
        ):
            assert (found.aval.dtype, found.aval.weak_type) == (expected.aval.dtype, expected.aval.weak_type)
            bits = jax.random.key_data if jnp.issubdtype(found.dtype, jax.dtypes.prng_key) else lambda x: x
            np.testing.assert_array_equal(bits(found), bits(expected))
        some = lambda z, half, weak: run({**init, "z": z, "half": half, "weak": weak})
        loss = lambda *leaves: (lambda c: c["z"].real + c["none"].sum() + c["half"].astype(jnp.float32))(some(*leaves))
        of_z, of_half, of_weak = jax.grad(loss, (0, 1, 2))(init["z"], init["half"], init["weak"])
        close(of_z, 16 * (1 + 2j) ** 15, rtol=1e-5)
        assert (of_half, of_half.dtype, of_weak) == (16, jnp.bfloat16, 0)

    def test_one_trace_differentiated_in_two_ways(self):
        """JAX makes both backward passes of one call with what its latest forward pass said."""
        run = jax.jit(lambda x, w: looped(x, w, 4, checkpoints=2) @ SEED)
        call = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(run)(X, W))
        pull_x = jax.vjp(lambda x: call(x, W)[0], X)[1]
        pull_w = jax.vjp(lambda w: call(X, w)[0], W)[1]
        expected = gradients(by_hand, 4)
        close((*pull_x(1.0), *pull_w(1.0)), expected)
        close(jax.grad(lambda x, w: call(x, w)[0], (0, 1))(X, W), expected)

    def test_many_operands(self):
        """More than fit into one number."""
        many = [jnp.float64(i) for i in range(70)]

        def run(*many):
            turn = lambda c: (c[0] + 1, sum(w * c[1] for w in many[::3]) / 800)
            return checkpointed_while(lambda c: c[0] < 2, turn, (0, 1.0), most=NEVER, checkpoints=1)[1]

        total = sum(range(0, 70, 3))
        found = jax.grad(run, tuple(range(0, 70, 2)))(*many)
        close(found, tuple(2 * total / 800**2 if i % 3 == 0 else 0.0 for i in range(0, 70, 2)))

    def test_what_is_not_differentiated_needs_no_derivative(self):
        double = lambda t: jax.pure_callback(lambda t: 2 * np.asarray(t), jax.ShapeDtypeStruct((), t.dtype), t)
        turn = lambda c: (double(c[0]), c[1] * c[0])
        run = lambda x: checkpointed_while(lambda c: c[0] < 16, turn, (1.0, x), most=NEVER, checkpoints=2)[1]
        assert jax.grad(run)(2.0) == jax.jit(jax.grad(run))(2.0) == 1 * 2 * 4 * 8

    def test_a_test_that_sees_what_is_differentiated(self):
        """The number of steps depends on x; the gradient is that of the steps made."""
        run = lambda x: checkpointed_while(lambda y: y < 10 * x, lambda y: y * x, x, most=50, checkpoints=None)
        close(jax.grad(run)(3.0), 4 * 27.0)  # 3, 9, 27, 81
        assert (
            jax.grad(lambda limit: checkpointed_while(lambda y: y < limit, jnp.exp, 1.0, most=9, checkpoints=1))(9.0)
            == 0
        )


class TestTogether:
    def test_loops_in_loops(self):
        """Checkpointed in itself, in a scan, in a branch, and recomputed."""
        inner = lambda x: looped(x, W, 3, checkpoints=2)
        outer = lambda x: checkpointed_while(
            lambda c: c[0] < 4, lambda c: (c[0] + 1, inner(c[1])), (0, x), most=NEVER, checkpoints=2
        )[1]
        expected = jax.grad(lambda x: by_hand(x, W, 12) @ SEED)(X)
        ways = {
            "itself": outer,
            "scan": lambda x: jax.lax.scan(lambda x, _: (inner(x), None), x, length=4)[0],
            "branch": lambda x: jax.lax.cond(x[0] > 0, lambda x: looped(x, W, 12, checkpoints=2), jnp.sin, x),
            "checkpoint": jax.checkpoint(lambda x: looped(x, W, 12, checkpoints=3)),
            "own scan": lambda x: checkpointed_scan(lambda x, _: (inner(x), None), x, None, 4, checkpoints=2)[0],
        }
        for name, run in ways.items():
            np.testing.assert_allclose(
                jax.grad(lambda x, run=run: run(x) @ SEED)(X), expected, rtol=1e-10, err_msg=name
            )

    def test_second_derivatives(self):
        """In forward mode of reverse mode."""
        run = lambda x: looped(x, W, 6, checkpoints=2) @ SEED
        expected = jax.hessian(lambda x: by_hand(x, W, 6) @ SEED)(X)
        close(jax.hessian(run)(X), expected)
        close(jax.jit(jax.jacfwd(jax.grad(run)))(X), expected)
        close(jax.jvp(jax.grad(run), (X,), (SEED,))[1], expected @ SEED)

    @pytest.mark.parametrize("name", ["while_loop", "scan"])
    def test_what_there_is_not(self, name):
        if name == "scan":
            run = lambda x: checkpointed_scan(lambda x, _: (jnp.sin(x), x), x, None, 4, checkpoints=2)[0]
            both = r"kind='lax'"
        else:
            run = lambda x: checkpointed_while(lambda x: x > 0.1, jnp.sin, x, most=4, checkpoints=2)
            both = r"kind='bounded', max_steps=n"
        for call in (
            lambda: jax.jvp(run, (1.0,), (1.0,)),
            lambda: jax.jit(jax.jacfwd(run))(1.0),
            lambda: jax.linearize(run, 1.0)[1](1.0),
        ):
            with pytest.raises(GradientError, match=rf"{name}: a checkpointed loop .* forward mode\.(?s:.*){both}"):
                call()
        for call in (lambda: jax.grad(jax.grad(run))(1.0), lambda: jax.jit(jax.jacrev(jax.jacrev(run)))(1.0)):
            with pytest.raises(
                GradientError, match=rf"{name}: a checkpointed loop .* twice\.(?s:.*)hessian(?s:.*){both}"
            ):
                call()


class TestScan:
    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("checkpoints", [None, 1, 2, 7, 99])
    def test_gradients_are_those_of_jax(self, checkpoints, reverse):
        """To the entry, to what is closed over, and to rows; of the carry and of what is stacked; integers go along."""

        def run(scan, x, w, rows):
            def turn(c, row):
                x = step(c["x"], w) * row["x"]
                return {"x": x, "n": c["n"] + row["n"]}, [x * c["x"], row["n"]]

            carry, (ys, ns) = scan(turn, {"x": x, "n": jnp.int32(0)}, {"x": rows, "n": jnp.arange(7, dtype=jnp.int32)})
            return carry["x"] @ SEED + (ys**2).sum(), (carry, ys, ns)

        mine = lambda turn, init, xs: checkpointed_scan(turn, init, xs, 7, reverse=reverse, checkpoints=checkpoints)
        plain = functools.partial(jax.lax.scan, reverse=reverse)
        found, expected = (
            jax.jit(jax.value_and_grad(functools.partial(run, scan), (0, 1, 2), has_aux=True))(X, W, jnp.asarray(XS))
            for scan in (mine, plain)
        )
        close(found, expected)

    def test_some_of_it(self):
        """Of rows alone; of a stacked result alone; in lanes; no turns; nothing."""
        scan = lambda x, rows: checkpointed_scan(lambda x, row: (x * row, x + row), x, rows, len(rows), checkpoints=2)
        plain = lambda x, rows: jax.lax.scan(lambda x, row: (x * row, x + row), x, rows)
        rows = jnp.asarray(XS[:, 0])
        for part, argument in ((0, 1), (1, 0), (1, 1)):
            grad = lambda fun, x, rows, part=part, i=argument: jax.grad(lambda *xs: fun(*xs)[part].sum(), i)(x, rows)
            lanes = lambda fun, grad=grad: jax.vmap(functools.partial(grad, fun))(
                jnp.array([1.0, 2.0]), jnp.stack([rows, -rows])
            )
            close(lanes(scan), lanes(plain))
        close(jax.grad(lambda x: scan(x, rows[:0])[0])(2.0), 1.0)
        close(jax.grad(lambda x: scan(3.0, rows)[0] * x)(2.0), plain(3.0, rows)[0])
        empty = checkpointed_scan(lambda c, x: (c, x), (), (), 3, checkpoints=2)
        assert empty == ((), ())

    def test_unrolled(self):
        run = lambda x: checkpointed_scan(lambda x, w: (jnp.sin(w * x), x), x, jnp.asarray(XS), 7, unroll=3)[0].sum()
        plain = lambda x: jax.lax.scan(lambda x, w: (jnp.sin(w * x), x), x, jnp.asarray(XS))[0].sum()
        close(jax.grad(run)(X), jax.grad(plain)(X))
