# SPDX-License-Identifier: Apache-2.0
"""Stacked modules: many modules of one structure as one, whose leaves have an axis of members in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tether._core import frame as _frame
from tether._core.variable import coerced
from tether._modules import Module, replace_values
from tether._modules.module import structure_of, variables_of
from tether._modules.views import restacked
from tether.errors import ArgumentError, StackedError, StructureError, describe


def stack(members: Sequence[Module]) -> Module:
    """One module of many: each leaf has an axis of members in front.

    Args:
        members: Modules of one structure (settings and modes, too) and of equal shapes.
    Returns:
        A stacked module (a copy), which ``tether.vmap`` maps over, one member a lane.
    Raises:
        StructureError: no members, or different structures or shapes.
    Example:
        >>> tether.stack([nn.Linear(2, 3), nn.Linear(2, 3)]).weight.shape
        (2, 3, 2)
    """
    if not members:
        raise StructureError(
            "stack: there are no members.",
            got="an empty list",
            expected="one module or more",
            fix="tether.stack([Layer(...) for _ in range(1)])",
        )
    first = members[0]
    for place, member in enumerate(members):
        _check_like(member, first, f"member {place}")
        _check_settings(member, first, f"member {place}")
    columns = zip(*(_frame.gather(variables_of(member)) for member in members), strict=True)
    values = dict(zip(variables_of(first), map(jnp.stack, columns), strict=True))
    return restacked(replace_values(first, values), 1)


def unstack(stacked: Module) -> list[Module]:
    """The members of a stacked module, as copies.

    Example:
        >>> len(tether.unstack(tether.stack([nn.Linear(2, 3), nn.Linear(2, 3)])))
        2
    """
    return [index(stacked, place) for place in range(size(stacked))]


def index(stacked: Module, place: Any) -> Module:
    """One member of a stacked module, as a copy.

    Args:
        stacked: The stacked module.
        place: Number of the member, in [-size, size).
    Raises:
        StackedError: the module isn't stacked.
        ArgumentError: there is no such member.
    """
    place = _checked(stacked, place)
    values = {variable: _frame.read(variable)[place] for variable in variables_of(stacked)}
    return restacked(replace_values(stacked, values), -1)


def set_index(stacked: Module, place: Any, member: Module) -> None:
    """Writes a member into a stacked module, in place."""
    place = _checked(stacked, place)
    one = index(stacked, 0)
    _check_like(member, one, "the member")
    new = []
    for into, value in zip(variables_of(stacked), _frame.gather(variables_of(member)), strict=True):
        new.append(coerced(into, _frame.read(into).at[place].set(value)))
    _frame.write_back(variables_of(stacked), new)


def size(stacked: Module) -> int:
    """The number of members of a stacked module."""
    if not stacked._tether.stacked:
        raise StackedError(
            "index: the module isn't stacked.",
            at=type(stacked).__name__,
            got="a single module",
            expected="a module of tether.stack, or one that tether.vmap made",
            fix=["tether.stack([first, second, ...])", "tether.vmap(lambda key: Layer(..., key=key))(keys)"],
        )
    values = _frame.gather(variables_of(stacked))
    return values[0].shape[0] if values else 0


def _checked(stacked: Module, place: Any) -> Any:
    count = size(stacked)
    if isinstance(place, jax.Array):
        return place
    if not hasattr(place, "__index__") or not -count <= place.__index__() < count:
        raise ArgumentError(
            "index: there is no such member.",
            got=describe(place),
            expected=f"a number in [{-count}, {count})",
            fix="tether.unstack(modules) gives all members",
        )
    return place


def _check_settings(member: Module, like: Module, name: str) -> None:
    if structure_of(member) != structure_of(like):
        raise StructureError(
            "stack: the modules differ in a setting, a mode or a tie.",
            at=name,
            got=repr(member),
            expected=repr(like),
            fix="one = tether.clone(first); tether.update(one, member)  # settings of the first, values of the member",
        )


def _check_like(member: Module, like: Module, name: str) -> None:
    mine, theirs = structure_of(like), structure_of(member)
    if mine.paths != theirs.paths or mine.kinds != theirs.kinds or type(member) is not type(like):
        raise StructureError(
            "stack: the modules differ in structure.",
            at=name,
            got=f"{type(member).__name__} of {len(theirs.paths)} Variables",
            expected=f"{type(like).__name__} of {len(mine.paths)} Variables",
            fix="members of one class, built by the same arguments",
        )
    for path, a, b in zip(mine.paths, variables_of(like), variables_of(member), strict=True):
        a, b = _frame.read(a), _frame.read(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            what = "stack: the modules differ in shape."
            fix = "members of one shape and dtype: build them by the same arguments"
            raise StructureError(what, at=f"{name}: {path}", got=describe(b), expected=describe(a), fix=fix)
