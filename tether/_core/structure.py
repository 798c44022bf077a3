# SPDX-License-Identifier: Apache-2.0
"""Structures: what a Module is without its values.

A Structure is a recipe: classes, settings, kinds, names, ties, modes. It is the pytree auxiliary data of a
module and the key under which compilations are shared, so equal recipes are one object (interned weakly)
and the hash is computed once. ``build`` follows the recipe: unflatten, clone, views and bind all do.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tether._core import frame as _frame
from tether._core.variable import Cells, Param, Variable
from tether.errors import SealedError, StaticError


class Static:
    """Marks a setting as opaque: compared by its own equality if it is hashable, else by identity.

    Args:
        value: The setting; the attribute reads as this value.
    Example:
        >>> tether.Static({"any": "object"}).value
        {'any': 'object'}
    """

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class Reference:
    """A module that another one works on without owning it: seen by transformations, no leaf, not copied."""

    __slots__ = ("target",)

    if TYPE_CHECKING:  # an attribute that holds one reads as its target

        def __new__(cls, target: Any) -> Any: ...

    def __init__(self, target: Any):
        self.target = target

    def __deepcopy__(self, memo: dict[Any, Any]) -> Reference:
        new = Reference(memo.get(id(self.target)))
        memo.setdefault("references", []).append((id(self.target), new))  # its target may be copied after it
        return new


class FrozenDict(dict):
    """A dict in a sealed module: read like any dict, changed by nobody."""

    def _sealed(self, *_: Any, **__: Any) -> Any:
        raise SealedError(
            "a dict of a module can't be changed after construction.",
            fix=[
                "write all its cells: model.weights = {**model.weights, 'a': new}",
                "build the dict in __init__, or tether.replace(model, {path: new}) for a model with another part",
            ],
        )

    __setitem__ = __delitem__ = pop = popitem = clear = __ior__ = _sealed
    update: Any = _sealed
    setdefault: Any = _sealed

    def __reduce__(self) -> Any:
        return FrozenDict, (dict(self),)


jax.tree_util.register_pytree_with_keys(
    FrozenDict,
    lambda items: ([(jax.tree_util.DictKey(key), item) for key, item in items.items()], tuple(items)),
    lambda keys, items: FrozenDict(zip(keys, items, strict=True)),
    lambda items: (list(items.values()), tuple(items)),
)


class StaticKey:
    """A setting with an equality of its own: by value, functions by their content."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any, name: str = ""):
        self.value, self.key = value, static_key(value, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticKey) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


class _Same:
    """Stands for one object alone, without keeping it alive where that can be helped."""

    __slots__ = ("id", "look")

    def __init__(self, value: Any):
        self.id = id(value)
        try:
            self.look: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.look = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.id == other.id and self.look() is other.look() is not None

    def __hash__(self) -> int:
        return self.id


def static_key(value: Any, name: str = "", inside: tuple[int, ...] = ()) -> Any:
    """A hashable stand-in for a setting: equal exactly where programs traced with the settings are equal."""
    if value is None:
        return None
    if id(value) in inside:
        return ("cycle", inside.index(id(value)))
    again = functools.partial(static_key, name=name, inside=(*inside, id(value)))
    if isinstance(value, types.FunctionType):
        return _function_key(value, again)
    if isinstance(value, functools.partial):
        return ("partial", again(value.func), again(value.args), again(value.keywords))
    if isinstance(value, types.MethodType):
        return ("method", again(value.__func__), _Same(value.__self__))
    if isinstance(value, float):
        return (type(value), value.hex())
    if isinstance(value, tuple | list):
        return (type(value), *map(again, value))
    if isinstance(value, dict):
        return (type(value), frozenset((again(key), again(item)) for key, item in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(again(getattr(value, field.name)) for field in dataclasses.fields(value)))
    if isinstance(value, Static):
        return ("opaque", _hashed(value.value) or _Same(value.value))
    if isinstance(value, np.ndarray | jax.Array | Variable):
        return _Same(value)
    return _hashed(value) or _unhashable(value, name, nested=len(inside) > 0)


def _function_key(function: types.FunctionType, again: Any) -> Any:
    cells = tuple(cell.cell_contents if _is_filled(cell) else None for cell in function.__closure__ or ())
    defaults = (function.__defaults__, function.__kwdefaults__)
    return ("function", function.__code__, _Same(function.__globals__), again(defaults), again(cells))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that the enclosing function hasn't assigned yet
        return False


def _hashed(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return None
    by_identity = type(value).__hash__ is object.__hash__ and not isinstance(value, type)
    return _Same(value) if by_identity else (type(value), value)


def _unhashable(value: Any, name: str, nested: bool) -> Any:
    if nested:
        return _Same(value)  # captured by a function: the same object is the same program
    is_argument = name.startswith("argument ")
    mark = "pass tether.Static(value), and read its .value" if is_argument else "tether.Static(value) in its place"
    raise StaticError(
        "a setting can't be compared by value, so compilations could not be shared.",
        at=name or None,
        got=f"{type(value).__qualname__}, which is not hashable",
        expected="something hashable, or a dict or dataclass of that; arrays belong in a Param, State or Constant",
        fix=["give its class __eq__ and __hash__", f"{mark}: it is then compared by identity"],
    )


def joined(path: str, name: str) -> str:
    """The path of something below a path."""
    return path + ("." if path and name[:1] not in ("", "[") else "") + name


def is_below(path: str, module_path: str) -> bool:
    """Whether a path lies in the module of another path, or is it."""
    return not module_path or (path.startswith(module_path) and path[len(module_path) :][:1] in (".", "[", ""))


class Structure:
    """What a module is without its values; equal ones are one object.

    Attributes:
        spec: The recipe, nested tuples.
        paths: Path of each distinct Variable, in the order of the leaves.
        places: Every path of every Variable -> index; a tied one has several.
        frozen: Indices of the Variables that a view froze.
        owners: For each Variable, the paths and classes of the modules that it lies in, at all its places.
        module_paths: Path of each distinct module, outermost first.
        module_places: Every path of every module.
    """

    __slots__ = (
        *("__weakref__", "frozen", "hash", "kinds", "module_paths", "module_places"),
        *("owners", "paths", "places", "spec"),
    )

    _interned: weakref.WeakValueDictionary[Any, Structure] = weakref.WeakValueDictionary()

    def __init__(self, spec: Any, survey: Survey):
        self.spec, self.hash = spec, hash(spec)
        self.kinds = tuple((type(variable), variable.reduce) for variable in survey.variables)
        self.paths, self.places = tuple(survey.variables.values()), survey.places
        self.frozen, self.owners = frozenset(survey.frozen), tuple(survey.owners)
        self.module_paths = tuple(path for path, _ in survey.modules.values())
        self.module_places = tuple(survey.module_places)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Structure) and self.spec == other.spec and self.kinds == other.kinds)

    def __repr__(self) -> str:
        return f"Structure({self.spec[1].__qualname__}, {len(self.paths)} variables, #{self.hash & 0xFFFFFF:06x})"

    def variables(self, values: Sequence[Any], home: Any = None) -> list[Variable]:
        """New Variables of this Structure's kinds, with ``values`` as they are."""
        return [
            kind.make(value, reduce=reduce, label=path, home=home)
            for (kind, reduce), path, value in zip(self.kinds, self.paths, values, strict=True)
        ]

    def build(self, variables: Sequence[Variable], references: Sequence[Reference] = ()) -> Any:
        """A module by this recipe that holds ``variables``; without ``references`` it refers to nothing."""
        modules: list[Any] = []
        root = _build(self.spec, variables, modules, iter(references))
        for module, path in zip(modules, self.module_paths, strict=True):
            module._tether.label = path
        root._tether.structure, root._tether.variables = self, tuple(variables)
        return root


class Survey:
    """One walk over a module's objects: its recipe, and what lies where.

    Attributes:
        variables: Variable -> first path, in the order of the leaves.
        modules: id -> (path, module), outermost first; ``module_places`` has every path.
    """

    def __init__(self, module: Any):
        self.variables: dict[Variable, str] = {}
        self.modules: dict[int, tuple[str, Any]] = {}
        self.module_places: dict[str, Any] = {}
        self.references: list[Reference] = []
        self.places: dict[str, int] = {}
        self.frozen: set[int] = set()
        self.owners: list[tuple[tuple[str, type], ...]] = []
        self._inside: tuple[tuple[str, type], ...] = ()
        self.spec = self._module(module, "")

    def structure(self) -> Structure:
        new = Structure(self.spec, self)
        return Structure._interned.setdefault((self.spec, new.kinds), new)

    def _module(self, module: Any, path: str) -> Any:
        if id(module) in self.modules:
            self._alias(self.modules[id(module)][0], path)
            return ("shared", list(self.modules).index(id(module)))
        self.modules[id(module)] = (path, module)
        self.module_places[path] = module
        around, info = self._inside, module._tether
        self._inside = (*around, (path, type(module)))
        fields = []
        for name, stored in vars(module).items():
            is_named = name not in module._transparent_ or is_module(stored)
            place = joined(path, name) if is_named else path
            fields.append((name, self._node(stored, place)))
        for name in info.frozen:
            if joined(path, name) in self.places:  # a part may have been replaced since
                self.frozen.add(self.places[joined(path, name)])
        self._inside = around
        return ("module", type(module), info.flags(), tuple(fields))

    def _alias(self, first: str, path: str) -> None:
        """Names what lies in a module by the path of another place of it, too."""
        for place, index in self.places.items():
            if is_below(place, first):
                self._own(index)
        if first:
            inside = [place for place in self.places if is_below(place, first)]
            self.places.update({path + place[len(first) :]: self.places[place] for place in inside})
            parts = [place for place in self.module_places if is_below(place, first)]
            self.module_places.update({path + place[len(first) :]: self.module_places[place] for place in parts})

    def _node(self, stored: Any, path: str) -> Any:
        if isinstance(stored, Variable):
            return ("cell", self._variable(stored, path))
        if is_module(stored):
            return self._module(stored, path)
        if isinstance(stored, Cells):
            keys = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(stored.treedef, stored.variables))[0]
            return ("cells", stored.treedef, tuple(self._variable(v, path + jax.tree_util.keystr(k)) for k, v in keys))
        if isinstance(stored, tuple):
            return ("seq", type(stored), tuple(self._node(item, f"{path}[{i}]") for i, item in enumerate(stored)))
        if isinstance(stored, FrozenDict):
            items = tuple(self._node(item, f"{path}[{key!r}]") for key, item in stored.items())
            return ("map", tuple(stored), items)
        if isinstance(stored, Reference):
            self.references.append(stored)
            return ("reference",)
        if holds_cells_or_modules(stored):
            names = tuple(field.name for field in dataclasses.fields(stored))
            nodes = tuple(self._node(getattr(stored, name), f"{path}.{name}") for name in names)
            return ("record", type(stored), names, nodes)
        return ("static", StaticKey(stored, path))

    def _variable(self, variable: Variable, path: str) -> int:
        if variable not in self.variables:
            self.variables[variable] = path
            self.owners.append(())
            index = len(self.variables) - 1
        else:
            index = self.places[self.variables[variable]]
        self.places[path] = index
        self._own(index)
        return index

    def _own(self, index: int) -> None:
        self.owners[index] += tuple(owner for owner in self._inside if owner not in self.owners[index])


def is_module(value: Any) -> bool:
    """Whether the value is a Module; the class stands above this file, and the slot tells."""
    return hasattr(type(value), "_tether")


def holds_cells_or_modules(stored: Any) -> bool:
    """Whether a dataclass instance holds a Variable or Module, and so is a container rather than a setting."""
    if not dataclasses.is_dataclass(stored) or isinstance(stored, type) or is_module(stored):
        return False
    return any(contains(getattr(stored, field.name), modules=True) for field in dataclasses.fields(stored))


def contains(stored: Any, modules: bool) -> bool:
    """Whether there is a Variable (or with ``modules`` a Module) somewhere in a container."""
    if isinstance(stored, Variable | Cells | Reference):
        return True
    if is_module(stored):
        return modules
    if isinstance(stored, functools.partial):
        return contains((stored.func, stored.args, stored.keywords), modules)
    if isinstance(stored, dict):
        return any(contains(item, modules) for item in stored.values())
    if isinstance(stored, tuple | list | set | frozenset):
        return any(contains(item, modules) for item in stored)
    if dataclasses.is_dataclass(stored) and not isinstance(stored, type):
        return any(contains(getattr(stored, field.name), modules) for field in dataclasses.fields(stored))
    return False


def mapped(stored: Any, fun: Any) -> Any:
    """A container with ``fun`` applied to everything in it that is no container."""
    if isinstance(stored, tuple):
        items = [mapped(item, fun) for item in stored]
        return type(stored)(*items) if hasattr(stored, "_fields") else tuple(items)
    if isinstance(stored, FrozenDict):
        return FrozenDict({key: mapped(item, fun) for key, item in stored.items()})
    if holds_cells_or_modules(stored):
        return _record(stored, {f.name: mapped(getattr(stored, f.name), fun) for f in dataclasses.fields(stored)})
    return fun(stored)


def _record(like: Any, fields: dict[str, Any]) -> Any:
    new = copy.copy(like)
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    return new


def materialized(stored: Any) -> Any:
    """What an attribute reads as: arrays in place of cells."""
    if isinstance(stored, Variable):
        return _frame.read(stored)
    if isinstance(stored, Cells):
        return stored.read()
    if isinstance(stored, Static):
        return stored.value
    if isinstance(stored, Reference):
        return stored.target
    if isinstance(stored, tuple | dict) or dataclasses.is_dataclass(stored):
        return mapped(stored, lambda item: materialized(item) if contains(item, modules=False) else item)
    return stored


def _build(node: Any, variables: Sequence[Variable], modules: list[Any], references: Iterator[Reference]) -> Any:
    tag = node[0]
    if tag == "cell":
        return variables[node[1]]
    if tag == "static":
        return node[1].value
    if tag == "module":
        _, cls, flags, fields = node
        module = cls.__new__(cls)
        module._tether.restore(flags)
        modules.append(module)
        vars(module).update((name, _build(child, variables, modules, references)) for name, child in fields)
        return module
    if tag == "shared":
        return modules[node[1]]
    if tag == "cells":
        return Cells(node[1], [variables[index] for index in node[2]])
    if tag == "seq":
        items = [_build(child, variables, modules, references) for child in node[2]]
        return node[1](*items) if hasattr(node[1], "_fields") else tuple(items)
    if tag == "map":
        return FrozenDict(
            zip(node[1], (_build(child, variables, modules, references) for child in node[2]), strict=True)
        )
    if tag == "record":
        new = object.__new__(node[1])
        for name, child in zip(node[2], node[3], strict=True):
            object.__setattr__(new, name, _build(child, variables, modules, references))
        return new
    return next(references, None) or Reference(None)


def is_trainable(structure: Structure, index: int) -> bool:
    """Whether a Variable is a Param that no view froze."""
    return issubclass(structure.kinds[index][0], Param) and index not in structure.frozen
