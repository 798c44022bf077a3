# SPDX-License-Identifier: Apache-2.0
"""Values on their way out of vmap and grad, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tether._core import trace as _trace
from tether.compat.equinox.experimental._lanes import Outward


def test_outward_sees_all_lanes_and_inward_gives_each_its_row():
    seen = []

    def f(x, y):
        outward = Outward([x, y, jnp.array(5.0)], stop=True)
        seen.append((outward.target is _trace.EVALUATING, outward.lanes(), [leaf.shape for leaf in outward.leaves]))
        row, shared, constant = outward.inward([10 * outward.leaves[0], outward.leaves[1], jnp.array(7.0)])
        return row + shared + constant + jax.lax.stop_gradient(0 * x)

    x, y = jnp.arange(6.0).reshape(2, 3), jnp.array(1.0)
    out = jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(1, None))(x, y)
    assert out.tolist() == (10 * x + 8).T.tolist()
    assert seen == [(True, ((2, 3), (None, None), (None, None)), [(3, 2), (), ()])]


def test_the_target_is_the_innermost_program():
    def f(x):
        outward = Outward([x], stop=True)
        assert _trace.is_staged(outward.target) and outward.leaves[0].shape == (3,)
        return outward.inward(outward.leaves)[0]

    assert jax.jit(jax.vmap(f))(jnp.arange(3.0)).tolist() == [0, 1, 2]
