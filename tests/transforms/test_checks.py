# SPDX-License-Identifier: Apache-2.0
"""Checks of a compiled program: they are found, and one that fails leaves everything as it was."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tether
from tether._transforms._checks import Check, checks_in
from tether.errors import CheckError, StateLostError, TetherError

X, BAD = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([1.0, -2.0, -3.0])


def checked(x):
    return tether.error_if(x, x < 0, "x is negative.")


twice = lambda x: checked(checked(x))
loop = lambda body: lambda x: jax.lax.while_loop(lambda x: x.sum() < 5, lambda x: body(x) + 1, x)


@jax.custom_jvp
def with_rule(x):
    return checked(x)


with_rule.defjvps(lambda t, out, x: t)

PROGRAMS = {
    "by itself": (checked, 1),
    "two": (twice, 2),
    "jit": (jax.jit(checked), 1),
    "vmap": (jax.vmap(checked), 1),
    "scan": (lambda x: jax.lax.scan(lambda c, x: (c, twice(x)), 0.0, x), 2),
    "while": (loop(checked), 1),
    "cond": (lambda x: jax.lax.cond(x.sum() > 0, checked, twice, x), 3),
    "grad of checkpoint": (jax.grad(jax.checkpoint(lambda x: jnp.sin(checked(x)).sum())), 1),
    "in custom_jvp": (with_rule, 1),
    "tether.jit in it": (tether.jit(checked), 1),
    "none": (jnp.sin, 0),
    "off": (lambda x: tether.error_if(x, x < 0, "no.", on_error="off"), 0),
    "nan": (lambda x: tether.error_if(x, x < 0, "no.", on_error="nan"), 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_checks_are_found(name):
    fun, count = PROGRAMS[name]
    found = checks_in(jax.make_jaxpr(fun)(X).jaxpr)
    assert len(found) == count and all(isinstance(check, Check) for check in found)


def test_what_jax_has_traced_before_is_found():
    helper = jax.jit(checked)
    (check,) = checks_in(jax.make_jaxpr(helper)(X).jaxpr)
    assert checks_in(jax.make_jaxpr(lambda x: helper(x) + helper(x))(X).jaxpr) == [check]


def test_other_callbacks_are_no_checks():
    f = lambda x: jax.pure_callback(lambda x: x, X, x)
    assert checks_in(jax.make_jaxpr(f)(X).jaxpr) == []


@pytest.mark.parametrize("text", ["short.", "two lines,\n\n  of which one is 'quoted': \"é\".", "long. " * 500])
def test_jax_repeats_the_text_of_an_exception(text):
    def fail(x):
        raise RuntimeError(text)

    with pytest.raises((RuntimeError, ValueError)) as caught:
        jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(fail, X, x))(X))
    assert text in str(caught.value)


def test_exceptions_of_other_callbacks_stay_as_they_are():
    def fail(x):
        raise RuntimeError("of the user's own")

    f = tether.jit(lambda x: jax.pure_callback(fail, X, checked(x)))
    with pytest.raises((RuntimeError, ValueError), match="of the user's own") as caught:
        f(X)
    assert not isinstance(caught.value, TetherError)


def test_nothing_is_logged_where_the_error_says_it(caplog):
    with pytest.raises(CheckError):
        tether.jit(checked)(BAD)
    assert not caplog.records
    with pytest.raises((RuntimeError, ValueError)):
        jax.jit(lambda x: tether.error_if(x, x < 0, "no."))(BAD)
    assert "pure_callback failed" in caplog.text


class TestState:
    class Net(tether.Module):
        def __init__(self):
            self.count, self.total, self.weight = tether.State(0), tether.State(jnp.zeros(3)), tether.Param(jnp.ones(3))

        def __call__(self, x):
            self.count = self.count + 1
            self.total = self.total + x
            return checked(self.weight * x)

    def values(self, net):
        return {path: np.asarray(variable._value).tolist() for path, variable in tether.variables(net).items()}

    def test_is_that_before_the_call(self):
        net = self.Net()
        step = tether.jit(lambda x: net(x))
        for count in range(1, 4):
            step(X)
            before = self.values(net)
            with pytest.raises(CheckError, match="x is negative"):
                step(BAD)
            assert self.values(net) == before and int(net.count) == count
        assert step.traces == 1

    def test_donated_it_is_lost_and_both_errors_say_so(self):
        net = self.Net()
        step = tether.jit(lambda x: net(x), donate_state=True)
        step(X)
        step(X)
        with pytest.raises(CheckError, match=r"x is negative(?s:.*)given to the call, and is lost"):
            step(BAD)
        with pytest.raises(StateLostError, match=r"count  \(State\), total  \(State\)"):
            step(X)

    def test_first_donated_call_consumes_copies(self):
        net = self.Net()
        step = tether.jit(lambda x: net(x), donate_state=True)
        with pytest.raises(CheckError) as caught:
            step(BAD)
        assert not caught.value.fixes and int(net.count) == 0
        step(X)
        assert int(net.count) == 1

    def test_error_of_another_thread_is_not_taken(self):
        """Of one program that runs in two threads, only the call that fails raises."""
        step = tether.jit(checked)
        step(X)
        failed = {"good": 0, "bad": 0}

        def run(name, x):
            for _ in range(30):
                try:
                    step(x)
                except CheckError:
                    failed[name] += 1

        threads = [threading.Thread(target=run, args=pair) for pair in (("good", X), ("bad", BAD))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == {"good": 0, "bad": 30}


class TestSeveralDevices:
    """Where an exception in one device's program would leave the others waiting for it."""

    def mesh(self):
        return Mesh(jax.devices(), ("d",))

    def rows(self, *bad: int):
        rows = np.ones((4, 2), np.float32)
        rows[list(bad)] = -1
        return rows

    def put(self, rows):
        return jax.device_put(rows, NamedSharding(self.mesh(), P("d")))

    def test_sharded_data(self):
        seen = tether.State(0)

        @tether.jit
        def step(x):
            seen.value = seen.value + 1
            return (jax.vmap(checked)(x) + x.mean()).sum()

        right = float((self.rows() * 2).sum())
        for count in range(1, 3):
            assert float(step(self.put(self.rows()))) == pytest.approx(right, rel=1e-5)
            with pytest.raises(CheckError, match=r"a failure at \[2\] of a batch of \[4\]"):
                step(self.put(self.rows(2)))
            assert int(seen.value) == count
        assert float(step(self.put(self.rows()))) == pytest.approx(right, rel=1e-5)

    def test_shards(self):
        f = lambda x: checked(x) + jax.lax.psum(x, "d")
        step = tether.jit(tether.shard_map(f, mesh=self.mesh(), in_specs=P("d"), out_specs=P("d")))
        np.testing.assert_allclose(step(self.rows()), self.rows() + 4, rtol=1e-6)
        with pytest.raises(CheckError, match="x is negative"):
            step(self.rows(0, 3))

    def test_axes_of_explicit_type(self):
        mesh = jax.make_mesh((4,), ("d",))
        put = lambda rows: jax.device_put(rows, NamedSharding(mesh, P("d")))
        with jax.set_mesh(mesh):
            step = tether.jit(lambda x: checked(x) * 2)
            np.testing.assert_array_equal(step(put(self.rows())), self.rows() * 2)
            with pytest.raises(CheckError, match="x is negative"):
                step(put(self.rows(2)))

    def test_on_one_device_the_same_check_stops_the_program(self):
        helper = jax.jit(checked)
        step = tether.jit(lambda x: helper(x) + helper(x).mean())
        with pytest.raises(CheckError):
            step(self.put(self.rows(2)))
        with pytest.raises((RuntimeError, ValueError), match="x is negative"):
            jax.block_until_ready(helper(self.rows(2)))

    def test_donated_state_is_lost(self):
        total = tether.State(jnp.zeros(2))

        @tether.jit(donate_state=True)
        def step(x):
            total.value = total.value + checked(x).sum(0)

        for _ in range(3):
            step(self.put(self.rows()))
        with pytest.raises(CheckError, match="given to the call, and is lost"):
            step(self.put(self.rows(1)))
        with pytest.raises(StateLostError):
            step(self.put(self.rows()))
