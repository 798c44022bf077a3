# SPDX-License-Identifier: Apache-2.0
"""bind and update: other values for named cells, in a view or in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from tether._core import Variable
from tether._core import frame as _frame
from tether._core.structure import Structure
from tether._core.variable import birthplace, coerced, strong
from tether._modules import Module
from tether._modules.module import structure_of, survey, variables_of
from tether._modules.selection import unknown_path
from tether.errors import ShapeError, StructureError, describe


class Report(NamedTuple):
    """What ``update`` did: the paths that it wrote, those without a value, and those it had no cell for."""

    updated: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def bind(model: Module, values: Any) -> Module:
    """A view of a model in which named cells have other values; all other cells are shared.

    Values may be traced, and of another float dtype. A write to a bound cell stays in the view; one to a shared cell
    (BatchNorm's statistics, say) lands in the model.

    Args:
        model: The module.
        values: A module-shaped tree, with None for cells to keep, or ``{path: array}``.
    Raises:
        SelectionError: a path that names no cell.
        ShapeError: a value of another shape.
        DtypeError: a value that the cell's kind of dtype can't hold.
        StructureError: a module of another structure, or two values for one tied cell.
    Example:
        >>> layer = nn.Linear(2, 3)
        >>> half = tether.bind(layer, {"weight": layer.weight.astype(jnp.bfloat16)})
        >>> half.weight.dtype.name, layer.weight.dtype.name
        ('bfloat16', 'float32')
    """
    given = by_variable(model, values)
    given = {variable: _bound(variable, value) for variable, value in given.items()}
    home = birthplace()
    new = [
        type(v).make(given[v], reduce=v.reduce, label=path, home=home) if v in given else v
        for path, v in zip(structure_of(model).paths, variables_of(model), strict=True)
    ]
    return structure_of(model).build(new, survey(model).references)


def update(target: Module, values: Any, *, strict: bool = True) -> Report:
    """Writes values into the cells of a module: all of them, or none if one of them doesn't fit.

    Args:
        target: The module.
        values: A module-shaped tree, with None for cells to keep, or ``{path: array}``.
        strict: Whether a path that names no cell, or a value that doesn't fit, raises; else it is reported.
    Returns:
        The paths that were updated, missing and unexpected.
    Example:
        >>> layer = nn.Linear(2, 3)
        >>> tether.update(layer, {"bias": jnp.ones(3)}).missing
        ('weight',)
    """
    unexpected: list[str] = []
    given = by_variable(target, values, None if strict else unexpected)
    new: dict[Variable, Any] = {}
    for variable, value in given.items():
        try:
            new[variable] = coerced(variable, value)
        except (TypeError, ValueError):
            if strict:
                raise
            unexpected.append(_path(target, variable))
    _frame.write_back(list(new), list(new.values()))
    names = dict(zip(variables_of(target), structure_of(target).paths, strict=True))
    missing = tuple(path for variable, path in names.items() if variable not in new)
    return Report(tuple(names[variable] for variable in new), missing, tuple(unexpected))


def by_variable(model: Module, values: Any, unknown: list[str] | None = None) -> dict[Variable, Any]:
    """Values, module-shaped or by path, as Variable -> value; None is left out.

    Paths that name no cell go into ``unknown``, or raise if that is None.
    """
    structure, variables = structure_of(model), variables_of(model)
    if isinstance(values, Module):
        if structure_of(values).paths != structure.paths:
            raise _other_structure(structure.paths, structure_of(values).paths)
        pairs = zip(variables, map(_frame.read, variables_of(values)), strict=True)
        return {variable: value for variable, value in pairs if value is not None}
    if not isinstance(values, Mapping):
        raise StructureError(
            "values for a module are of no known form.",
            got=describe(values),
            expected="a module, or {path: array}",
            fix="tether.variables(model) has the paths",
        )
    given: dict[Variable, Any] = {}
    for path, value in values.items():
        if path in structure.places:
            variable = variables[structure.places[path]]
            if given.get(variable, value) is not value:
                raise _two_values(structure, path)
            given[variable] = value
        elif unknown is None:
            raise unknown_path(path, structure.places, "bind: there is no cell at this path")
        else:
            unknown.append(path)
    return {variable: value for variable, value in given.items() if value is not None}


def _two_values(structure: Structure, path: str) -> StructureError:
    tied = [place for place, index in structure.places.items() if index == structure.places[path]]
    return StructureError(
        "one cell is given two values.",
        at=" and ".join(tied[:3]) + ", which are tied",
        fix=f"give one value, under {tied[0]!r}",
    )


def _path(model: Module, variable: Variable) -> str:
    return structure_of(model).paths[variables_of(model).index(variable)]


def _bound(variable: Variable, value: Any) -> Any:
    """The value as an array, of the cell's dtype unless both are floats."""
    old = _frame.peek(variable)
    if not (hasattr(old, "shape") and hasattr(old, "dtype")):
        return value
    value = value if hasattr(value, "shape") and hasattr(value, "dtype") else jnp.asarray(value, old.dtype)
    if value.shape != old.shape:
        raise ShapeError(
            "bind: a value has another shape than the cell.",
            at=variable.describe(),
            got=describe(value),
            expected=describe(old),
            fix="give a value of the cell's shape, or build a model of the shape that you need",
        )
    if any(
        jnp.issubdtype(old.dtype, k) and jnp.issubdtype(value.dtype, k) for k in (jnp.floating, jnp.complexfloating)
    ):
        return strong(jnp.asarray(value))
    return coerced(variable, value)


def _other_structure(expected: tuple[str, ...], got: tuple[str, ...]) -> StructureError:
    missing, extra = [p for p in expected if p not in got], [p for p in got if p not in expected]
    return StructureError(
        "a module of another structure was given as values.",
        at=", ".join((missing + extra)[:3]),
        got=f"{len(got)} cells" + (f", without {missing[:3]}" if missing else ""),
        expected=f"{len(expected)} cells" + (f", without {extra[:3]}" if extra else ""),
        fix="give {path: array} for some of the cells",
    )
