# SPDX-License-Identifier: Apache-2.0
"""One test for all lanes, and a choice in each, under vmaps in vmaps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tether._transforms._lanes import any_lane, chosen, own_lane

GO = jnp.array([[True, False, False], [False, False, False]])


def test_any_lane():
    assert not any_lane(jnp.bool_(False)) and any_lane(jnp.bool_(True))
    rows = jax.jit(jax.vmap(any_lane, out_axes=None))
    assert rows(GO[0]) and not rows(GO[1])
    both = jax.jit(jax.vmap(jax.vmap(any_lane, out_axes=None), out_axes=None))
    assert both(GO) and not both(GO & False)
    assert jax.vmap(lambda go, x: any_lane(go), (None, 0), out_axes=None)(GO[1, 0], jnp.ones(2)) == False  # noqa: E712
    assert jax.vmap(jax.vmap(any_lane, out_axes=None), in_axes=1, out_axes=None)(GO)


def test_own_lane():
    """Where there is one lane, nobody asks unless it goes on."""
    assert own_lane(jnp.bool_(False))
    assert jax.vmap(own_lane)(GO[0]).tolist() == GO[0].tolist()
    assert jax.jit(jax.vmap(jax.vmap(own_lane)))(GO).tolist() == GO.tolist()
    assert jax.vmap(lambda x: own_lane(jnp.bool_(False)))(jnp.ones(2)).tolist() == [True, True]


def test_chosen():
    new, old = [jnp.ones(2), jnp.int8(1), jax.random.key(1)], [jnp.zeros(2), jnp.int8(0), jax.random.key(0)]
    run = jax.vmap(lambda go: chosen(own_lane(go), new, old))
    a, b, c = run(GO[0])
    assert a.tolist() == [[1, 1], [0, 0], [0, 0]] and b.tolist() == [1, 0, 0] and b.dtype == jnp.int8
    assert jax.random.key_data(c)[:, 1].tolist() == [1, 0, 0]


@pytest.mark.parametrize("batched", [False, True])
def test_a_loop_whose_test_is_the_same_is_not_batched(batched):
    """What isn't mapped stays so: a counter beside lanes that go on for different numbers of steps."""

    def run(n):
        state = jax.lax.while_loop(
            lambda s: any_lane(s[1] < n),
            lambda s: (s[0] + 1, chosen(own_lane(s[1] < n), [s[1] + 1], [s[1]])[0]),
            (jnp.int32(0), jnp.int32(0)),
        )
        return state

    steps, own = jax.vmap(run, 0 if batched else None, (None, 0), axis_size=3)(jnp.array([2, 5, 0]) if batched else 4)
    assert (int(steps), own.tolist()) == ((5, [2, 5, 0]) if batched else (4, [4, 4, 4]))
