# SPDX-License-Identifier: Apache-2.0
"""clone and snapshot: copies with buffers of their own, ties kept."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from tether._core import Variable
from tether._core import frame as _frame
from tether._core.variable import Cells, own_copy
from tether._modules import Module
from tether._modules.module import structure_of, survey, variables_of

_T = TypeVar("_T")


def clone(tree: _T) -> _T:
    """A copy of a module, or of a tree of modules and Variables, with buffers of its own.

    What is tied in the tree is tied in the copy, across modules too: ``clone((model, optimizer, teacher))`` gives an
    optimizer of the new model. (``jax.tree.map`` over such a tuple copies each module by itself and can't keep this.)

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> tether.clone(layer).weight is layer.weight
        False
    """
    parts, treedef = jax.tree.flatten(tree, is_leaf=_is_stateful)
    roots = {id(part): part for part in parts if isinstance(part, Module)}
    variables = dict.fromkeys(variable for root in roots.values() for variable in variables_of(root))
    variables.update(dict.fromkeys(cell for part in parts for cell in _cells(part)))
    values = _copied(list(variables))
    new = {
        old: type(old).make(value, reduce=old.reduce, label=old.label)
        for old, value in zip(variables, values, strict=True)
    }
    modules = {id(old): _cloned(old, new) for old in roots.values()}
    _point_references(list(roots.values()), [modules[key] for key in roots])
    return jax.tree.unflatten(treedef, [_new_part(part, modules, new) for part in parts])


def snapshot(tree: _T) -> _T:
    """The values of a module now, as a module of its own: consistent, whatever other threads and later steps do.

    All values are gathered at once; their buffers are copied, so that a donated step can't delete them.

    Example:
        >>> counter = tether.State(0)
        >>> before = tether.snapshot(counter)
        >>> counter.value = 5
        >>> int(before.value)
        0
    """
    return clone(tree)


def _is_stateful(value: Any) -> bool:
    return isinstance(value, Module | Variable | Cells)


def _cells(part: Any) -> tuple[Variable, ...]:
    """The Variables of a part that belongs to no module."""
    return part.variables if isinstance(part, Cells) else (part,) if isinstance(part, Variable) else ()


def _copied(variables: list[Variable]) -> list[Any]:
    return _frame.with_values(lambda: _frame.gather(variables), lambda values: [own_copy(value) for value in values])


def _cloned(module: Module, new: dict[Variable, Variable]) -> Module:
    return structure_of(module).build([new[variable] for variable in variables_of(module)])


def _point_references(old: list[Module], new: list[Module]) -> None:
    """Points the references of the copies at the copies of what the originals refer to."""
    walks = [(survey(before), survey(after)) for before, after in zip(old, new, strict=True)]
    copies = {
        key: after
        for before_walk, after_walk in walks
        for key, (_, after) in zip(before_walk.modules, after_walk.modules.values(), strict=True)
    }
    for before_walk, after_walk in walks:
        for before, after in zip(before_walk.references, after_walk.references, strict=True):
            after.target = copies.get(id(before.target))


def _new_part(part: Any, modules: dict[int, Module], variables: dict[Variable, Variable]) -> Any:
    if isinstance(part, Module):
        return modules[id(part)]
    if isinstance(part, Cells):
        return Cells(part.treedef, [variables[cell] for cell in part.variables])
    return variables[part] if isinstance(part, Variable) else part
