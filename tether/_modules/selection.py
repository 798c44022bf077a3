# SPDX-License-Identifier: Apache-2.0
"""One grammar that names Variables: ``select``.

select = kind | path glob | module class | Module or Variable | ``where(fn(path, variable))`` | list | ``~select``

A path names a cell or a module (all below it); ``*`` stands for any characters, ``?`` for one. A frozen
cell stops matching ``Param``.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax

from tether._core.structure import Structure, is_below, is_trainable, joined
from tether._core.variable import Cells, Not, Param, Variable
from tether._modules.module import Module, structure_of, survey, variables_of
from tether.errors import SelectionError, describe


class where:
    """Selects the Variables for which ``fn(path, variable)`` is true.

    Example:
        >>> biases = tether.where(lambda path, variable: path.endswith("bias"))
        >>> list(tether.variables(nn.Linear(2, 3), biases))
        ['bias']
    """

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[str, Variable], bool]):
        self.fn = fn

    def __invert__(self) -> Not:
        return Not(self)

    def __repr__(self) -> str:
        return f"where({getattr(self.fn, '__qualname__', self.fn)})"


def is_selection(value: Any) -> bool:
    """Whether ``value`` is of the grammar, rather than a predicate of leaves or a tree of bools."""
    if isinstance(value, type):
        return issubclass(value, Variable | Module)
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) > 0 and all(map(is_selection, value))
    if isinstance(value, types.UnionType):
        return all(map(is_selection, value.__args__))
    return isinstance(value, str | where | Not | Module | Variable)


def matches(select: Any, module: Module) -> tuple[Variable, ...]:
    """The Variables of ``module`` that ``select`` names, in the order of the leaves.

    Raises:
        SelectionError: a path that names nothing, or something that is no selection.
    """
    structure, variables = structure_of(module), variables_of(module)
    chosen = _chosen(select, structure, variables)
    return tuple(variable for index, variable in enumerate(variables) if index in chosen)


def _chosen(select: Any, structure: Structure, variables: tuple[Variable, ...]) -> set[int]:
    everything = range(len(variables))
    if isinstance(select, Not):
        return set(everything) - _chosen(select.select, structure, variables)
    if isinstance(select, list | tuple | set | frozenset | types.UnionType):
        parts = select.__args__ if isinstance(select, types.UnionType) else select
        return set().union(*(_chosen(part, structure, variables) for part in parts))
    if isinstance(select, str):
        return _named(select, structure)
    if isinstance(select, where):
        return {i for i in everything if select.fn(structure.paths[i], variables[i])}
    if isinstance(select, type) and issubclass(select, Variable):
        return {i for i in everything if _is_of_kind(structure, i, select)}
    if isinstance(select, type) and issubclass(select, Module):
        return {i for i in everything if any(issubclass(cls, select) for _, cls in structure.owners[i])}
    if isinstance(select, Module):
        select = variables_of(select)
    elif isinstance(select, Variable):
        select = (select,)
    else:
        raise _no_selection(select)
    wanted = set(map(id, select))
    return {i for i in everything if id(variables[i]) in wanted}


def _is_of_kind(structure: Structure, index: int, kind: type) -> bool:
    of_kind = issubclass(structure.kinds[index][0], kind)
    return of_kind and (is_trainable(structure, index) or not issubclass(kind, Param))


def _named(pattern: str, structure: Structure) -> set[int]:
    fits = compiled(pattern)
    modules = [path for path in structure.module_places if path and fits(path)]
    found = {i for path, i in structure.places.items() if fits(path) or any(is_below(path, m) for m in modules)}
    if not found and not modules:
        raise unknown_path(pattern, [*structure.places, *filter(None, structure.module_paths)])
    return found


def compiled(pattern: str) -> Callable[[str], Any]:
    """A path glob as a test of paths: ``*`` for any characters, ``?`` for one, brackets for themselves."""
    parts = {"*": ".*", "?": "."}
    return re.compile("".join(parts.get(c, re.escape(c)) for c in pattern)).fullmatch


def unknown_path(pattern: str, known: Iterable[str], what: str = "select: a path names nothing") -> SelectionError:
    """The error for a path that isn't there, with those that look like it."""
    known = list(known)
    close = difflib.get_close_matches(pattern, known, 3, 0.4) or known[:3]
    return SelectionError(
        f"{what}.",
        got=repr(pattern),
        expected=f"one of {len(known)} paths, such as {', '.join(map(repr, close)) or '(the module holds nothing)'}",
        fix="tether.summary(model) prints every path; '*' stands for any characters",
    )


def _no_selection(value: Any) -> SelectionError:
    return SelectionError(
        "select: this names no Variables.",
        got=describe(value),
        expected="a kind, a path, a module class, a Module or Variable, tether.where(fn), a list of those, or ~select",
        fix="tether.where(lambda path, variable: ...) for a rule of your own",
    )


def variables(of: Any, select: Any = Variable) -> dict[str, Variable]:
    """The distinct Variables of a module, by path; a tied one once, under its first path.

    Args:
        of: A Module, or a list, tuple or dict of Modules and Variables (paths then begin with the place).
        select: Which of them.
    Example:
        >>> list(tether.variables(nn.Linear(2, 3)))
        ['weight', 'bias']
    """
    if isinstance(of, Variable):
        return {of.label: of} if _names_loose(select, of) else {}
    if isinstance(of, Cells):
        return variables(jax.tree.unflatten(of.treedef, of.variables), select)
    if isinstance(of, Module):
        paths = structure_of(of).paths
        chosen = set(matches(select, of))
        return {path: v for path, v in zip(paths, variables_of(of), strict=True) if v in chosen}
    if not isinstance(of, list | tuple | dict):
        raise SelectionError("variables: no module.", got=describe(of), expected="a Module, or a container of Modules")
    found: dict[Variable, str] = {}
    for key, part in of.items() if isinstance(of, dict) else enumerate(of):
        for path, variable in variables(part, select).items():
            found.setdefault(variable, f"[{key!r}]" if part is variable else joined(f"[{key!r}]", path))
    return {path: variable for variable, path in found.items()}


def _names_loose(select: Any, variable: Variable) -> bool:
    """Whether a selection names a Variable of no module."""
    if isinstance(select, Not):
        return not _names_loose(select.select, variable)
    if isinstance(select, list | tuple | set | frozenset):
        return any(_names_loose(part, variable) for part in select)
    if isinstance(select, where):
        return bool(select.fn(variable.label, variable))
    return select is variable or (isinstance(select, type | types.UnionType) and isinstance(variable, select))


def cell(module: Module, path: str) -> Variable:
    """The Variable at a path of a module: to tie it, or to hand it to a selection.

    Raises:
        SelectionError: there is no cell at the path.
    Example:
        >>> tether.cell(nn.Linear(2, 3), "weight")
        Param(float32[3, 2], weight)
    """
    if not module._tether.sealed:
        part: Any = module
        for name in path.split("."):
            part = vars(part).get(name) if isinstance(part, Module) else None
        if isinstance(part, Variable):
            return part
        raise unknown_path(path, vars(module), "cell: there is no cell at this path")
    places = structure_of(module).places
    if path not in places:
        raise unknown_path(path, places, "cell: there is no cell at this path")
    return variables_of(module)[places[path]]


def modules(module: Module, cls: type | tuple[type, ...] = Module) -> dict[str, Module]:
    """The distinct modules in a module, by path, itself first under ``""``; those of a class with ``cls``.

    Example:
        >>> list(tether.modules(nn.Sequential([nn.Linear(2, 3), nn.Linear(3, 1)]), nn.Linear))
        ['[0]', '[1]']
    """
    return {path: part for path, part in survey(module).modules.values() if isinstance(part, cls)}


def names_module(select: Any, path: str, module: Module, what: str = "view") -> bool:
    """Whether a selection names a module, at one of its paths."""
    if isinstance(select, Not):
        return not names_module(select.select, path, module, what)
    if isinstance(select, list | tuple | set | frozenset):
        return any(names_module(part, path, module, what) for part in select)
    if isinstance(select, str):
        return bool(path and compiled(select)(path))
    if isinstance(select, type) and issubclass(select, Module):
        return isinstance(module, select)
    if isinstance(select, Module):  # or a view of it
        return module is select or (type(module) is type(select) and variables_of(module) == variables_of(select) != ())
    if is_selection(select):
        why = "this selects Variables, and here modules are meant."
    else:
        why = "this names no modules."
    raise SelectionError(f"{what}: {why}", got=describe(select), expected="a path, a module class, a Module, a list")
