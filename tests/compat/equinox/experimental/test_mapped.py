# SPDX-License-Identifier: Apache-2.0
"""Where a write can wait for the vmap that maps its program later; what it then does is in test_stateful."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tether
from tether._core import trace as _trace
from tether.compat.equinox.experimental._mapped import axes_around


def axes_inside(run):
    """What ``axes_around`` says where ``run`` calls the function that it is given."""
    found = []
    run(lambda x: (found.append(axes_around(_trace.current())), x)[1])
    return found[0]


SCAN = lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, None, length=2)[1].sum()
X = jnp.ones((2, 2))
WAYS = {
    "nothing": (lambda f: f(X), []),
    "jit": (lambda f: jax.jit(f)(X), []),
    "vmap": (lambda f: jax.vmap(f, axis_name="b")(X), ["b"]),
    "vmap of scan": (lambda f: jax.vmap(SCAN(f), axis_name="b")(X), ["b"]),
    "vmap of vmap of jit": (lambda f: jax.vmap(jax.vmap(jax.jit(f), axis_name="b"), axis_name="a")(X), ["b", "a"]),
    "grad of vmap of scan": (lambda f: jax.grad(lambda x: jax.vmap(SCAN(f), axis_name="b")(x).sum())(X), ["b"]),
    "vmap without a name": (lambda f: jax.vmap(SCAN(f))(X), []),
    "vmap of grad of scan": (lambda f: jax.vmap(jax.grad(lambda x: SCAN(f)(x)), axis_name="b")(X[0]), []),
    "vmap of cond": (lambda f: jax.vmap(lambda x: jax.lax.cond(True, f, lambda x: x, x), axis_name="b")(X), []),
    "tether.jit": (lambda f: tether.jit(jax.vmap(SCAN(f), axis_name="b"))(X), []),
}


@pytest.mark.parametrize("way", WAYS)
def test_axes(way):
    run, expected = WAYS[way]
    assert axes_inside(run) == expected
