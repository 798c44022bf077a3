# SPDX-License-Identifier: Apache-2.0
"""Specifications of axes: which axis of each leaf is mapped.

| Equinox | here | what differs |
| --- | --- | --- |
| the resolving of axes in filter_vmap and filter_pmap | ``resolved``, ``mapped_axes``, ``traced_spec`` | nothing |
"""

from __future__ import annotations

from typing import Any

import jax

from tether.compat.equinox._errors import SpecError
from tether.errors import describe
from tether.tree import if_array, is_array

first_of_arrays = if_array(0)  # the default


def is_none(leaf: Any) -> bool:
    """What counts as a leaf in a tree of axes."""
    return leaf is None


def resolved(name: str, tree: Any, spec: Any) -> Any:
    """A tree of axes (None, a bool or an int), a prefix of ``tree``; functions are asked about each leaf."""

    def resolve(axis: Any, part: Any) -> Any:
        if axis is None or isinstance(axis, bool | int):
            return axis
        if callable(axis):
            return jax.tree.map(axis, part)
        raise SpecError(
            f"{name}: a specification of axes holds something else.",
            got=describe(axis),
            expected="None, an int, a bool, or a function of one leaf that returns one",
            fix="0 for the first axis, None for what isn't mapped",
        )

    return jax.tree.map(resolve, spec, tree, is_leaf=is_none)


def mapped_axes(axes: Any) -> Any:
    """For each leaf the axis that is mapped, None for those that aren't."""
    return jax.tree.map(lambda axis: None if isinstance(axis, bool) else axis, axes, is_leaf=is_none)


def traced_spec(axes: Any) -> Any:
    """For each leaf whether it is traced: one with an axis is, and one without if it is an array."""
    return jax.tree.map(
        lambda axis: axis if isinstance(axis, bool) else (is_array if axis is None else True), axes, is_leaf=is_none
    )
