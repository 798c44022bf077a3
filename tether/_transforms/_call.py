# SPDX-License-Identifier: Apache-2.0
"""The arguments of a compiled call: which leaves are dynamic, which are modules, which are static."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tether._core import frame as _frame
from tether._core.structure import FrozenDict, static_key
from tether._core.variable import Rng, Variable
from tether._modules.capture import watched_parts
from tether._modules.module import Module, structure_of
from tether._modules.selection import compiled, matches, unknown_path, variables
from tether._transforms._arguments import name_at
from tether._transforms._discovery import Reach, is_stateful
from tether.errors import SelectionError
from tether.random._streams import in_lanes, streams

_BUILTIN_NODES = (list, tuple, dict, FrozenDict, type(None))


def reach_of(fun: Callable[..., Any], args: Any, kwargs: Any) -> Reach:
    """Everything stateful that a call can reach: arguments first, then the function, then the random streams."""
    reach = Reach()
    for place, arg in enumerate(args):
        reach.add_argument(arg, name_at(fun, place))
    for name, value in kwargs.items():
        reach.add_argument(value, name)
    reach.add(fun, "")
    for part in watched_parts():
        reach.add(part, "")
    for stream in streams(v for v in reach.variables() if isinstance(v, Rng)):
        reach.loose.setdefault(stream, stream.label)
    return reach


def own_streams(fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Before a staging: in lanes, makes the private streams that may be drawn from inside, out here."""
    if in_lanes():
        reach_of(fun, args, kwargs)


def arrays_and_others(reach: Reach) -> tuple[list[Variable], dict[Variable, Any]]:
    """The Variables that hold arrays, and those that hold something else (None, a spec) with what it is."""
    values = {variable: _frame.peek(variable) for variable in reach.variables()}
    lifted = [variable for variable, value in values.items() if isinstance(value, jax.Array)]
    return lifted, {variable: value for variable, value in values.items() if not isinstance(value, jax.Array)}


def identity(part: Any) -> Any:
    """What stands for a module or Variable among the arguments of one function, from call to call."""
    if isinstance(part, Module):
        info = part._tether
        return id(info.token or info)
    return id(part)


def likeness(part: Any) -> Any:
    """What stands for a module or Variable in the key of a compilation: equal ones share it."""
    return structure_of(part) if isinstance(part, Module) else type(part)


def split(value: Any, mark: Callable[[Any], Any], leaves: list[Any]) -> Any:
    """Puts the dynamic leaves of one argument into ``leaves``; returns a key of all the rest."""
    if isinstance(value, jax.Array):
        leaves.append(value)
        return value.shape, value.dtype, getattr(value, "weak_type", False)  # a typed key has none
    if is_stateful(value) or isinstance(value, np.ndarray | np.generic | bool | int | float | complex | str):
        return _part_key(value, mark, leaves, plain=True)
    parts, treedef = jax.tree.flatten(value, is_leaf=is_stateful)
    return treedef, *[_part_key(part, mark, leaves, plain) for part, plain in _with_place(parts, treedef)]


def _part_key(part: Any, mark: Callable[[Any], Any], leaves: list[Any], plain: bool) -> Any:
    if is_stateful(part):
        return mark(part)
    if not is_dynamic(part, plain):
        return static_key(part)
    leaves.append(part)
    is_number = isinstance(part, int | float | complex) and not isinstance(part, np.generic)
    if isinstance(part, jax.Array):
        return part.shape, part.dtype, getattr(part, "weak_type", False)
    return np.shape(part), jax.dtypes.canonicalize_dtype(np.result_type(part)), is_number


def is_dynamic(part: Any, plain: bool) -> bool:
    """Arrays are dynamic, and numbers in builtin containers; a bool is a switch, and static."""
    if isinstance(part, jax.Array | np.ndarray | np.generic):
        return True
    return plain and isinstance(part, int | float | complex) and not isinstance(part, bool)


def joined(value: Any, leaves: Iterator[Any]) -> Any:
    """The argument again, with other dynamic leaves."""
    parts, treedef = jax.tree.flatten(value, is_leaf=is_stateful)
    new = [
        next(leaves) if not is_stateful(part) and is_dynamic(part, plain) else part
        for part, plain in _with_place(parts, treedef)
    ]
    return jax.tree.unflatten(treedef, new)


def _with_place(parts: list[Any], treedef: Any) -> Iterator[tuple[Any, bool]]:
    if any(isinstance(part, int | float | complex) for part in parts):
        return zip(parts, _in_builtins(treedef), strict=True)
    return zip(parts, [False] * len(parts), strict=True)


@functools.lru_cache(maxsize=1024)
def _in_builtins(treedef: Any) -> tuple[bool, ...]:
    """For each leaf, whether all nodes around it are lists, tuples, dicts or namedtuples."""
    node = treedef.node_data()
    if node is None:
        return (True,) * treedef.num_leaves
    builtin = node[0] in _BUILTIN_NODES or hasattr(node[0], "_fields")
    inner = [flag for child in treedef.children() for flag in _in_builtins(child)]
    return tuple(builtin and flag for flag in inner)


def resolved(kind: str, choices: dict[Any, Any], reach: Reach) -> dict[Variable, Any]:
    """For each Variable in reach that a selection names, what the first such selection says."""
    found: dict[Variable, Any] = {}
    for select, choice in choices.items():
        for variable in _named(kind, select, reach):
            found.setdefault(variable, choice)
    return found


def _named(kind: str, select: Any, reach: Reach) -> set[Variable]:
    fits = compiled(select) if isinstance(select, str) else None
    found = {v for v, name in reach.loose.items() if (fits(name) if fits else variables(v, select))}
    unknown = unknown_path(str(select), reach.variables().values(), f"{kind}: a path names nothing") if fits else None
    for _, module in reach.modules.values():
        try:
            found.update(matches(select, module))
        except SelectionError as error:
            unknown = error
    if unknown is not None and not found:
        raise unknown
    return found
