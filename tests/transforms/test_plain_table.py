# SPDX-License-Identifier: Apache-2.0
"""Every cell of the table of plain transformations, proved: right values on changed state, exact writes, an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.transforms.plain_table import ERROR, PAGE, PLACES, TABLE, page
from tether.errors import PlainTransformError

X = np.array([1.0, 2.0, 3.0], np.float32)


class Net(tether.Module):
    def __init__(self):
        self.w = tether.Param(2.0)
        self.s = tether.State(0.0)

    def read(self, x: Any) -> Any:
        return (self.w * x**2).sum()

    def write(self, x: Any) -> Any:
        self.s = self.s + 1
        return (self.s * x**2).sum()


def _in_grad(net: Net, fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: tether.grad(lambda net: (net.w, fun(x)), has_aux=True)(net)[1]


AROUND: dict[str, Callable[[Net, Any], Any]] = {
    "by itself": lambda net, fun: fun,
    "in tether.jit": lambda net, fun: tether.jit(lambda x: fun(x)),
    "in tether.grad, eager": _in_grad,
}


def total(out: Any) -> float:
    return float(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(out)))


def is_plain(net: Net) -> bool:
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(net))


def check_error(net: Net, fun: Callable[[Any], Any], around: Any) -> None:
    before = float(net.w), float(net.s)
    for _ in range(2):  # the second time, JAX must not have the trace in its cache
        with pytest.raises(PlainTransformError, match=r"(?s)(w  \(Param\)|s  \(State\)).*fix:"):
            around(net, fun)(X)
        assert (float(net.w), float(net.s)) == before and is_plain(net)


@functools.cache
def right(name: str, w: float) -> float:
    """By plain JAX, of a function of w alone."""
    return total(TABLE[name].make(lambda x: (w * x**2).sum())(X))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TABLE)
def test_read(name: str, place: str):
    """On changed values: a function that is called again, and the same one in a new function around."""
    net, row, around = Net(), TABLE[name], AROUND[place]
    inner = row.make(net.read)
    if row.reads[PLACES.index(place)] == ERROR:
        check_error(net, inner, around)
        return
    again = around(net, inner)
    for w, fun in [(2.0, again), (20.0, again), (21.0, around(net, inner))]:
        net.w = w
        assert total(fun(X)) == pytest.approx(right(name, w))
        assert is_plain(net)
    assert float(net.s) == 0


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("name", ["jit", "scan", "while_loop, in the body", "switch", "grad of jit", "closure_convert"])
def test_read_of_what_lives_in_a_ref(name: str, place: str):
    """JAX has a trace in its caches that reads the Ref, and must not find it where a Frame has another value."""
    net, row = Net(), TABLE[name]
    inner = row.make(net.read)
    fun = AROUND[place](net, inner)
    for w in (2.0, 20.0):
        net.w = w
        assert total(inner(X)) == total(fun(X)) == pytest.approx(right(name, w))
        assert is_plain(net)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TABLE)
def test_write(name: str, place: str):
    net, row = Net(), TABLE[name]
    inner = row.make(net.write)
    if row.writes[PLACES.index(place)] == ERROR:
        check_error(net, inner, AROUND[place])
        return
    assert place == "by itself"
    seen = [total(inner(X)), total(inner(X)), total(row.make(net.write)(X))]
    assert seen == pytest.approx(list(row.results))
    assert float(net.s) == row.count and is_plain(net)
    net.s = 10.0  # from outside: the next call goes on from there
    inner(X)
    assert float(net.s) == 10 + row.count / 3


def test_the_page_says_so():
    assert PAGE.read_text() == page(), "python tests/transforms/plain_table.py writes it anew"
