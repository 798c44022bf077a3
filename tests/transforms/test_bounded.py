# SPDX-License-Identifier: Apache-2.0
"""Loops of at most so many steps, as scans in scans, against Python loops in float64."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tether._transforms._bounded import bounded_while

X, W = 0.4, 1.3
# (the most steps, base): one scan; two, three and four of them; powers, and none
SHAPES = [(1, 16), (9, 16), (16, 16), (17, 16), (8, 2), (11, 2), (27, 3)]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def looped(x, w, steps, most, base):
    turn = lambda c: (c[0] + 1, jnp.sin(w * c[1]) + c[1] ** 2 / 8)
    return bounded_while(lambda c: c[0] < steps, turn, (jnp.int32(0), x), most=most, base=base)[1]


def by_hand(x, w, steps):
    for _ in range(steps):
        x = jnp.sin(w * x) + x**2 / 8
    return x


@pytest.mark.parametrize(("most", "base"), SHAPES)
def test_values_and_derivatives(most, base):
    """In both modes; as many steps as the test wants, but no more than may be."""
    run = lambda x, w, steps: looped(x, w, steps, most, base)
    every = lambda fun: (
        lambda steps: (
            fun(X, W, steps),
            jax.grad(fun, (0, 1))(X, W, steps),
            jax.jvp(lambda x, w: fun(x, w, steps), (X, W), (1.0, 2.0)),
        )
    )
    found = jax.jit(every(run))
    for steps in {0, 1, most - 1, most, most + 5}:
        expected = every(by_hand)(min(steps, most))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found(steps), expected)


def test_second_derivatives():
    """In each order of the modes."""
    run = lambda x: looped(x, W, 5, 7, 3)
    expected = jax.grad(jax.grad(lambda x: by_hand(x, W, 5)))(X)
    for outer in (jax.grad, jax.jacfwd):
        for inner in (jax.grad, jax.jacfwd):
            np.testing.assert_allclose(jax.jit(outer(inner(run)))(X), expected, rtol=1e-10)


def test_lanes():
    """Each makes its own number of steps; a vmap of gradients, and a gradient of a vmap."""
    xs, steps = np.array([0.1, 0.5, 0.9]), np.array([4, 0, 7], np.int32)
    expected = [jax.grad(by_hand, (0, 1))(x, W, n) for x, n in zip(xs, steps, strict=True)]
    of_x, of_w = (np.array(column) for column in zip(*expected, strict=True))
    run = lambda x, w, steps: looped(x, w, steps, 8, 2)
    found = jax.jit(jax.vmap(jax.grad(run, (0, 1)), (0, None, 0)))(xs, W, steps)
    np.testing.assert_allclose(found, (of_x, of_w), rtol=1e-12)
    total = lambda x, w: jax.vmap(run, (0, None, 0))(x, w, steps).sum()
    found = jax.jit(jax.grad(total, (0, 1)))(xs, W)
    np.testing.assert_allclose(found[0], of_x, rtol=1e-12)
    np.testing.assert_allclose(found[1], of_w.sum(), rtol=1e-12)


def test_runs_of_the_body():
    """Steps alone run: 5 of 27, once in the forward pass, and once again for each scan around the innermost."""
    runs = collections.Counter()

    def run(x, most, base):
        def turn(c):
            jax.debug.callback(lambda step: runs.update([int(step)]), c[0])
            return c[0] + 1, jnp.sin(c[1])

        return bounded_while(lambda c: c[0] < 5, turn, (0, x), most=most, base=base)[1]

    for derivative, most, base, expected in ((False, 27, 3, 1), (True, 27, 27, 1), (True, 27, 3, 3), (True, 4, 2, 2)):
        fun = lambda x, most=most, base=base: run(x, most, base)
        runs.clear()
        jax.jit(jax.grad(fun) if derivative else fun)(X).block_until_ready()
        jax.effects_barrier()
        assert runs == dict.fromkeys(range(min(5, most)), expected), (most, base)


def test_memory_is_that_of_a_scan_on_each_level():
    x = jnp.ones(4096)

    def copies(most, base):
        turn = lambda c: (c[0] + 1, jnp.sin(c[1]))
        run = lambda x: bounded_while(lambda c: True, turn, (0, x), most=most, base=base)[1].sum()
        return jax.jit(jax.grad(run)).lower(x).compile().memory_analysis().temp_size_in_bytes / x.nbytes

    assert copies(1000, 1000) >= 1000
    assert copies(1000, 10) <= 3 * 10 + 15
