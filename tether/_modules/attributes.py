# SPDX-License-Identifier: Apache-2.0
"""Attributes of modules: declared in the constructor, then fixed; those that hold cells read and write the arrays."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import numpy as np

from tether._core import Reference, Static, Variable
from tether._core import frame as _frame
from tether._core import variable as _variable
from tether._core.structure import (
    FrozenDict,
    contains,
    holds_cells_or_modules,
    is_module,
    mapped,
    materialized,
    static_key,
)
from tether._core.variable import Cells
from tether.errors import DeclarationError, SealedError, describe

MISSING: Any = object()


class CellAttribute:
    """The class-level descriptor of an attribute that holds a cell in some instance."""

    def __init__(self, name: str, default: Any):
        self.name, self.default = name, default

    def __get__(self, module: Any, owner: type) -> Any:
        stored = self.default if module is None else vars(module).get(self.name, self.default)
        if stored is not MISSING:
            return stored if module is None else materialized(stored)
        if module is None:
            return self
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}", name=self.name, obj=module)

    def __set__(self, module: Any, value: Any) -> None:
        set_attribute(module, self.name, value)  # not the class's own __setattr__: that of a frozen dataclass refuses


def set_attribute(module: Any, name: str, value: Any) -> None:
    """An assignment to an attribute: a write to its cells, a declaration in a constructor, else an error."""
    stored = vars(module).get(name)
    if contains(stored, modules=False) and not isinstance(value, Variable | Cells):
        _write(module, name, value)
    elif hasattr(inspect.getattr_static(type(module), name, None), "__set__") and not _is_cell_name(type(module), name):
        object.__setattr__(module, name, value)
    elif module._tether.sealed:
        raise sealed_error(module, name, value)
    else:
        declare(module, name, value)


def seal(module: Any) -> None:
    """Ends the construction of a module: what it holds stays."""
    fields = vars(module)
    for name, stored in fields.items():
        fields[name] = _sealed_value(stored, f"{type(module).__name__}.{name}")
    install_attributes(module)
    module._tether.sealed = True


def _sealed_value(stored: Any, name: str) -> Any:
    """A container as it stays: lists as tuples, dicts read-only, nothing undeclared inside."""
    if isinstance(stored, list):
        stored = tuple(stored)
    if isinstance(stored, tuple):
        items = [_sealed_value(item, f"{name}[{i}]") for i, item in enumerate(stored)]
        return type(stored)(*items) if hasattr(stored, "_fields") else tuple(items)
    if isinstance(stored, dict):
        keys = sorted(
            stored, key=lambda key: (type(key).__qualname__, key if isinstance(key, str | int) else repr(key))
        )
        return FrozenDict({key: _sealed_value(stored[key], f"{name}[{key!r}]") for key in keys})
    _check_declared(stored, name)
    if holds_cells_or_modules(stored):
        return mapped(stored, lambda item: _sealed_value(item, name))
    return stored


def _check_declared(value: Any, name: str) -> None:
    known = Variable | Cells | Static | Reference
    if is_module(value) or isinstance(value, (known, dict, list, tuple, type)):
        return  # what is inside a container is looked at when the module is sealed
    _check_nothing_hidden(value, name)
    is_ours = lambda part: is_module(part) or isinstance(part, Variable | Cells)
    arrays = [x for x in jax.tree.leaves(value, is_leaf=is_ours) if isinstance(x, jax.Array | np.ndarray | np.generic)]
    if arrays:
        attribute = name.rpartition(".")[2]
        raise DeclarationError(
            "an array in a module must say what it is.",
            at=name,
            got=describe(value),
            expected="Param (trained), State (written by forward passes) or Constant",
            fix=[f"self.{attribute} = tether.{kind}(...)" for kind in ("Param", "State", "Constant")],
        )


def _check_nothing_hidden(value: Any, name: str) -> None:
    """No module in a place that is no container: its Variables would be found by nobody."""
    if isinstance(value, set | frozenset | functools.partial):
        hides = contains(value, modules=True)
    elif inspect.isroutine(value):  # a bound method, or what jax.vmap made of a module
        hides = contains([getattr(value, "__self__", None), getattr(value, "__wrapped__", None)], modules=True)
    elif dataclasses.is_dataclass(value):
        hides = False
    else:
        hides = any(contains(part, modules=True) for part in list(getattr(value, "__dict__", {}).values()))
    if hides:
        raise DeclarationError(
            "a module or Variable is hidden in something that is no container.",
            at=name,
            got=describe(value),
            expected="an attribute, or a list, tuple, dict or dataclass of modules and Variables",
            fix="hold it in a list or dict" if isinstance(value, set | frozenset) else _holder_fixes(value),
        )


def _holder_fixes(value: Any) -> list[str]:
    if inspect.isroutine(value):
        return ["assign the module itself, and call its method, or transform it, where it is used"]
    return ["assign the module itself", f"derive {type(value).__name__} from tether.Module, or make it a dataclass"]


def declare(module: Any, name: str, value: Any) -> None:
    """An assignment in a constructor."""
    contract = type(module)._contract_
    if contract is None or name not in contract.fields:  # whose converter comes before the module is sealed
        _check_declared(value, f"{type(module).__name__}.{name}")
    if isinstance(value, Variable | Cells | Static | Reference):
        _install(type(module), name)
    vars(module)[name] = value


def _write(module: Any, name: str, value: Any) -> None:
    """An assignment to an attribute that holds cells: the arrays in them are written, all or none."""
    _check_not_tied_by_value(name, value)
    stored = vars(module)[name]
    if isinstance(stored, Variable):
        _variable.assign(stored, value)
        return
    if isinstance(stored, Cells):
        stored.assign(value)
        return
    cells, treedef = jax.tree.flatten(_plain(stored))
    new, new_treedef = jax.tree.flatten(_plain(value))
    if new_treedef != treedef or any(map(is_module, new)):
        raise sealed_error(module, name, value)
    pairs = [(cell, item) for cell, item in zip(cells, new, strict=True) if isinstance(cell, Variable)]
    settings = [(old, item) for old, item in zip(cells, new, strict=True) if not isinstance(old, Variable)]
    if any(old is not item and static_key(old) != static_key(item) for old, item in settings):
        raise sealed_error(module, name, value)
    values = [_variable.coerced(cell, item) for cell, item in pairs]
    _frame.write_back([cell for cell, _ in pairs], values)


def _plain(stored: Any) -> Any:
    if isinstance(stored, tuple | list):
        return [_plain(item) for item in stored]
    if isinstance(stored, dict):
        return {key: _plain(item) for key, item in stored.items()}
    if dataclasses.is_dataclass(stored) and not (isinstance(stored, type) or is_module(stored)):
        return {field.name: _plain(getattr(stored, field.name)) for field in dataclasses.fields(stored)}
    return stored


def _check_not_tied_by_value(name: str, value: Any) -> None:
    """In a constructor, assigning another cell's very array is meant as a tie and would be none."""
    if not isinstance(value, jax.Array):
        return
    for part in _frame.thread.constructing or ():
        for source, stored in vars(part).items():
            if isinstance(stored, Variable) and stored._value is value:
                raise DeclarationError(
                    "a cell can't be tied to another by value.",
                    at=name,
                    got=f"the array of {type(part).__name__}.{source}",
                    expected="the cell itself, for one weight in two places; or a copy, for two weights",
                    fix=[
                        f"self.<part>.{name} = tether.cell(self.<part>, {source!r})",
                        f"self.<part>.{name} = jnp.array(...)",
                    ],
                )


def install_attributes(module: Any) -> None:
    """Makes the attributes of a module that hold cells read as arrays."""
    for name, stored in vars(module).items():
        if isinstance(stored, Static) or contains(stored, modules=False):
            _install(type(module), name)


def _is_cell_name(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), CellAttribute)


def _install(cls: type, name: str) -> None:
    if not _is_cell_name(cls, name):
        default = inspect.getattr_static(cls, name, MISSING)
        type.__setattr__(cls, name, CellAttribute(name, default))


def sealed_error(module: Any, name: str, value: Any) -> SealedError:
    """The error for a change of structure after construction; without ``value`` for a deletion."""
    path = f"{module._tether.label}.{name}".lstrip(".")
    if value is MISSING:
        what, fix = "deleted", ["build the module without it"]
    elif name in vars(module):
        what, stored = "replaced", vars(module)[name]
        place = (
            path
            if (is_module(stored) or isinstance(stored, Variable))
            else f"{path}[0]"
            if isinstance(stored, tuple)
            else path
        )
        fix = [f"tether.replace(model, {{{place!r}: new}}) makes a model with that part replaced, sharing the rest"]
        if not contains(stored, modules=True):
            fix = [f"tether.view(model, {name}=...) makes a view with another setting"]
    else:
        what, fix = "added", [f"assign self.{name} in __init__ (a State, if forward passes write it)"]
    return SealedError(
        f"an attribute of a finished module can't be {what}: its structure is fixed.",
        at=f"{path}  (of {type(module).__name__})",
        got=None if value is MISSING else describe(value),
        expected="a write to an attribute that holds a cell",
        fix=fix,
    )


def short(stored: Any) -> str:
    """What an attribute holds, for a repr."""
    if isinstance(stored, tuple):
        return f"({', '.join(map(short, stored))})"
    if isinstance(stored, Cells):
        return repr(jax.tree.unflatten(stored.treedef, stored.variables))
    if isinstance(stored, Static):
        return short(stored.value)
    return getattr(stored, "__qualname__", None) or repr(stored)
