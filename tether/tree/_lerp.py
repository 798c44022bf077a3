# SPDX-License-Identifier: Apache-2.0
"""lerp: between two modules."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tether._core import Param
from tether._core import frame as _frame
from tether._modules import Module, matches, replace_values
from tether._modules.module import structure_of, variables_of
from tether.errors import StructureError, describe


def lerp(a: Module, b: Module, t: Any, select: Any = Param) -> Module:
    """The module between two: ``a + t * (b - a)`` for the selected float cells, the values of ``a`` for the rest.

    Args:
        a, b: Modules of one structure.
        t: Where between them; 0 gives a, 1 gives b.
        select: Which cells.
    Raises:
        StructureError: modules of different structure or shapes.
    Returns:
        A copy (a value); ``tether.update(ema, tether.lerp(ema, model, 0.001))`` is a step of an average.
    Example:
        >>> a, b = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> bool(tether.lerp(a, b, 1.0).weight == b.weight)
        True
    """
    if structure_of(a).paths != structure_of(b).paths:
        raise StructureError(
            "lerp: the modules differ in structure.",
            got=f"{type(b).__name__} of {len(structure_of(b).paths)} Variables",
            expected=f"{type(a).__name__} of {len(structure_of(a).paths)} Variables",
            fix="two states of one model: tether.snapshot(model) makes another",
        )
    others = dict(zip(variables_of(a), variables_of(b), strict=True))
    values = {}
    for variable in matches(select, a):
        x, y = _frame.read(variable), _frame.read(others[variable])
        if x.shape != y.shape:
            raise StructureError(
                "lerp: the modules differ in shape.",
                at=variable.describe(),
                got=describe(y),
                expected=describe(x),
                fix="two states of one model: tether.snapshot(model) makes another",
            )
        if jnp.issubdtype(x.dtype, jnp.inexact):
            values[variable] = _between(x, y.astype(x.dtype), jnp.asarray(t, x.dtype))
    return replace_values(a, values)


def _between(x: Any, y: Any, t: Any) -> Any:
    """Exact at both ends, and where x is y."""
    return jnp.where(jnp.real(t) < 0.5, x + t * (y - x), y - (1 - t) * (y - x))
