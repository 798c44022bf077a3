# SPDX-License-Identifier: Apache-2.0
"""What a loop hands from one turn to the next: arrays, modules that stay the same object, and modules as values."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether._core import frame as _frame
from tether._core.variable import Variable
from tether._modules.module import Module, structure_of, variables_of
from tether._transforms import _arguments
from tether._transforms._body import Body
from tether._transforms._call import is_stateful, reach_of
from tether.errors import ArgumentError, DtypeError, ShapeError, StructureError, TetherError, describe

_AS_RETURNED = "begin the loop with what the body returns: its shape, and its dtype (.astype)"


class Carry:
    """The carry of one loop.

    A module in it that the body returns again is one that the loop shares: its Variables are carried if they are
    written. A body that returns another module of the same structure (gradients, averages) carries a value, and the
    module that the loop began with is left alone.

    Args:
        kind: Name of the loop.
        init: The carry at the entry.

    Attributes:
        tree: The carry at the entry, weak types promoted as the body asks for.
    """

    def __init__(self, kind: str, init: Any):
        self._kind = kind
        pairs, self._treedef = jax.tree_util.tree_flatten_with_path(init, is_leaf=is_stateful)
        self._names = ["carry" + jax.tree_util.keystr(path) for path, _ in pairs]
        self._parts = [self._entry(part, name) for (_, part), name in zip(pairs, self._names, strict=True)]
        self._promotions: dict[int, Any] = {}
        self._values: dict[int, list[Variable]] = {}  # place of a module that is a value -> its Variables

    def _entry(self, part: Any, name: str) -> Any:
        if isinstance(part, Module):
            return part
        try:
            return _as_array(part)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"{self._kind}: this can't be carried.",
                at=name,
                got=describe(part),
                expected="an array, a number, a module, or a container of those",
                fix="close over it: the body sees every Variable and setting from outside",
            ) from error

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self._treedef, self._parts)

    def traced(self, trace: Callable[[], Body], fun: Callable[..., Any]) -> Body:
        """The body, traced once more for an entry that had to be promoted."""
        body = self._trial(trace)
        while self._promotions:  # once for each entry: its type is strong then
            for place, dtype in self._promotions.items():
                self._parts[place] = jax.lax.convert_element_type(self._parts[place], dtype)
            body = self._trial(trace)
        self._check_values(body, fun)
        return body

    def _trial(self, trace: Callable[[], Body]) -> Body:
        self._promotions, self._values = {}, {}
        return trace()

    def checked(self, out: Any) -> Any:
        """What the body hands on, inside its trace: of the structure, shapes and dtypes of the entry, or an error."""
        parts, treedef = jax.tree.flatten(out, is_leaf=is_stateful)
        if treedef != self._treedef:
            raise StructureError(
                f"{self._kind}: the body changes the structure of the carry.",
                at="carry",
                got=_shown(treedef),
                expected=_shown(self._treedef),
                fix="return the carry with the structure that the loop begins with",
            )
        return jax.tree.unflatten(treedef, [self._part(place, part) for place, part in enumerate(parts)])

    def _part(self, place: int, after: Any) -> Any:
        before = self._parts[place]
        if not isinstance(before, Module):
            return self._array(place, before, after)
        if not isinstance(after, Module) or structure_of(after) != structure_of(before):
            same = isinstance(after, Module) and type(after) is type(before)
            got = f"a {type(after).__name__} of another structure, mode or setting" if same else _named(after)
            raise self._other_module(place, got)
        if variables_of(after) == variables_of(before):
            return before  # the module itself, or a view of it
        for new, old in zip(variables_of(after), variables_of(before), strict=True):
            if not _is_like(new, old):
                got, expected = describe(_frame.peek(new)), describe(_frame.peek(old))
                raise self._other_module(place, f"one with {old.label}: {got} in place of {expected}")
        self._values[place] = list(variables_of(before))
        return jax.tree.unflatten(*jax.tree.flatten(after)[::-1])  # a copy: it may be another module from outside

    def _other_module(self, place: int, got: str) -> StructureError:
        return StructureError(
            f"{self._kind}: the body returns another thing than the module that is carried.",
            at=f"{self._names[place]}  ({type(self._parts[place]).__name__})",
            got=got,
            expected="the module itself, or one of its structure, shapes and dtypes",
            fix="return the module that the body was given: what is written to it is carried",
        )

    def _array(self, place: int, before: Any, after: Any) -> Any:
        at = self._names[place]
        try:
            new = _as_array(after)
        except (TypeError, ValueError) as error:
            fix = "return an array or a number; close over what isn't one"
            raise self._wrong(DtypeError, "the kind", at, after, before, fix) from error
        if new.shape != before.shape:
            raise self._wrong(ShapeError, "the shape", at, new, before)
        if new.dtype != before.dtype:
            if not getattr(before, "weak_type", False) or jnp.result_type(before, new.dtype) != new.dtype:
                raise self._wrong(DtypeError, "the dtype", at, new, before)
            self._promotions[place] = new.dtype
        return new

    def _wrong(
        self, error: type[TetherError], what: str, at: str, got: Any, expected: Any, fix: str = _AS_RETURNED
    ) -> TetherError:
        return error(
            f"{self._kind}: the body changes {what} of the carry.",
            at=at,
            got=describe(got),
            expected=describe(expected),
            fix=fix,
        )

    def _check_values(self, body: Body, fun: Callable[..., Any]) -> None:
        if not self._values:
            return
        reached = reach_of(fun, (), {}).variables()
        places = collections.Counter(v for part in self._parts if isinstance(part, Module) for v in variables_of(part))
        for place, variable in ((place, v) for place, variables in self._values.items() for v in variables):
            if variable in body.written:
                how, fix = "writes to it", "return the module itself: tether.update(module, new) writes all of it"
            elif variable in reached or variable in body.given:
                how, fix = "comes by it in another way, too", "begin with a copy of it: tether.clone(module)"
            elif places[variable] > 1:
                how, fix = "has it at another place of the carry, too", "begin with a copy of it: tether.clone(module)"
            else:
                continue
            raise StructureError(
                f"{self._kind}: a module is carried as a value, and used as the object that it was at the entry.",
                at=f"{self._names[place]}: {variable.describe()}",
                got=f"the body, {_arguments.name_of(fun)}, returns a new module in its place, and {how}",
                expected="one of the two",
                fix=fix,
            )

    def leaves(self) -> list[Any]:
        """The arrays at the entry, in the order in which the body returns them."""
        found: list[Any] = []
        for place, part in enumerate(self._parts):
            if place in self._values:
                found += [value for value in _frame.gather(self._values[place]) if value is not None]
            elif not isinstance(part, Module):
                found.append(part)
        return found

    def split(self, leaves: list[Any]) -> tuple[list[Any], dict[Variable, Any]]:
        """Such arrays as leaves of the body's argument, and as values of Variables."""
        arrays, values, rest = [], {}, iter(leaves)
        for place, part in enumerate(self._parts):
            if place in self._values:
                held = [variable for variable in self._values[place] if _frame.peek(variable) is not None]
                values.update((variable, next(rest)) for variable in held)
            elif not isinstance(part, Module):
                arrays.append(next(rest))
        return arrays, values


def _as_array(value: Any) -> jax.Array:
    if isinstance(value, str | bytes):
        raise TypeError
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _shown(treedef: Any) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")


def _named(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Module) else describe(value)


def _is_like(new: Variable, old: Variable) -> bool:
    """Whether one can take the other's place in a carry."""
    a, b = _frame.peek(new), _frame.peek(old)
    if a is None or b is None:
        return a is b
    return (a.shape, a.dtype) == (b.shape, b.dtype)
