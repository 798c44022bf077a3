# SPDX-License-Identifier: Apache-2.0
"""error_if: the value of plain JAX where nothing fails, and one error, in words, where something does."""

from __future__ import annotations

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether._transforms._checks import Check
from tether.errors import ArgumentError, CheckError

X = jnp.asarray([1.0, 2.0, 3.0])
BAD = jnp.asarray([1.0, -2.0, -3.0])
ROWS, BAD_ROWS = jnp.stack([X, X + 1]), jnp.stack([X, BAD])


def plain(x):
    """What the checked function is without its check; its derivatives use x."""
    return jnp.sin(x)


def checked(x):
    return plain(tether.error_if(x, x < 0, "x is negative."))


def summed(loop):
    """A function of a vector, of the function in the loop."""
    return lambda f: lambda x: loop(f)(x).sum()


while_loop = lambda f: lambda x: jax.lax.while_loop(lambda x: x < 3, lambda x: x + jnp.where(f(x) > 9, 0.0, 1.0), x)
scan = lambda f: lambda x: jax.lax.scan(lambda total, x: (total + f(x), None), 0.0, x)[0]
tether_scan = lambda f: lambda x: tether.scan(lambda total, x: (total + f(x), None), 0.0, x)[0]
cond = lambda f: lambda x: jax.lax.cond(x < 5, f, lambda x: x, x)
named = lambda f: jax.vmap(lambda x: f(x) + jax.lax.pmean(x, "i"), axis_name="i")

# Name -> the transformation, an input that is right, one that is wrong, and the lanes that the message names.
WAYS = {
    "nothing": (lambda f: f, X[0], BAD[1], None),
    "an array": (lambda f: f, X, BAD, None),
    "jit": (jax.jit, X, BAD, None),
    "vmap": (jax.vmap, X, BAD, "[1], [2] of a batch of [3]"),
    "vmap of vmap": (lambda f: jax.vmap(jax.vmap(f)), ROWS, BAD_ROWS, "[1, 1], [1, 2] of a batch of [2, 3]"),
    "vmap over columns": (
        lambda f: jax.vmap(jax.vmap(f), in_axes=1),
        ROWS,
        BAD_ROWS,
        "[1, 1], [2, 1] of a batch of [3, 2]",
    ),
    "jit of vmap": (lambda f: jax.jit(jax.vmap(f)), X, BAD, "[1], [2] of a batch of [3]"),
    "vmap of jit of vmap": (lambda f: jax.vmap(jax.jit(jax.vmap(f))), ROWS, BAD_ROWS, "[1, 1], [1, 2] of"),
    "vmap with a name": (named, X, BAD, "[1], [2] of a batch of [3]"),
    "grad": (jax.grad, X[0], BAD[1], None),
    "jit of grad": (lambda f: jax.jit(jax.grad(f)), X[0], BAD[1], None),
    "grad of jit": (lambda f: jax.grad(jax.jit(f)), X[0], BAD[1], None),
    "grad of grad": (lambda f: jax.grad(jax.grad(f)), X[0], BAD[1], None),
    "jit of hessian of vmap": (
        lambda f: jax.jit(jax.hessian(summed(jax.vmap)(f))),
        X,
        BAD,
        "[1], [2] of a batch of [3]",
    ),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f)), X, BAD, "[1], [2] of a batch of [3]"),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), X[0], BAD[1], None),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](x), X[0], BAD[1], None),
    "scan": (scan, X, BAD, None),
    "jit of grad of scan": (lambda f: jax.jit(jax.grad(scan(f))), X, BAD, None),
    "vmap of scan": (lambda f: jax.vmap(scan(f)), ROWS, BAD_ROWS, "[1] of a batch of [2]"),
    "while": (while_loop, X[0], BAD[1], None),
    "vmap of while": (lambda f: jax.vmap(while_loop(f)), X, BAD, "[1], [2] of a batch of [3]"),
    "cond, taken": (cond, X[0], BAD[1], None),
    "grad of cond, taken": (lambda f: jax.grad(cond(f)), X[0], BAD[1], None),
    "checkpoint": (jax.checkpoint, X, BAD, None),
    "jit of grad of checkpoint": (lambda f: jax.jit(jax.grad(jax.checkpoint(f))), X[0], BAD[1], None),
    "map in batches": (lambda f: lambda x: jax.lax.map(f, x, batch_size=3), X, BAD, "[1], [2] of a batch of [3]"),
    "tether.jit": (tether.jit, X, BAD, None),
    "tether.jit of tether.grad": (lambda f: tether.jit(tether.grad(f)), X[0], BAD[1], None),
    "tether.grad of tether.jit": (lambda f: tether.grad(tether.jit(f)), X[0], BAD[1], None),
    "tether.jit of tether.vmap": (lambda f: tether.jit(tether.vmap(f)), X, BAD, "[1], [2] of a batch of [3]"),
    "tether.jit of tether.scan": (lambda f: tether.jit(tether_scan(f)), X, BAD, None),
    "tether.jit of jax.jit": (lambda f: tether.jit(jax.jit(f)), X, BAD, None),
    "tether.jit of checkpoint": (lambda f: tether.jit(tether.grad(tether.checkpoint(f))), X[0], BAD[1], None),
}
# Those in which JAX compiles something outside of tether.jit, so that the error is its own.
WRAPPED = re.compile("jit of|of jit|^jit|scan|while|cond|checkpoint|map in batches")


def is_clean(way: str) -> bool:
    return "tether.jit" in way or not WRAPPED.search(way)


@pytest.mark.parametrize("way", WAYS)
def test_value_where_nothing_fails(way):
    transform, x, *_ = WAYS[way]
    got, right = transform(checked)(x), transform(plain)(x)
    jax.tree.map(np.testing.assert_array_equal, got, right)
    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, right)


@pytest.mark.parametrize("way", WAYS)
def test_error_where_something_fails(way):
    transform, _, bad, lanes = WAYS[way]
    with pytest.raises(CheckError if is_clean(way) else (RuntimeError, ValueError)) as caught:
        jax.block_until_ready(transform(checked)(bad))
    text = str(caught.value)
    if is_clean(way):
        assert text.startswith("error_if: x is negative.\n  at:       ") and caught.value.__cause__ is None
    assert "error_if: x is negative.\n" in text
    assert f"got:      a failure at {lanes}" in text if lanes else "got:" not in text


def test_statically_true_raises_when_it_runs():
    f = lambda x: tether.error_if(x, True, "always.")
    compiled = jax.jit(f).lower(X).compile()
    with pytest.raises((RuntimeError, ValueError), match=r"always\."):
        compiled(X)
    traced = tether.jit(f)
    for _ in range(2):
        with pytest.raises(CheckError, match=r"always\."):
            traced(X)
    assert traced.traces == 1
    assert jax.eval_shape(f, X).shape == (3,)


class TestOneCheckForAllLanes:
    @pytest.fixture
    def calls(self, monkeypatch) -> list:
        """The shapes of what the host was asked about."""
        shapes, call = [], Check.__call__

        def counted(self, pred, *others):
            shapes.append(np.shape(pred))
            return call(self, pred, *others)

        monkeypatch.setattr(Check, "__call__", counted)
        return shapes

    @pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.vmap(jax.jit(f)), lambda f: jax.jit(jax.vmap(f))])
    def test_host_is_called_once(self, transform, calls):
        with pytest.raises((RuntimeError, ValueError)):
            transform(checked)(BAD)
        assert calls == [(3,)]

    def test_host_is_not_called_in_a_compiled_program_where_nothing_fails(self, calls):
        jax.jit(jax.vmap(jax.grad(checked)))(X)
        assert calls == []

    def test_no_branch_becomes_a_select(self):
        program = str(jax.make_jaxpr(jax.vmap(jax.vmap(checked)))(ROWS))
        assert program.count("cond[") == program.count("pure_callback[") == 1


class TestBranches:
    def test_branch_that_is_not_taken_checks_nothing(self):
        f = tether.jit(lambda x: tether.cond(x < 0, lambda x: x, checked, x))
        assert float(f(-2.0)) == -2.0 and float(f(1.0)) == float(plain(1.0))

    def test_turns_before_the_failure_count_for_nothing(self):
        seen = tether.State(0)

        def turn(total, x):
            seen.value = seen.value + 1
            return total + checked(x), None

        with pytest.raises(CheckError):
            tether.jit(lambda x: tether.scan(turn, 0.0, x)[0])(BAD)
        assert int(seen.value) == 0


class TestUse:
    """The check goes with x."""

    def test_x_comes_back(self):
        tree = {"a": X, "b": (np.ones(2), "text", None, 3)}
        assert tether.error_if(tree, False, "no.") is tree
        out = tether.error_if(tree, jnp.zeros(3, bool), "no.")
        assert out["a"] is X and out["b"][1:] == ("text", None, 3)

    @pytest.mark.parametrize(
        "leaf",
        [
            jnp.ones(2, jnp.bfloat16),
            jnp.arange(3),
            jnp.zeros(2, bool),
            jnp.ones(2, jnp.complex64),
            jax.random.key(0),
            jnp.uint8(3),
        ],
        ids=lambda leaf: str(leaf.dtype),
    )
    def test_leaves_of_every_type(self, leaf):
        out = jax.jit(lambda leaf, pred: tether.error_if([leaf, "text"], pred, "no.")[0])(leaf, False)
        assert out.dtype == leaf.dtype
        data = jax.random.key_data if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.asarray
        np.testing.assert_array_equal(data(out), data(leaf))

    def test_weak_type_is_kept(self):
        f = lambda x, pred: tether.error_if(x, pred, "no.")
        assert jax.make_jaxpr(f)(1.0, True).out_avals == jax.make_jaxpr(lambda x, pred: x)(1.0, True).out_avals

    def test_unused_it_is_dropped(self):
        @tether.jit
        def f(x):
            tether.error_if(x, x > 0, "dropped.")
            return x

        assert float(f(1.0)) == 1.0

    @pytest.mark.parametrize("bad", [np.float32("nan"), np.int32(2**31 - 1), np.bool_(True)], ids=str)
    def test_value_that_the_compiler_knows_to_be_bad(self, bad):
        """It isn't taken for the one that stands in for x where a check has failed, with which the check would go."""
        is_bad = jnp.isnan if bad.dtype.kind == "f" else lambda x: x == bad

        @tether.jit
        def f():
            x = jnp.full(2, bad)
            return tether.error_if(x, is_bad(x), "known.")

        with pytest.raises(CheckError, match=r"known\."):
            f()

    def test_any_array_of_x_is_enough(self):
        f = tether.jit(lambda a, b: tether.error_if([a, b], a > 0, "used.")[1])
        with pytest.raises(CheckError, match=r"used\."):
            f(1.0, 2.0)

    def test_modules_are_left_alone(self):
        model = tether.nn.Linear(2, 2)
        out = tether.jit(lambda x: tether.error_if((model, x), x < 0, "no.")[0] is model or x)(1.0)
        assert out is True or bool(out)

    def test_what_has_no_tangent_gets_none(self):
        """A rule that can't be differentiated stays where nothing needs its derivative."""

        @jax.custom_vjp
        def barrier(x):
            return x

        def refuse(_, g):
            raise TypeError("differentiated")

        barrier.defvjp(lambda x: (x, None), refuse)
        f = lambda x, y, pred: tether.error_if((barrier(x), y), pred, "no.")[1]
        assert float(jax.jit(jax.grad(f, 1))(1.0, 1.0, False)) == 1.0


class TestWhere:
    """The error names the module that was being called, and the line."""

    def line(self, text: str) -> str:
        return re.sub(r"^.*/", "", re.search(r"at: +(.*)", text)[1])

    def here(self, offset: int) -> str:
        return f"{__file__.rpartition('/')[2]}:{sys._getframe(1).f_lineno + offset}"

    @pytest.mark.parametrize("transform", [lambda f: f, tether.jit, lambda f: tether.jit(tether.grad(f)), tether.vmap])
    def test_inside_a_module(self, transform):
        class Inner(tether.Module):
            def __call__(self, x):
                return checked(x)

        class Outer(tether.Module):
            def __init__(self):
                self.parts = [tether.nn.Lambda(jnp.sin), Inner()]

            def __call__(self, x):
                return self.parts[1](self.parts[0](x)).sum()

        outer = Outer()
        with pytest.raises(CheckError) as caught:
            transform(lambda x: outer(x))(-jnp.ones(1))
        assert caught.value.at.startswith("parts[1]  (Inner), ")

    def test_module_itself(self):
        class Net(tether.Module):
            def __call__(self, x):
                return checked(x)

        with pytest.raises(CheckError) as caught:
            tether.jit(Net())(BAD)
        assert caught.value.at.startswith("the module itself  (Net), ")

    @pytest.mark.parametrize("transform", [lambda f: f, tether.jit, tether.vmap, lambda f: tether.jit(tether.vmap(f))])
    def test_line_outside_of_modules(self, transform):
        f = lambda x: tether.error_if(x, x < 0, "no.")
        where = self.here(-1)
        model = tether.nn.Linear(1, 1)
        with pytest.raises(CheckError) as caught:
            transform(lambda x: f(model(jnp.ones(1)).sum() * 0 + x))(BAD[1:])
        assert caught.value.at.endswith(f"/{where}") and "Linear" not in caught.value.at


class TestOnError:
    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit, tether.jit])
    def test_nan(self, transform):
        leaves = (X, jnp.arange(2, dtype=jnp.int8), jnp.zeros(2, bool), jnp.ones(2, jnp.complex64))
        f = transform(lambda pred: tether.error_if(leaves, pred, "no.", on_error="nan"))
        floats, ints, bools, complexes = f(jnp.asarray(True))
        assert np.isnan(floats).all() and np.isnan(complexes).all() and bools.all() and (ints == 127).all()
        jax.tree.map(np.testing.assert_array_equal, f(jnp.asarray(False)), leaves)

    def test_nan_in_the_lanes_that_fail(self):
        f = jax.jit(jax.vmap(lambda x: tether.error_if(x, x < 0, "no.", on_error="nan")))
        assert np.isnan(f(BAD)).tolist() == [False, True, True]

    def test_nan_lets_tangents_pass(self):
        f = jax.grad(lambda x: tether.error_if(x**2, x < 0, "no.", on_error="nan"))
        assert float(f(-3.0)) == -6.0

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit, tether.jit])
    def test_off(self, transform):
        f = transform(lambda x: tether.error_if(x, True, "no.", on_error="off"))
        assert float(f(2.0)) == 2.0
        assert "cond" not in str(jax.make_jaxpr(f)(2.0))

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit, tether.jit, lambda f: tether.jit(tether.grad(f))])
    def test_breakpoint(self, transform, monkeypatch, capsys):
        seen = []
        monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(sys._getframe(1).f_locals))
        f = transform(lambda x: plain(tether.error_if(x, x < 0, "x is negative.", on_error="breakpoint")))
        assert np.isnan(f(BAD[1])) and not np.isnan(f(X[1]))
        (scope,) = seen
        assert [float(x) for x in scope["x"]] == [-2.0] and "x is negative." in str(scope["error"])
        assert capsys.readouterr().out.startswith("error_if: x is negative.\n  at:  ")

    def test_breakpoint_shows_all_lanes(self, monkeypatch, capsys):
        seen = []
        monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(sys._getframe(1).f_locals))
        table = jnp.arange(2.0)
        f = lambda x: tether.error_if((x, table), x < 0, "no.", on_error="breakpoint")[0]
        jax.jit(jax.vmap(f))(BAD)
        (scope,) = seen
        assert [x.shape for x in scope["x"]] == [(3,), (3, 2)] and scope["pred"].tolist() == [False, True, True]

    def test_environment_says_what_is_usual(self, monkeypatch):
        f = lambda x, **options: jax.jit(lambda x: tether.error_if(x, x < 0, "no.", **options))(x)
        monkeypatch.setenv("TETHER_ON_ERROR", "nan")
        assert np.isnan(f(-1.0))
        with pytest.raises((RuntimeError, ValueError), match=r"no\."):
            f(-1.0, on_error="raise")
        monkeypatch.setenv("TETHER_ON_ERROR", "off")
        assert float(f(-1.0)) == -1.0
        monkeypatch.setenv("TETHER_ON_ERROR", "warn")
        with pytest.raises(ArgumentError, match=r"the environment variable TETHER_ON_ERROR\n  got:      'warn'"):
            f(-1.0)


class TestBranched:
    MESSAGES = ["x is negative.", "x is large."]

    def f(self, x):
        return tether.branched_error_if(x, (x < 0) | (x > 9), jnp.where(x > 9, 1, 0), self.MESSAGES)

    @pytest.mark.parametrize("transform", [lambda f: f, tether.jit])
    @pytest.mark.parametrize(("x", "message"), [(-1.0, "x is negative."), (10.0, "x is large.")])
    def test_index_chooses(self, transform, x, message):
        with pytest.raises(CheckError, match=rf"^branched_error_if: {message}\n"):
            transform(self.f)(x)

    @pytest.mark.parametrize("transform", [lambda f: f, tether.jit])
    def test_lanes_may_fail_differently(self, transform):
        with pytest.raises(CheckError) as caught:
            transform(jax.vmap(self.f))(jnp.asarray([0.0, 11.0, -1.0, 12.0]))
        assert caught.value.what == "branched_error_if: x is large."
        assert caught.value.got == "a failure at [1], [3] of a batch of [4]; at [2]: x is negative."

    @pytest.mark.parametrize("transform", [lambda f: f, tether.jit])
    def test_index_for_each_element(self, transform):
        with pytest.raises(CheckError, match=r"x is large\.$|x is large\.\n"):
            transform(self.f)(jnp.asarray([0.0, 11.0, -1.0]))

    def test_index_alone_may_differ_in_lanes(self):
        f = lambda index: tether.branched_error_if(X, True, index, self.MESSAGES)
        with pytest.raises(CheckError) as caught:
            jax.vmap(f)(jnp.arange(2))
        assert caught.value.got == "a failure at [0] of a batch of [2]; at [1]: x is large."

    @pytest.mark.parametrize("index", [-1, 2])
    def test_index_out_of_range(self, index):
        with pytest.raises(CheckError, match=f"a failure with index {index}, and msgs has 2"):
            tether.jit(lambda i: tether.branched_error_if(X, True, i, self.MESSAGES))(index)

    def test_long_lists_are_cut(self):
        with pytest.raises(CheckError, match=r"\[7\] and 12 more of a batch of \[20\]"):
            jax.vmap(self.f)(-jnp.ones(20))


def test_empty_pred_is_no_failure():
    empty = jnp.zeros((0,), bool)
    f = lambda pred: tether.branched_error_if(X, pred, jnp.zeros((0,), int), ["no."])
    assert f(empty) is X and jax.jit(f)(empty).tolist() == X.tolist()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: tether.error_if(x, x, "no."), r"pred holds no bools\.\n  got:      float32\[3\]"),
        (lambda x: tether.error_if(1.0, (x < 0).any(), "no."), r"holds no array(?s:.*)got:      1.0"),
        (lambda x: tether.error_if(tether.nn.Linear(2, 2), (x < 0).any(), "no."), "got:      Linear object"),
        (lambda x: tether.error_if(x, True, "no.", on_error="warn"), r"no such way(?s:.*)at:       on_error\n"),
        (lambda x: tether.branched_error_if(x, x < 0, 0.5, ["no."]), r"no index of messages\.\n  got:      float"),
        (lambda x: tether.branched_error_if(x, True, jnp.zeros(3, int), ["no."]), r"got:      int32\[3\]"),
    ],
)
def test_wrong_arguments(call, text):
    with pytest.raises(ArgumentError, match=text):
        jax.jit(call)(X)
