# SPDX-License-Identifier: Apache-2.0
"""Learning rates by step, of numbers, arrays and steps that are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax.optimizer.scheduler import LinearAnnealing, Scheduler, StepDecay

KINDS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "float": float,
    "numpy": np.int64,
    "uint32": lambda step: jnp.array(step, jnp.uint32),
    "float32": jnp.float32,
    "variable": lambda step: objax.StateVar(jnp.array(step, jnp.uint32)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_step", [8, 8.0])
class TestLinearAnnealing:
    def test_stays_at_the_end(self, kind: str, max_step: float):
        schedule = LinearAnnealing(max_step, base_lr=2.0, is_cycle=False, min_lr=0.5)
        rates = [float(schedule(KINDS[kind](step))) for step in (0, 2, 4, 8, 100)]
        np.testing.assert_allclose(rates, [2, 2 - 1.5 / 4, 1.25, 0.5, 0.5], rtol=1e-6)

    def test_starts_over(self, kind: str, max_step: float):
        schedule = LinearAnnealing(max_step, base_lr=2.0)
        rates = [float(schedule(KINDS[kind](step))) for step in (0, 2, 7, 8, 12)]
        np.testing.assert_allclose(rates, [2, 1.5, 0.25, 2, 1], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
class TestStepDecay:
    @pytest.mark.parametrize("size", [10, 10.0])
    def test_every_few_steps(self, kind: str, size: float):
        schedule = StepDecay(size, base_lr=3.0, gamma=0.5)
        rates = [float(schedule(KINDS[kind](step))) for step in (0, 9, 10, 25, 40)]
        np.testing.assert_allclose(rates, [3, 3, 1.5, 0.75, 3 / 16], rtol=1e-6)

    @pytest.mark.parametrize("places", [[10, 12], (10.0, 12.0)])
    def test_at_given_steps(self, kind: str, places: Any):
        schedule = StepDecay(places, base_lr=3.0, gamma=0.1)
        rates = [float(schedule(KINDS[kind](step))) for step in (0, 9, 10, 11, 12, 99)]
        np.testing.assert_allclose(rates, [3, 3, 0.3, 0.3, 0.03, 0.03], rtol=1e-6)


@pytest.mark.parametrize(
    "schedule", [LinearAnnealing(7), LinearAnnealing(7, is_cycle=False), StepDecay(3), StepDecay([2, 5])]
)
def test_traced_and_of_many_steps(schedule: Scheduler):
    steps = jnp.arange(10)
    expected = [float(schedule(step)) for step in range(10)]
    np.testing.assert_allclose(objax.Jit(schedule, objax.VarCollection())(steps), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([float(jax.jit(schedule)(s)) for s in steps], expected, rtol=1e-6, atol=1e-6)


def test_a_large_step_is_counted_exactly():
    assert float(LinearAnnealing(2**24 + 1)(2**24 + 1)) == 1.0
    assert float(StepDecay([2**24 + 1], gamma=0.5)(2**24)) == 1.0


class TestMistakes:
    def test_a_rate_that_would_rise(self):
        with pytest.raises(AssertionError) as caught:
            LinearAnnealing(10, base_lr=0.1, min_lr=0.5)
        assert str(caught.value) == (
            "LinearAnnealing: base_lr should be greater than or equal to min_lr.\n"
            "  got:      base_lr=0.1, min_lr=0.5\n"
            "  expected: base_lr >= min_lr"
        )

    def test_no_steps(self):
        with pytest.raises(AssertionError) as caught:
            LinearAnnealing(0)
        assert str(caught.value) == (
            "LinearAnnealing: max_step isn't above 0.\n  got:      0\n  expected: a positive number"
        )

    def test_a_schedule_without_a_multiplier(self):
        with pytest.raises(NotImplementedError):
            Scheduler()(1)
