# SPDX-License-Identifier: Apache-2.0
"""A loop of at most so many steps as scans in scans, with derivatives of both modes and any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether._transforms._hoisted import settled
from tether._transforms._lanes import any_lane, chosen, own_lane


def bounded_while(test: Callable[[Any], Any], turn: Callable[[Any], Any], init: Any, *, most: int, base: int) -> Any:
    """``jax.lax.while_loop`` of at most ``most`` steps, at least one.

    A scan has ``base`` turns, each of which is a scan, down to those that make steps. A turn after the last step costs
    one test. The backward pass runs the turns of all scans but the innermost again.
    """
    leaves, treedef = jax.tree.flatten(init)
    body, leaves = settled(lambda carry: jax.tree.leaves(turn(treedef.unflatten(carry))), leaves)
    asks = lambda carry: test(treedef.unflatten(carry))
    depth = 1
    while base**depth < most:
        depth += 1
    inner = base ** (depth - 1)
    outermost = -(-most // inner)
    is_exact = outermost * inner == most  # no need to count

    def goes_on(state: Any) -> Any:
        more = any_lane(asks(state[1]))
        return more if is_exact else more & (state[0] < most)

    def step(state: Any) -> Any:
        count, carry = state
        return count + 1, chosen(own_lane(asks(carry)), body(body.consts, carry), carry)

    def scans(state: Any, length: int, depth: int) -> Any:
        inside = step if depth == 1 else lambda state: scans(state, base, depth - 1)
        one = lambda state, _: (jax.lax.cond(goes_on(state), inside, lambda state: state, state), None)
        if depth > 1:
            one = jax.checkpoint(one, prevent_cse=False)
        return jax.lax.scan(one, state, length=length)[0]

    return treedef.unflatten(scans((jnp.int32(0), leaves), outermost, depth)[1])
