# SPDX-License-Identifier: Apache-2.0
"""What a scan runs over."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from tether._core import frame as _frame
from tether._core.variable import Rng, Variable
from tether._modules.module import Module, each_module, variables_of
from tether._modules.views import restacked
from tether._transforms._call import is_stateful
from tether.errors import ArgumentError, ShapeError, StackedError, describe
from tether.random._streams import own_stream


class Slices:
    """Arrays and the Variables of stacked modules, row by row.

    Attributes:
        leaves, rows: The arrays, and the values of the Variables.
        given: Variable -> its first row.
        first: ``xs`` as the body sees it, with the first row of each array.
        length: Number of turns.
    """

    def __init__(self, kind: str, xs: Any, length: Any):
        self._kind = kind
        self.given: dict[Variable, Any] = {}
        self.leaves: list[Any] = []
        self._members: list[tuple[Module, Module]] = []  # the view of one member, and the stacked module
        self._lengths: dict[str, int] = {} if length is None else {"length": self._checked(length)}
        pairs, self._treedef = jax.tree_util.tree_flatten_with_path(xs, is_leaf=is_stateful)
        self._parts = [self._part(part, "xs" + jax.tree_util.keystr(path)) for path, part in pairs]
        self.length = self._common_length()
        self.rows = _frame.gather(list(self.given))
        first = _first_rows([*self.rows, *self.leaves])
        self.given = dict(zip(self.given, first, strict=False))
        self.first = self._tree(first[len(self.rows) :])

    def _checked(self, length: Any) -> int:
        if isinstance(length, jax.core.Tracer) or not hasattr(length, "__index__") or length.__index__() < 0:
            raise ArgumentError(
                f"{self._kind}: length is no number of turns.",
                got=describe(length),
                expected="a whole number, at least 0, known when the loop is traced",
                fix="tether.fori_loop(0, n, body, init), if the number of turns is an array that is computed",
            )
        return length.__index__()

    def _part(self, part: Any, name: str) -> Any:
        if isinstance(part, Module):
            return self._member(part, name)
        if isinstance(part, jax.Array | np.ndarray) and part.ndim > 0:
            self._lengths[name] = part.shape[0]
            self.leaves.append(part)
            return len(self.leaves) - 1
        raise ArgumentError(
            f"{self._kind}: this has no first axis to run over.",
            at=name,
            got=describe(part),
            expected="an array with at least one axis, or a stacked module",
            fix="close over what is the same in every turn; length= says how many there are",
        )

    def _member(self, module: Module, name: str) -> Module:
        if not module._tether.stacked:
            raise StackedError(
                f"{self._kind}: a module in xs isn't stacked, so there is nothing to run over.",
                at=f"{name}  ({type(module).__name__})",
                got="a single module",
                fix=["close over it, or carry it: every turn then shares it", "tether.stack([first, second, ...])"],
            )
        streams = [own_stream(variable) for variable in variables_of(module) if isinstance(variable, Rng)]
        for variable in [*variables_of(module), *streams]:
            value = _frame.peek(variable)
            if value is not None:
                self.given[variable] = value
                self._lengths[f"{name}.{variable.label}"] = value.shape[0]
        member = restacked(module, -1)
        self._members.append((member, module))
        return member

    def whole(self, module: Module) -> Module:
        """The stacked module of which this is a member, or the part of it; any other module itself."""
        for member, stacked in self._members:
            for (_, part), (_, original) in zip(each_module(member), each_module(stacked), strict=True):
                if part is module:
                    return original
        return module

    def _common_length(self) -> int:
        lengths = set(self._lengths.values())
        if len(lengths) == 1:
            return lengths.pop()
        if not lengths:
            raise ArgumentError(
                f"{self._kind}: nothing says how many turns there are.",
                got="no length, and xs without an array or stacked module",
                fix="length=n, or xs",
            )
        one_each = {length: name for name, length in reversed(self._lengths.items())}
        raise ShapeError(
            f"{self._kind}: what it runs over differs in length.",
            got=", ".join(f"{name}: {length}" for length, name in one_each.items()),
            expected="one length",
            fix="slice what is longer, or close over what every turn shares",
        )

    def _tree(self, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(self._treedef, [leaves[p] if isinstance(p, int) else p for p in self._parts])

    def turn(self, index: int) -> tuple[Any, dict[Variable, Any]]:
        """The argument of one turn, and the rows of the Variables."""
        rows = {variable: value[index] for variable, value in zip(self.given, self.rows, strict=True)}
        return self._tree([jnp.asarray(leaf)[index] for leaf in self.leaves]), rows


def _first_rows(values: list[Any]) -> list[Any]:
    """Shape and dtype of the first row of each."""
    if any(value.shape[0] == 0 for value in values):
        return [jax.ShapeDtypeStruct(value.shape[1:], value.dtype) for value in values]
    return jax.eval_shape(lambda: [value[0] for value in values])
