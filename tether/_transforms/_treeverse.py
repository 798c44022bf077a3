# SPDX-License-Identifier: Apache-2.0
"""Which steps of a loop keep a copy of its carry, so that the backward pass runs few steps again.

Step n makes carry n + 1 out of carry n. There are ``slots`` places for a carry. The forward pass doesn't know how many
steps there will be: it fills the slots as Stumm and Walther (2010, algorithm 1) do, and after
(slots + 1) (slots + 2) / 2 - 1 steps as Wang, Moin and Iaccarino (2009) do. The backward pass takes the slots from the
last to the first, and fills those that become free as Griewank and Walther (2000) do: there the number of steps is
known.

In the backward pass of n steps each runs once for its derivative. With those that run again, there are no less than

    r * (n + 1) - beta(slots + 1, r - 1),  beta(k, r) = (k + r)! / (k! r!),  r the first with beta(slots, r) >= n + 1

runs, as it begins without the carry of the last step. As many it has if n is known before, or not above that number;
else up to 1.4 times as many.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NEVER = np.iinfo(np.int32).max  # a step that no loop comes to


def default_checkpoints(steps: int) -> int:
    """The least number of slots with which so many steps are no more than (slots + 1) (slots + 2) / 2 - 1."""
    return max(1, (math.isqrt(8 * steps + 1) - 3) // 2 + 1)


class Schedule:
    """What is kept where.

    Args:
        slots: How many carries there is place for.
        most: The most steps that the loop can make.
        is_known: Whether it makes so many.

    Attributes:
        keeps_all: Whether every step has a slot of its own, which is its number.
        phases: The forward pass: before which step it is over, and how it chooses.
    """

    def __init__(self, slots: int, most: int, is_known: bool = False):
        self.slots, self.keeps_all = slots, slots >= most
        triangle = (slots + 1) * (slots + 2) // 2 - 1
        self._is_short = most <= triangle
        self.phases: list[tuple[int, Any]] = [(min(most, triangle), StummWalther(slots))]
        if self.keeps_all:
            self.phases = [(most, Each())]
        elif not self._is_short:
            self.phases = [(most, Known(self, most))] if is_known else [*self.phases, (most, WangMoin(slots))]

    def next(self, step: Any, end: Any, free: Any, kept: Any, target: Any) -> Any:
        """The next step to be kept where steps before ``end`` run again; ``target`` if ``step`` wasn't ``kept``.

        Args:
            step: The one come to.
            end: The step whose carry has a cotangent.
            free: How many slots are free.
        """
        ahead = end - step
        nearest = jnp.where(kept, jnp.where((free > 0) & (ahead > 2), step + 1, NEVER), target)
        if self._is_short:  # there is a slot for each step
            return nearest
        far = kept & (free > 0) & (ahead - 2 > free)
        return jax.lax.cond(far, lambda: step + _stride(ahead, free + 1), lambda: nearest)


class Each:
    """Every step has its slot.

    Like the other choices of a forward pass, it has ``entry()``, a state at the entry, and ``place(step, steps,
    state)``: whether the carry of this step is kept, in which slot, and the new state. ``steps``, int32[slots], says of
    which step each slot holds the carry.
    """

    def entry(self) -> Any:
        return ()

    def place(self, step: Any, steps: Any, state: Any) -> tuple[Any, Any, Any]:
        return True, step, state


class StummWalther:
    """Blocks of slots + 1, slots, slots - 1, ... steps, all but the last of which are kept."""

    def __init__(self, slots: int):
        self._slots = slots

    def entry(self) -> Any:
        return jnp.int32(0), jnp.int32(0)

    def place(self, step: Any, steps: Any, state: Any) -> tuple[Any, Any, Any]:
        block, offset = state
        room = self._slots - block
        save = offset < room
        slot = jnp.where((offset == 0) & (block > 0), room, offset)  # the first of a block stays, at the end
        return save, slot, (jnp.where(save, block, block + 1), jnp.where(save, offset + 1, 0))


class WangMoin:
    """Every step is kept, in a dispensable slot: a later one is two levels above it. If none is, the last one rises."""

    def __init__(self, slots: int):
        self._slots = slots

    def entry(self) -> Any:
        return jnp.zeros(self._slots, jnp.int32).at[0].set(NEVER), jnp.zeros(self._slots, bool)

    def place(self, step: Any, steps: Any, state: Any) -> tuple[Any, Any, Any]:
        if self._slots == 1:
            return jnp.bool_(False), jnp.int32(0), state
        levels, dispensable = state
        some = dispensable.any()
        slot = jnp.where(dispensable | ~some, steps, -1).argmax().astype(jnp.int32)
        level = jnp.where(some, 0, levels[slot] + 1)
        dispensable = (dispensable | (~some & (levels < level - 1))).at[slot].set(False)
        return jnp.bool_(True), slot, (levels.at[slot].set(level), dispensable)


class Known:
    """The number of steps is known; then so is the best choice."""

    def __init__(self, schedule: Schedule, steps: int):
        self._schedule, self._end = schedule, steps + 1

    def entry(self) -> Any:
        return jnp.int32(0), jnp.int32(0)

    def place(self, step: Any, steps: Any, state: Any) -> tuple[Any, Any, Any]:
        count, target = state
        save, more = step == target, jnp.where(step == target, count + 1, count)
        target = self._schedule.next(step, self._end, self._schedule.slots - more, save, target)
        return save, count, (more, target)


def _stride(ahead: Any, slots: Any) -> Any:
    """How far off the next carry is kept, of ``ahead`` steps to go back, where there are fewer slots than steps.

    With r the first number for which beta(slots, r) >= ahead, this is the least of the best choices.
    """

    def further(state: Any) -> Any:
        _, last, beta, r = state
        whole, rest = beta // (r + 1), beta % (r + 1)  # beta * (slots + r + 1) / (r + 1), without overflow
        is_small = whole < (NEVER - beta) // slots - slots
        return last, beta, jnp.where(is_small, beta + whole * slots + rest * slots // (r + 1), NEVER), r + 1

    first = (jnp.int32(0), jnp.int32(1), slots + 1, jnp.int32(1))  # beta(slots, r) for r = -1, 0, 1; r
    before, last, beta, _ = jax.lax.while_loop(lambda state: state[2] < ahead, further, first)
    return jnp.maximum(before, ahead - (beta - last))
