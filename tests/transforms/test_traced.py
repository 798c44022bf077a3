# SPDX-License-Identifier: Apache-2.0
"""One trace of a function: what it found, what it reads and writes, and what it can't return."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tether
from tether._transforms._traced import Traced
from tether.errors import ArgumentError, LeakError, MissedReadWarning


def traced(fun, variables, *leaves):
    return Traced("jit", "fun", fun, list(leaves), variables, {})


def test_what_is_read_and_written():
    a, b, c = tether.State(1.0), tether.State(2.0), tether.State(3.0)

    def fun(leaves):
        b.value = leaves[0] * a.value
        return {"out": b.value + 1}

    found = traced(fun, [a, b, c], jnp.float32(5))
    assert (found.used, found.variables, found.written, found.count) == ([True, False, False], [a, b], [b], 1)
    assert found.reads == [a, b] and found.is_closed
    assert [float(value) for value in found.call(jnp.float32(4), None, None, jnp.float32(5))] == [21.0, 20.0]
    assert [float(variable.value) for variable in (a, b, c)] == [1.0, 2.0, 3.0]
    assert (found.avals["out"] if isinstance(found.avals, dict) else found.avals[0]).shape == ()


def test_a_missed_read_costs_one_more_trace_and_points_at_the_user():
    hidden, runs = tether.State(2.0), []

    def fun(leaves):
        runs.append(1)
        return hidden.value * leaves[0]

    with pytest.warns(MissedReadWarning, match="fun reads Variables") as caught:
        found = traced(fun, [], jnp.float32(3))
    assert (len(runs), found.count, found.found) == (2, 2, [hidden])
    assert caught[0].filename == __file__


def test_reads_without_end():
    cells, runs = [tether.State(float(i)) for i in range(20)], []

    def fun(leaves):
        runs.append(1)
        return sum(cell.value for cell in cells[: len(runs)])

    with pytest.raises(LeakError, match="each trace of fun reads Variables"):
        traced(fun, [])


def test_values_of_a_trace_around_are_told():
    closed = []

    @jax.jit
    def outer(x):
        closed.append(traced(lambda leaves: leaves[0] * x, [], jnp.float32(2)).is_closed)
        return x

    outer(jnp.float32(3))
    assert closed == [False]


@pytest.mark.parametrize("out", ["text", object, {"a": [1.0, "b"]}], ids=["text", "class", "inside"])
def test_a_result_that_is_no_array(out):
    with pytest.raises(ArgumentError, match=r"(?s)returns something that is no array.*result"):
        traced(lambda leaves: out, [])
