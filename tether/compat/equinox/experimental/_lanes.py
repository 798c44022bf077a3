# SPDX-License-Identifier: Apache-2.0
"""Values inside ``jax.vmap`` and ``jax.grad`` as the place around them has them, and back.

| Equinox | here | what differs |
| --- | --- | --- |
| a batching rule that records axes | a ``custom_vmap``, whose rule sees all lanes | lanes are compared, not axes |
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether.compat.equinox._errors import NotDifferentiableError
from tether.errors import describe


@dataclasses.dataclass
class _Level:
    """One ``jax.vmap`` on the way out: its trace, and of each leaf the value in it if it differs from lane to lane."""

    trace: Any
    size: int
    inside: list[Any]


class Outward:
    """Leaves brought out of the traces that compute at once, to the one where state lies.

    Args:
        leaves: Arrays, as they are here.
        stop: Whether tangents are dropped; else they are an error.
    Attributes:
        leaves: The same, as the target has them: lanes in front.
        target: The trace that a state is read and written in: the innermost that records a program or runs a Frame.
    """

    def __init__(self, leaves: list[Any], stop: bool):
        self.leaves, self.levels = leaves, list[_Level]()
        frames = _frame.thread.frames
        ends = [frames[-1].home] if frames else []
        self.target = _trace.EVALUATING
        for trace in _trace.chain(_trace.current()):
            stage = _trace.stage(trace)
            if trace in ends or stage not in ("BatchTrace", "JVPTrace", "LinearizeTrace"):
                self.target = trace
                break
            with _trace.inside(trace):
                self._cross(trace, stage == "BatchTrace", stop)

    def _cross(self, trace: Any, is_vmap: bool, stop: bool) -> None:
        owned = [_trace.owner(leaf) is trace for leaf in self.leaves]
        if not is_vmap:
            self.leaves = [_stopped(leaf, stop) if own else leaf for leaf, own in zip(self.leaves, owned, strict=True)]
            return
        looks = [_whole(leaf) if own else None for leaf, own in zip(self.leaves, owned, strict=True)]
        mapped = [look is not None and look.mapped for look in looks]
        sizes = [look.size for look in looks if look is not None and look.mapped]
        if sizes:
            pairs = zip(self.leaves, mapped, strict=True)
            self.levels.append(_Level(trace, sizes[0], [leaf if of_lane else None for leaf, of_lane in pairs]))
        self.leaves = [leaf if look is None else look.value for leaf, look in zip(self.leaves, looks, strict=True)]

    def lanes(self) -> tuple[tuple[int | None, ...], ...]:
        """For each leaf the number of lanes of each vmap that maps a leaf, innermost first; None where not this one."""
        sizes = [[level.size if of_lane is not None else None for of_lane in level.inside] for level in self.levels]
        return tuple(zip(*sizes, strict=True)) if sizes else ((),) * len(self.leaves)

    def inward(self, values: list[Any]) -> list[Any]:
        """Values of the target's as each lane sees them."""
        for level in reversed(self.levels):
            with _trace.inside(level.trace):
                pairs = zip(values, level.inside, strict=True)
                values = [value if like is None else _own_row(value, like) for value, like in pairs]
        return values


@dataclasses.dataclass
class _Look:
    size: int
    mapped: bool
    value: Any


def _whole(leaf: Any) -> _Look:
    """What the vmap of this trace has of all lanes."""
    looks: list[_Look] = []
    look = custom_vmap(lambda x: x)

    @look.def_vmap
    def rule(size: int, mapped: list[bool], x: Any) -> Any:
        looks.append(_Look(size, mapped[0], x))
        return x, mapped[0]

    look(leaf)
    return looks[0]


@custom_vmap
def _own_row(rows: Any, like: Any) -> Any:
    """The row of this lane."""
    return jnp.zeros_like(like)


@_own_row.def_vmap
def _rows(size: int, mapped: list[bool], rows: Any, like: Any) -> Any:
    return rows, True


def _stopped(leaf: Any, stop: bool) -> Any:
    value = _trace.stopped(leaf)
    if not stop and jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise NotDifferentiableError(
            "set_state: a gradient would go through the state.",
            got=f"{describe(leaf)} with a tangent",
            expected="an array without one",
            fix="set_state(index, jax.lax.stop_gradient(state))",
        )
    return value
