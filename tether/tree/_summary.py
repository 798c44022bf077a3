# SPDX-License-Identifier: Apache-2.0
"""``summary``: the modules of a model, what each holds, and how much of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from tether._core import Param, Variable
from tether._core.frame import peek
from tether._modules import Module
from tether._modules.module import structure_of, variables_of
from tether._modules.selection import matches
from tether.errors import ArgumentError, describe
from tether.tree._places import Places
from tether.tree._table import Column, Table, binary, count

__all__ = ["Row", "Summary", "summary"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One module of a summary. What lies in modules below it counts only where ``depth`` leaves them no row.

    Attributes:
        path: Path of the module, "" for the model itself.
        cls: Name of its class.
        cells: Name and array of each of its own cells; a tied one that another row counts says which.
        trainable: Number of elements in Params that gradients and optimizers take.
        frozen: Number of elements in frozen Params.
        state: Number of elements in all other cells: statistics, caches, keys, constants.
        bytes: Size of all of these.
        below: Number of cells of modules below that this row counts.
        same_as: For a module that lies in several places: the path that it is counted at.
    """

    path: str
    cls: str
    cells: tuple[str, ...] = ()
    trainable: int = 0
    frozen: int = 0
    state: int = 0
    bytes: int = 0
    below: int = 0
    same_as: str = ""

    @property
    def parameters(self) -> int:
        """Number of elements in Params, frozen or not."""
        return self.trainable + self.frozen


class Summary:
    """The rows of a summary and their sums; prints as a table.

    Attributes:
        rows: One ``Row`` per module, in the order of the model.
        trainable, frozen, state, parameters, bytes: Sums over the rows; every cell is in one of them.
    """

    def __init__(self, rows: Iterable[Row]):
        self.rows = tuple(rows)
        self.trainable = sum(row.trainable for row in self.rows)
        self.frozen = sum(row.frozen for row in self.rows)
        self.state = sum(row.state for row in self.rows)
        self.bytes = sum(row.bytes for row in self.rows)

    @property
    def parameters(self) -> int:
        """Number of elements in Params, frozen or not."""
        return self.trainable + self.frozen

    def __str__(self) -> str:
        return self._table().text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table().html()

    def __rich__(self) -> Any:
        return self._table().rich()

    def _table(self) -> Table:
        names = [Column("path"), Column("class"), Column("cells")]
        names += [Column(name, numeric=True) for name in ("trainable", "frozen", "state", "bytes")]
        title = f"{self.rows[0].cls}: " if self.rows and not self.rows[0].path else ""
        title += f"{self.parameters:,} parameters, {binary(self.bytes)}"
        rows = [[row.path or "(itself)", row.cls, "\n".join(_lines(row)), *_numbers(row)] for row in self.rows]
        return Table(title, names, rows, ["total", "", "", *_numbers(self)])


def summary(module: Module, *, depth: int | None = None, select: Any = Variable) -> Summary:
    """A table of the modules in a model: path, class, own cells, parameters, bytes.

    Every cell is counted once: a tied one, or one of a shared module, at its first path. Looks at shapes alone,
    so it works on what ``tether.eval_shape`` returns and inside transformations.

    Args:
        module: The model.
        depth: Deepest level of modules with a row of its own, the model itself being 0; a module at that level
            counts what lies below it. None for all levels.
        select: Which cells to show and count; modules without any of those are left out.
    Raises:
        ArgumentError: ``module`` is no Module, or ``depth`` no whole number from 0.
        SelectionError: ``select`` names nothing.
    Example:
        >>> overview = tether.summary(nn.Linear(2, 3))
        >>> overview.parameters, overview.bytes
        (9, 36)
        >>> print(overview)  # doctest: +SKIP
    """
    _check(module, depth)
    chosen, trainable = set(matches(select, module)), set(matches(Param, module))
    places, structure, cells = Places.of(module), structure_of(module), variables_of(module)
    rows = {path: _empty_row(path, places) for path in places.modules if _has_row(path, places, depth)}
    for place, index in structure.places.items():
        owner, first = places.owner(place), structure.paths[index]
        if cells[index] not in chosen or not places.is_first(owner):
            continue
        row = rows[_at_depth(owner, places, depth)]
        if owner == row.path:
            row = dataclasses.replace(row, cells=(*row.cells, _line(place, owner, cells[index], first)))
        if place == first:
            row = _counted(row, cells[index], cells[index] in trainable, is_below=owner != row.path)
        rows[row.path] = row
    everything = len(chosen) == len(cells)
    counted_in = {path: _at_depth(row.same_as or path, places, depth) for path, row in rows.items()}
    return Summary(row for path, row in rows.items() if everything or _holds(rows[counted_in[path]]))


def _check(module: Any, depth: Any) -> None:
    if not isinstance(module, Module):
        raise ArgumentError(
            "summary: this is no module.",
            got=describe(module),
            expected="a tether.Module",
            fix="for a module in a container: tether.summary(container[...])",
        )
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise ArgumentError(
            "summary: depth is no level of modules.",
            got=describe(depth),
            expected="a whole number from 0, or None for all levels",
            fix="tether.summary(model, depth=1)",
        )


def _empty_row(path: str, places: Places) -> Row:
    same = "" if places.is_first(path) else places.first_of(path)
    return Row(path, type(places.modules[path]).__name__, same_as=same)


def _has_row(path: str, places: Places, depth: int | None) -> bool:
    """Whether a module has a row: not too deep, and not in a shared one that has its rows elsewhere."""
    return _at_depth(path, places, depth) == path and places.is_first(places.owner(path))


def _at_depth(path: str, places: Places, depth: int | None) -> str:
    """The module at the given level, or above it, that this one is or lies in."""
    line = [path]
    while line[-1]:
        line.append(places.owner(line[-1]))
    return path if depth is None else line[max(len(line) - 1 - depth, 0)]


def _holds(row: Row) -> bool:
    return bool(row.cells or row.below)


def _line(place: str, owner: str, cell: Variable, first: str) -> str:
    name = place[len(owner) :].lstrip(".")
    tie = "" if place == first else f"  (tied to {first})"
    return f"{name}  {describe(peek(cell))}{tie}"


def _counted(row: Row, cell: Variable, is_trainable: bool, is_below: bool) -> Row:
    value = peek(cell)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    elements, size = (0, 0) if shape is None or dtype is None else (math.prod(shape), dtype.itemsize)
    column = "trainable" if is_trainable else "frozen" if isinstance(cell, Param) else "state"
    sums: dict[str, Any] = {column: getattr(row, column) + elements, "bytes": row.bytes + elements * size}
    return dataclasses.replace(row, **sums, below=row.below + is_below)


def _lines(row: Row) -> list[str]:
    if row.same_as:
        return [f"the same as {row.same_as}"]
    more = f"and {row.below} in modules below" if row.cells else f"{row.below} in modules below"
    return [*row.cells, *([more] if row.below else [])]


def _numbers(sums: Row | Summary) -> list[str]:
    return [count(sums.trainable), count(sums.frozen), count(sums.state), binary(sums.bytes) if sums.bytes else ""]
