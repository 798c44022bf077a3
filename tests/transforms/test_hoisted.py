# SPDX-License-Identifier: Apache-2.0
"""Functions whose closed-over arrays are arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tether._transforms._hoisted import Hoisted, settled


def test_what_is_closed_over_is_an_argument():
    """Tracers of every transformation around, once each; the tree of the result; new values in their place."""

    def f(x, y):
        hoisted = Hoisted(lambda a, b: {"sum": a + b * x, "rest": [y * y]}, x, jax.ShapeDtypeStruct((), jnp.float32))
        assert [aval.shape for aval in hoisted.avals] == [(), ()]
        assert {const is x or const is y for const in hoisted.consts} == {True}
        same = hoisted(hoisted.consts, x, y)
        doubled = hoisted([2 * const for const in hoisted.consts], x, y)
        assert jax.tree.structure(same) == jax.tree.structure({"sum": 0, "rest": [0]})
        return same["sum"] + 10 * doubled["rest"][0] + doubled["sum"]

    expected = lambda x, y: x + y * x + 10 * (2 * y) ** 2 + x + y * 2 * x
    x, y = jnp.float32(2), jnp.float32(3)
    for run in (lambda f: f, jax.jit, lambda f: jax.grad(f, (0, 1)), lambda f: jax.jit(jax.grad(f, (0, 1)))):
        np.testing.assert_allclose(run(f)(x, y), run(expected)(x, y))


def test_settled_entry_has_the_weak_types_of_the_body():
    init = [jnp.asarray(1.0), jnp.asarray(2), jnp.asarray(3.0), jnp.float32(4), jax.random.key(0)]
    assert [getattr(leaf, "weak_type", None) for leaf in init] == [True, True, True, False, None]
    # the first becomes strong by the third, the third by the fourth
    body = lambda carry: [carry[0] + carry[2], carry[1] + 1, carry[2] + carry[3], carry[3], carry[4]]
    hoisted, carry = settled(body, init)
    assert [getattr(leaf, "weak_type", None) for leaf in carry] == [False, True, False, False, None]
    assert [getattr(aval, "weak_type", None) for aval in hoisted.avals] == [False, True, False, False, False]
    assert [leaf.dtype for leaf in carry] == [leaf.dtype for leaf in init] and carry[1] is init[1]
