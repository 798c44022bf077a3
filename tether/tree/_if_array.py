# SPDX-License-Identifier: Apache-2.0
"""``if_array``: an axis for the arrays of a tree alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from tether.tree._predicates import is_array

__all__ = ["if_array"]


@dataclasses.dataclass(frozen=True)
class if_array:
    """Gives the axis for an array, None for anything else.

    Args:
        axis: The axis.
    Example:
        >>> jax.tree.map(tether.if_array(0), {"x": jnp.ones(2), "name": "a"})
        {'name': None, 'x': 0}
    """

    axis: int

    def __call__(self, x: Any) -> int | None:
        """The axis of one leaf."""
        return self.axis if is_array(x) else None
