# SPDX-License-Identifier: Apache-2.0
"""Which modules and Variables a function can reach, found before it is traced.

The walk follows arguments, closure cells, globals that the code and its nested code name, defaults,
partials, ``__self__``, ``__wrapped__``, containers and plain objects. What it misses (a Variable behind a
property, say) is noticed when it is read. Each step on the way to something found leaves a guard: where it
was found, and what was there. On later calls the guards are compared by identity, nothing is walked.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core.structure import joined
from tether._core.variable import Cells, Variable
from tether._modules.module import Module, structure_of, survey, variables_of

_LIBRARIES = frozenset({"builtins", "jax", "tether"})
_LEAVES = (bool, int, float, complex, str, bytes, type(None))
_MOST_ITEMS = 10_000  # of one container: beyond, a read that was missed finds the rest


class Guard:
    """That a place still holds what was found there; neither is kept alive for it."""

    __slots__ = ("expected", "look")

    def __init__(self, look: Callable[[], Any], expected: tuple[Any, ...]):
        self.look, self.expected = look, [_weakly(part) for part in expected]

    def holds(self) -> bool:
        found = self.look()
        expected = self.expected
        return len(found) == len(expected) and all(a is b() for a, b in zip(found, expected, strict=True))


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class Searched:
    """An object of Tether's that is looked into as a user's own are."""

    def _tether_parts(self) -> dict[str, Any]:
        """What to look into, by name; with an empty name, what never becomes another."""
        return vars(self)


class Reach:
    """What was found: modules and single Variables, each with the name of the way to it, and the guards."""

    def __init__(self) -> None:
        self.modules: dict[int, tuple[str, Module]] = {}
        self.loose: dict[Variable, str] = {}
        self.guards: list[Guard] = []
        self.objects: list[Any] = []  # plain ones on the way
        self._seen: dict[int, Any] = {}
        self._in_argument = False

    def variables(self) -> dict[Variable, str]:
        """Every Variable that was found, with its path from the function."""
        found: dict[Variable, str] = {}
        for name, module in self.modules.values():
            for path, variable in zip(structure_of(module).paths, variables_of(module), strict=True):
                found.setdefault(variable, joined(name, path))
        for variable, name in self.loose.items():
            found.setdefault(variable, name)
        return found

    def places(self) -> Iterator[tuple[Any, Module]]:
        """Every module in reach, under a place that is the same for modules of equal structure."""
        for root, (_, module) in enumerate(list(self.modules.values())):
            for index, (_, part) in enumerate(survey(module).modules.values()):
                yield (root, index), part

    def add_argument(self, value: Any, name: str) -> None:
        """Walks one argument of a call; what a call's key compares already needs no guard."""
        self._in_argument = True
        for path, part in jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_searched)[0]:
            self.add(part, name + jax.tree_util.keystr(path))
        self._in_argument = False

    def add(self, value: Any, name: str) -> bool:
        """Walks ``value``; whether something was found in it."""
        if isinstance(value, _LEAVES):
            return False
        if id(value) in self._seen:
            return id(value) in self.modules or not isinstance(value, Module)
        self._seen[id(value)] = value
        if isinstance(value, Module):
            return self._module(value, name)
        if isinstance(value, Variable | Cells):
            for variable in [value] if isinstance(value, Variable) else value.variables:
                if not _frame.is_over(variable._value):  # else an error, should it be read
                    self.loose.setdefault(variable, name)
            return True
        if isinstance(value, list | tuple | set | frozenset | dict):
            return self._container(value, name)
        if isinstance(value, Searched) or not callable(value):
            return self._object(value, name)
        return self._callable(value, name)

    def _module(self, module: Module, name: str) -> bool:
        self.modules[id(module)] = (name, module)
        walk = survey(module)
        for reference in walk.references:
            if reference.target is not None:
                self.add(reference.target, joined(name, "target"))
        for cls in {type(part) for _, part in walk.modules.values()}:
            self._class(cls, name)
        return True

    def _class(self, cls: type, name: str) -> None:
        """The globals that the methods and properties of a user's class name."""
        for base in cls.__mro__:
            if _is_library(base.__module__) or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            for method in vars(base).values():
                self.add(getattr(method, "fget", None) or getattr(method, "__wrapped__", method), name)

    def _container(self, items: Any, name: str) -> bool:
        pairs = list(items.items() if isinstance(items, dict) else enumerate(items))[:_MOST_ITEMS]
        found = [self.add(item, f"{name}[{key!r}]") for key, item in pairs]
        if any(found) and not isinstance(items, tuple | frozenset):
            self._guard(lambda: tuple(items.values() if isinstance(items, dict) else items))
        return any(found)

    def _guard(self, look: Callable[[], tuple[Any, ...]]) -> None:
        if not self._in_argument:
            self.guards.append(Guard(look, look()))

    def _callable(self, value: Any, name: str) -> bool:
        if isinstance(value, functools.partial):
            parts = [(value.func, name), (value.args, name), (value.keywords, name)]
        elif isinstance(value, types.MethodType):
            parts = [(value.__self__, "self"), (value.__func__, name)]
        elif isinstance(value, types.FunctionType) and not _is_library(value.__module__):
            return self._function(value, name)
        elif hasattr(value, "__wrapped__"):
            parts = [(getattr(value, "__wrapped__", None), name)]
        elif isinstance(value, types.FunctionType):
            return self._closure(value)
        elif isinstance(value, type):
            return False
        else:
            return self._object(value, name)
        found = [self.add(part, part_name) for part, part_name in parts]
        return any(found)

    def _function(self, function: types.FunctionType, name: str) -> bool:
        found = [self.add(getattr(function, "__wrapped__", None), name)]
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        found += [self.add(d, p) for p, d in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)]
        found += [self.add(value, key) for key, value in (function.__kwdefaults__ or {}).items()]
        found.append(self._closure(function))
        names = set(_names(function.__code__))
        for key in sorted(names & function.__globals__.keys()):
            found.append(self._global(function.__globals__, key, names))
        return any(found)

    def _closure(self, function: types.FunctionType) -> bool:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found = [self._guarded(functools.partial(_contents, cell), key) for key, cell in cells]
        return any(found)

    def _global(self, scope: dict[str, Any], key: str, names: set[str]) -> bool:
        value = scope[key]
        if not isinstance(value, types.ModuleType):
            return self._guarded(functools.partial(scope.get, key), key)
        if _is_library(value.__name__):
            return False
        inner = vars(value)
        shared = sorted(names & inner.keys())
        found = [self._guarded(functools.partial(inner.get, name), f"{key}.{name}") for name in shared]
        return any(found)

    def _object(self, value: Any, name: str) -> bool:
        fields = value._tether_parts() if isinstance(value, Searched) else getattr(value, "__dict__", None)
        is_plain = isinstance(value, types.SimpleNamespace | Searched) or not _is_library(type(value).__module__)
        if not isinstance(fields, dict) or not is_plain:
            return False
        self._class(type(value), name)
        found = {key: self.add(part, joined(name, key)) for key, part in list(fields.items())}
        names, owner = [key for key, is_found in found.items() if is_found and key], _weakly(value)
        if names:
            if type(value).__weakrefoffset__:
                self.objects.append(value)
            look = lambda: tuple(getattr(owner(), "__dict__", {}).get(key) for key in names)
            self.guards.append(Guard(look, look()))
        return any(found.values())

    def _guarded(self, look: Callable[[], Any], name: str) -> bool:
        found = self.add(look(), name)
        if found:
            self._guard(lambda: (look(),))
        return found


def is_stateful(value: Any) -> bool:
    """Whether a flatten of arguments stops here: at a Module or Variable."""
    return isinstance(value, Module | Variable | Cells)


def _is_searched(value: Any) -> bool:
    return is_stateful(value) or isinstance(value, Searched)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_library(module_name: str | None) -> bool:
    """Whether a module is of the standard library or installed: no place for a user's global models."""
    return _is_library_package((module_name or "").partition(".")[0])


@functools.lru_cache(maxsize=4096)
def _is_library_package(name: str) -> bool:
    if name in _LIBRARIES or name in sys.stdlib_module_names - {"__main__"}:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
