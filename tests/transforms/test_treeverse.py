# SPDX-License-Identifier: Apache-2.0
"""Where carries are kept, against brute force and what was published."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tether._transforms._treeverse import (
    NEVER,
    Schedule,
    StummWalther,
    WangMoin,
    _stride,
    default_checkpoints,
)


@functools.cache
def least_runs(ahead: int, slots: int) -> int:
    """Runs of steps that go back over ``ahead`` steps: ``slots`` hold carries, the first of which is there."""
    if ahead <= 1:
        return ahead
    if slots == 1:
        return ahead * (ahead + 1) // 2
    return min(m + least_runs(ahead - m, slots - 1) + least_runs(m, slots) for m in range(1, ahead))


def held(choice: Any, count: int, steps: int) -> list[int]:
    """Which steps the slots hold after so many."""
    found, state, place = jnp.full(count, NEVER, jnp.int32), choice.entry(), jax.jit(choice.place)
    for step in range(steps):
        save, slot, state = place(jnp.int32(step), found, state)
        found = found.at[slot].set(step) if save else found
    return sorted(step for step in found.tolist() if step != NEVER)


def test_default_is_the_published_square_root():
    for steps in range(1, 3000):
        slots = default_checkpoints(steps)
        assert slots == (1 if steps == 1 else math.floor(-1.5 + math.sqrt(2 * steps + 0.25)) + 1)
        assert slots * (slots + 1) // 2 - 1 < steps <= (slots + 1) * (slots + 2) // 2 - 1 or steps == 1


def test_stumm_and_walther():
    """Their figure 2.2, for 4 checkpoints; each entry is what steps 0 to n - 1 leave."""
    figure = {3: "0 1 2", 4: "0 1 2 3", 5: "0 1 2 3", 6: "0 1 2 5", 7: "0 2 5 6", 8: "0 5 6 7", 9: "0 5 6 7"}
    figure |= {10: "0 5 6 9", 11: "0 5 9 10", 12: "0 5 9 10", 13: "0 5 9 12", 14: "0 5 9 12"}
    for steps, expected in figure.items():
        assert held(StummWalther(4), 4, steps) == [int(step) for step in expected.split()]


def test_wang_and_moin():
    """From full slots on: the last one rises, until those two levels below it can be given up."""
    levels, steps = [NEVER, 0, 0, 0], [0, 5, 9, 12]
    dispensable = [False] * 4
    state, found, choice = WangMoin(4).entry(), jnp.array(steps, jnp.int32), WangMoin(4)
    for step in range(14, 40):
        save, slot, state = choice.place(jnp.int32(step), found, state)
        if any(dispensable):
            expected = max((i for i in range(4) if dispensable[i]), key=steps.__getitem__)
            levels[expected] = 0
        else:
            expected = steps.index(max(steps))
            levels[expected] += 1
            dispensable = [
                flag or level < levels[expected] - 1 for flag, level in zip(dispensable, levels, strict=True)
            ]
        dispensable[expected], steps[expected] = False, step
        found = found.at[slot].set(step)
        assert save and int(slot) == expected
        assert steps[0] == 0
    assert not WangMoin(1).place(jnp.int32(3), jnp.zeros(1, jnp.int32), WangMoin(1).entry())[0]


@pytest.mark.parametrize(("slots", "steps"), [(1, 5), (2, 5), (2, 30), (3, 40), (5, 100), (10, 66)])
def test_known_number_of_steps(slots, steps):
    """From what the forward pass leaves, the backward pass can make the least runs: n + 1 steps, but for the last."""
    ((end, choice),) = Schedule(slots, steps, is_known=True).phases
    places = [*held(choice, slots, steps), steps]
    assert end == steps and len(places) <= slots + 1 and places[0] == 0
    gaps = [(after - before, slots - i) for i, (before, after) in enumerate(zip(places, places[1:], strict=False))]
    assert sum(least_runs(*gap) for gap in gaps) == least_runs(steps + 1, slots) - steps - 1


def test_stride_is_a_best_choice():
    stride = jax.jit(_stride)
    for slots in (2, 3, 5, 9):
        for ahead in (*range(slots + 2, 40), 60, 100):
            m = int(stride(jnp.int32(ahead), jnp.int32(slots)))
            runs = m + least_runs(ahead - m, slots - 1) + least_runs(m, slots)
            assert runs == least_runs(ahead, slots), (ahead, slots)


def test_stride_does_not_overflow():
    beta = lambda k, r: math.comb(k + r, k)
    for slots, ahead in ((2, NEVER), (3, NEVER), (9, NEVER - 1), (1000, NEVER), (100_000, NEVER), (2, 10**6)):
        r = 1
        while beta(slots, r) < ahead:
            r += 1
        best = range(max(beta(slots, r - 2), ahead - beta(slots - 1, r)), min(beta(slots, r - 1), ahead - 1) + 1)
        assert int(jax.jit(_stride)(jnp.int32(ahead), jnp.int32(slots))) in best
