# SPDX-License-Identifier: Apache-2.0
"""Learning rates that change with the step.

| Objax | here | what differs |
| --- | --- | --- |
| Scheduler, LinearAnnealing | the same | a ``max_step`` of 0 is an error |
| StepDecay | the same | with a list of steps, also of an array of steps |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.objax._errors import MisuseError
from tether.compat.objax.variable import BaseVar

__all__ = ["LinearAnnealing", "StepDecay"]


class Scheduler:
    """A learning rate for each step: a base, times a multiplier that a subclass says.

    Args:
        base_lr: The learning rate where the multiplier is 1.
    """

    def __init__(self, base_lr: float = 1.0):
        self.base_lr = base_lr

    def multiplier(self, step: Any) -> Any:
        """The multiplier at a step."""
        raise NotImplementedError

    def __call__(self, step: Any) -> Any:
        """The learning rate at a step."""
        return self.base_lr * self.multiplier(step)


class LinearAnnealing(Scheduler):
    """A learning rate that falls linearly.

    Args:
        max_step: Number of steps in which it falls.
        base_lr: The learning rate at step 0.
        is_cycle: Whether it starts over then, or stays.
        min_lr: The learning rate at ``max_step``.
    Raises:
        MisuseError: it would rise, or ``max_step`` isn't above 0.
    Example:
        >>> schedule = objax.optimizer.scheduler.LinearAnnealing(10, base_lr=2.0, is_cycle=False)
        >>> [float(schedule(step)) for step in (0, 5, 20)]
        [2.0, 1.0, 0.0]
    """

    def __init__(self, max_step: float, base_lr: float = 1.0, is_cycle: bool = True, min_lr: float = 0.0):
        super().__init__(base_lr=base_lr)
        if base_lr < min_lr:
            raise MisuseError(
                "LinearAnnealing: base_lr should be greater than or equal to min_lr.",
                got=f"base_lr={base_lr}, min_lr={min_lr}",
                expected="base_lr >= min_lr",
            )
        if max_step <= 0:
            raise MisuseError(
                "LinearAnnealing: max_step isn't above 0.", got=repr(max_step), expected="a positive number"
            )
        self.max_step = max_step
        self.is_cycle = is_cycle
        self.min_lr_multiplier = min_lr / self.base_lr

    def multiplier(self, step: Any) -> Any:
        """The multiplier at a step."""
        step, max_step = _alike(step, self.max_step)
        step = jnp.remainder(step, max_step) if self.is_cycle else jnp.minimum(step, max_step)
        return 1.0 - (step / max_step) * (1.0 - self.min_lr_multiplier)


class StepDecay(Scheduler):
    """A learning rate that falls by a factor at certain steps.

    Args:
        step_size: Number of steps from one fall to the next, or a list of the steps where it falls.
        base_lr: The learning rate at step 0.
        gamma: The factor.
    Example:
        >>> schedule = objax.optimizer.scheduler.StepDecay([10, 15], gamma=0.5)
        >>> [float(schedule(step)) for step in (9, 10, 15)]
        [1.0, 0.5, 0.25]
    """

    def __init__(self, step_size: float | Sequence[float], base_lr: float = 1.0, gamma: float = 0.1):
        super().__init__(base_lr=base_lr)
        self.gamma = gamma
        self.step_size = step_size

    def multiplier(self, step: Any) -> Any:
        """The multiplier at a step."""
        size: Any = self.step_size
        if isinstance(size, list | tuple):
            step, places = _alike(step, size)
            falls = jnp.searchsorted(jnp.sort(places), step, side="right")
        elif isinstance(step, int | float):
            falls = step // size
        else:
            step, size = _alike(step, size)
            falls = step // size
        return self.gamma ** (falls.astype(float) if isinstance(falls, jax.Array) else falls)


def _alike(step: Any, other: Any) -> tuple[jax.Array, jax.Array]:
    """A step and other numbers as arrays of one dtype: of whole numbers, if they are."""
    step, other = jnp.asarray(step.value if isinstance(step, BaseVar) else step), jnp.asarray(other)
    is_whole = jnp.issubdtype(other.dtype, jnp.integer)
    dtype = step.dtype if is_whole or jnp.issubdtype(step.dtype, jnp.inexact) else float
    return step.astype(dtype), other.astype(dtype)
