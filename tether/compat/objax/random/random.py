# SPDX-License-Identifier: Apache-2.0
"""Generators of keys, and arrays of random numbers.

| Objax | here | what differs |
| --- | --- | --- |
| Generator(seed) | a RandomState, made when it is needed | in a trace too it is made outside, once |
| DEFAULT_GENERATOR | the same | Jit finds it in what its function calls |
| normal, randint, truncated_normal, uniform | ``jax.random`` of a new key | |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._core.variable import birthplace
from tether.compat.objax._names import class_name
from tether.compat.objax._objects import Module
from tether.compat.objax.variable import RandomState, VarCollection, cell_of


class Generator(Module):
    """Gives a new key at each call.

    Args:
        seed: A whole number.
    Example:
        >>> keys = objax.random.Generator(0)
        >>> bool((keys() == keys()).all())
        False
    """

    def __init__(self, seed: int = 0):
        self.initial_seed = seed
        self._key: RandomState | None = None
        self._birth = next(_frame.births)
        if birthplace() is not None:
            self._key = RandomState(seed)  # made in a trace, it ends with it

    @property
    def key(self) -> RandomState:
        """The state."""
        if self._key is None:
            with _trace.inside(_trace.EVALUATING):
                key = RandomState(self.initial_seed)
            cell_of(key).birth = self._birth  # to all Frames it was there before them
            self._key = key
        return self._key

    def seed(self, seed: int = 0) -> None:
        """Starts over from a seed."""
        self.initial_seed = seed
        if self._key is not None:
            self._key.seed(seed)

    def __call__(self) -> Any:
        """A new key, uint32[2]."""
        return self.key.split(1)[0]

    def vars(self, scope: str = "") -> VarCollection:
        """The state, by name."""
        self._key = self.key
        return super().vars(scope)

    def __repr__(self) -> str:
        return f"{class_name(self)}(seed={self.initial_seed})"

    def _tether_parts(self) -> dict[str, Any]:
        parts = {name: part for name, part in vars(self).items() if name != "_key"}
        return {**parts, "": self.key}


DEFAULT_GENERATOR = Generator(0)


def normal(
    shape: Sequence[int], *, mean: float = 0, stddev: float = 1, generator: Generator = DEFAULT_GENERATOR
) -> jax.Array:
    """Normal numbers, float[shape]."""
    return jax.random.normal(generator(), shape=tuple(shape)) * stddev + mean


def randint(shape: Sequence[int], low: int, high: int, generator: Generator = DEFAULT_GENERATOR) -> jax.Array:
    """Whole numbers in [low, high), int[shape]."""
    return jax.random.randint(generator(), shape=tuple(shape), minval=low, maxval=high)


def truncated_normal(
    shape: Sequence[int],
    *,
    stddev: float = 1,
    lower: float = -2,
    upper: float = 2,
    generator: Generator = DEFAULT_GENERATOR,
) -> jax.Array:
    """Normal numbers between ``lower`` and ``upper`` standard deviations, float[shape]."""
    return jax.random.truncated_normal(generator(), shape=tuple(shape), lower=lower, upper=upper) * stddev


def uniform(shape: Sequence[int], generator: Generator = DEFAULT_GENERATOR) -> jax.Array:
    """Numbers in [0, 1), float[shape]."""
    return jax.random.uniform(generator(), shape=tuple(shape))
