# SPDX-License-Identifier: Apache-2.0
"""The lift: what every transformation does around the one JAX transformation that it calls.

A transformation checks its arguments, lifts (makes a Frame, says which Variables have other values
inside), calls JAX on a function that runs the user's one in the Frame and returns flat results, and
writes back what the Frame saw written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core.structure import is_module
from tether._core.variable import Variable


def _itself(module: Any) -> Any:
    return module


@jax.tree_util.register_static
class Kept:
    """In an output: a module that existed before, and comes back as the same object."""

    def __init__(self, target: Any):
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and (self.target is other.target or self._place() == other._place() is not None)

    def __hash__(self) -> int:
        return hash(self._place() or id(self.target))

    def _place(self) -> Any:
        return self.target if isinstance(self.target, tuple) else None


class Packed:
    """A result as flat leaves, which JAX carries, and how to make the result of them again."""

    __slots__ = ("count", "has_kept", "leaves", "treedef")

    def __init__(self, out: Any, birth: int, refer: Callable[[Any], Any] = _itself):
        self.has_kept = False

        def keep(part: Any) -> Any:
            if is_module(part) and part._tether.birth < birth and (place := refer(part)) is not None:
                self.has_kept = True
                return Kept(place)
            return part

        self.leaves, self.treedef = jax.tree.flatten(jax.tree.map(keep, out, is_leaf=is_module))
        self.count = len(self.leaves)

    def take(self) -> list[Any]:
        """The leaves, given up: a traced value must not outlive its trace."""
        leaves, self.leaves = self.leaves, []
        return leaves

    def pair(self) -> tuple[Packed, Packed]:
        """A result that is a pair, as two results."""
        halves = [object.__new__(Packed) for _ in range(2)]
        for half, treedef in zip(halves, self.treedef.children(), strict=True):
            half.leaves, half.treedef, half.count, half.has_kept = [], treedef, treedef.num_leaves, self.has_kept
        return halves[0], halves[1]


def unpack(packed: Packed, leaves: Any, resolve: Callable[[Any], Any] = _itself, born: Any = None) -> Any:
    """The result, of leaves that left the transformation; ``born`` is applied to the modules made inside."""
    out = jax.tree.unflatten(packed.treedef, leaves)
    if not packed.has_kept and born is None:
        return out

    def part(value: Any) -> Any:
        if isinstance(value, Kept):
            return resolve(value.target)
        return born(value) if born is not None and is_module(value) else value

    return jax.tree.map(part, out, is_leaf=lambda value: isinstance(value, Kept) or is_module(value))


class Lifted:
    """One run of a function under a Frame inside one JAX transformation.

    ``inside`` is what JAX calls, once; it returns flat leaves and the written values. ``outside`` takes
    what JAX returned, writes back, and gives the user's result.
    """

    def __init__(self, kind: str, fun: Callable[..., Any]):
        self.frame, self.fun = _frame.Frame(kind), fun
        self.refer: Callable[[Any], Any] = _itself
        self.born: Callable[[Any], Any] | None = None
        self.written: list[Variable] = []
        self.packed: Any = None

    def inside(self, values: dict[Variable, Any], *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
        run = lambda: Packed(self.fun(*args, **kwargs), self.frame.birth, self.refer)
        self.packed, self.written, new = self.frame.run(values, run)
        return self.packed.take(), new

    def outside(self, leaves: list[Any], new: list[Any]) -> Any:
        _frame.write_back(self.written, new)
        return unpack(self.packed, leaves, born=self.born)
