# SPDX-License-Identifier: Apache-2.0
"""What several layers ask of their arguments and of their weights.

| Equinox | here | what differs |
| --- | --- | --- |
| kernel_size, stride, ... | read as in ``tether.nn``: tuples | a wrong one is an error when the layer is made |
| padding | pairs | numbers and pairs can stand side by side |
| a weight with ``__jax_array__`` | ``jnp.asarray`` of it, in every layer | |
| errors | the same classes | in words |
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax

from tether.compat.equinox._errors import SpecError
from tether.compat.equinox.module import Module
from tether.errors import ShapeError, describe
from tether.nn._inputs import name_of

Numbers = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]]


def pairs(name: str, padding: Any, axes: int) -> tuple[tuple[int, int], ...]:
    """Reads a padding as one pair for each space axis."""
    sides = padding if isinstance(padding, list | tuple) else (padding,) * axes
    both = tuple(tuple(side) if isinstance(side, list | tuple) else (side, side) for side in sides)
    if len(both) != axes or not all(len(pair) == 2 and all(isinstance(n, Integral) for n in pair) for pair in both):
        raise SpecError(
            f"{name}: padding is neither a number, nor a number or a pair for each of {axes} space axes.",
            got=f"padding={padding!r}",
            expected=f"padding=1, padding={(1,) * axes} or padding={((0, 1),) * axes}",
            fix="padding=kernel_size // 2, for what is 'SAME' elsewhere" if isinstance(padding, str) else None,
        )
    return both


def check_rank(layer: Module, x: Any, axes: int, error: type[ShapeError] = ShapeError) -> None:
    """Refuses what isn't one example: channels and the space axes."""
    if x.ndim != axes + 1:
        raise error(
            f"{name_of(layer)}: x isn't one example, which has {axes + 1} axes.",
            got=describe(x),
            expected=f"[{', '.join(['channels', *['_'] * axes])}]",
            fix="jax.vmap(layer)(x), for a batch" if x.ndim > axes + 1 else "x[None], for a single channel",
        )


def uniform(key: Any, shape: tuple[int, ...], limit: float) -> jax.Array:
    """Draws weights from -limit to limit."""
    return jax.random.uniform(key, shape, minval=-limit, maxval=limit)


def renamed_inference(name: str, inference: Any, deterministic: Any, stacklevel: int = 3) -> Any:
    """Gives what ``inference`` is, if it was said by its old name."""
    if deterministic is None:
        return inference
    warnings.warn(f"{name}: deterministic= is the old name of inference=.", UserWarning, stacklevel=stacklevel)
    return deterministic
