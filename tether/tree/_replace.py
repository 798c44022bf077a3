# SPDX-License-Identifier: Apache-2.0
"""replace and map_modules: a model with other parts, sharing all the rest."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from tether._core import Variable
from tether._core.structure import FrozenDict, holds_cells_or_modules, is_below, joined
from tether._core.variable import Cells
from tether._modules import Module, modules
from tether._modules.module import adopt, structure_of, survey
from tether._modules.selection import unknown_path
from tether.errors import StructureError, describe


def replace(model: Module, parts: dict[str, Any]) -> Module:
    """A model with other parts at some paths, sharing all other Variables with the one it is made of.

    Args:
        model: The module; it isn't changed.
        parts: ``{path: part}``: a Module for a module, a Variable for a cell. A Variable of the model itself ties
            the two cells; a new one unties a tied cell at this path alone.
    Raises:
        SelectionError: a path that names nothing.
        StructureError: a part that is neither Module nor Variable, or not what stands at the path.
    Example:
        >>> model = nn.Sequential([nn.Linear(2, 3), nn.Linear(3, 1)])
        >>> tether.replace(model, {"[1]": nn.Linear(3, 5)})(jnp.ones(2)).shape
        (5,)
    """
    for path, part in parts.items():
        if not isinstance(part, Module | Variable):
            raise StructureError(
                "replace: a part is a Module or a Variable.",
                at=path,
                got=describe(part),
                fix=[
                    f"tether.bind(model, {{{path!r}: array}}) for another value",
                    "tether.view(model, path, setting=...)",
                ],
            )
    places = {path: _first_place(model, path) for path in parts}
    walk = _Walk({places[path]: part for path, part in parts.items()})
    new = walk.module(model, "")
    unused = [path for path, place in places.items() if place not in walk.used]
    if unused:
        known = [*structure_of(model).places, *(path for path, _ in survey(model).modules.values() if path)]
        raise unknown_path(unused[0], known, "replace: there is nothing at this path")
    adopt(new)
    return new


def map_modules(fn: Callable[[Any], Module], model: Module, select: type | tuple[type, ...]) -> Module:
    """A model with ``fn`` applied to each module of a class, sharing all the rest.

    A module inside another one that ``fn`` is applied to is left to ``fn``. One that stands in several places is mapped
    once, and its result stands in all of them.

    Args:
        fn: Takes a module, returns the one in its place.
        model: The module; it isn't changed.
        select: A module class, or several.
    Example:
        >>> model = nn.Sequential([nn.Linear(2, 2), nn.Dropout(0.5)])
        >>> len(tether.map_modules(lambda layer: nn.Identity(), model, nn.Dropout))
        2
    """
    found = modules(model, select)
    outer = {p: part for p, part in found.items() if not any(p != q and is_below(p, q) for q in found)}
    if "" in outer:
        return fn(model)
    new = {id(part): fn(part) for part in outer.values()}
    places = {path: new[id(part)] for path, part in survey(model).module_places.items() if id(part) in new}
    places = {p: part for p, part in places.items() if not any(p != q and is_below(p, q) for q in places)}
    return replace(model, places) if places else model


def _first_place(model: Module, path: str) -> str:
    """The path that begins with the first place of the module around, where that stands in several."""
    walk = survey(model)
    around = max(
        (place for place in walk.module_places if place != path and is_below(path, place)), key=len, default=""
    )
    first = walk.modules[id(walk.module_places[around])][0]
    return (first + path[len(around) :]).lstrip("." if not first else "")


def _fitting(part: Module | Variable, stored: Module | Variable, path: str) -> Module | Variable:
    if isinstance(part, Module) == isinstance(stored, Module):
        return part
    raise StructureError(
        "replace: a Module takes the place of a Module, a Variable that of a Variable.",
        at=path,
        got=describe(part),
        expected="a Module" if isinstance(stored, Module) else "a Variable",
        fix="build a model that has the other part in its __init__",
    )


class _Walk:
    """One walk that makes new module objects around the same Variables."""

    def __init__(self, parts: dict[str, Any]):
        self.parts, self.used = parts, set[str]()
        self._made: dict[int, Module] = {}

    def module(self, module: Module, path: str) -> Module:
        if id(module) not in self._made:
            new = self._made[id(module)] = type(module).__new__(type(module))
            new._tether.restore(module._tether.flags())
            for name, stored in vars(module).items():
                is_named = name not in module._transparent_ or isinstance(stored, Module)
                place = joined(path, name) if is_named else path
                vars(new)[name] = self.node(stored, place)
        return self._made[id(module)]

    def node(self, stored: Any, path: str) -> Any:
        if path in self.parts and isinstance(stored, Module | Variable):
            self.used.add(path)
            return _fitting(self.parts[path], stored, path)
        if isinstance(stored, Module):
            return self.module(stored, path)
        if isinstance(stored, tuple):
            items = [self.node(item, f"{path}[{index}]") for index, item in enumerate(stored)]
            return type(stored)(*items) if hasattr(stored, "_fields") else tuple(items)
        if isinstance(stored, FrozenDict):
            return FrozenDict({key: self.node(item, f"{path}[{key!r}]") for key, item in stored.items()})
        if isinstance(stored, Cells):
            keys = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(stored.treedef, stored.variables))[0]
            return Cells(stored.treedef, [self.node(v, path + jax.tree_util.keystr(key)) for key, v in keys])
        if holds_cells_or_modules(stored):
            new = copy.copy(stored)
            for field in dataclasses.fields(stored):
                value = self.node(getattr(stored, field.name), f"{path}.{field.name}")
                object.__setattr__(new, field.name, value)
            return new
        return stored
