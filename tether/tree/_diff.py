# SPDX-License-Identifier: Apache-2.0
"""``diff``: which Variables changed between two snapshots, and by how much."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tether._core import Rng, Variable
from tether._modules.selection import variables
from tether.errors import ArgumentError, SelectionError, StructureError, describe
from tether.tree._predicates import is_array
from tether.tree._table import Column, Table, count

__all__ = ["Change", "Diff", "diff"]

_CHUNK = 1 << 22  # elements compared at a time: 32 MiB in float64


@dataclasses.dataclass(frozen=True)
class Change:
    """How one Variable changed.

    Attributes:
        kind: Name of the Variable's class.
        shape, dtype: Of its array.
        elements: Number of elements; for typed PRNG keys the number of keys.
        changed: Number of elements that differ; NaN in both places is no difference.
        max_abs: Largest absolute change of an element, those with a NaN left out; None for PRNG keys.
        relative: Norm of the change over the norm before, NaN left out, unitless; inf if it was zero
            before; None for PRNG keys.
        nan: Number of elements that became NaN, or were NaN and are not any more.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    changed: int
    max_abs: float | None
    relative: float | None
    nan: int = 0


class Diff(Mapping[str, Change]):
    """What changed: a mapping from path to ``Change`` of the Variables that did; false if none did.

    Attributes:
        unchanged: Paths of the compared Variables that stayed as they were.
    """

    def __init__(self, changes: Mapping[str, Change], unchanged: tuple[str, ...]):
        self._changes, self.unchanged = dict(changes), unchanged

    def __getitem__(self, path: str) -> Change:
        if path in self._changes:
            return self._changes[path]
        raise SelectionError(
            "diff: no change at this path.",
            got=repr(path),
            expected="the path of a Variable that changed",
            fix="this Variable is among those in .unchanged"
            if path in self.unchanged
            else "list(diff) prints the paths",
        )

    def __contains__(self, path: object) -> bool:
        return path in self._changes

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    def __repr__(self) -> str:
        return self._table().text() if self else self._title()

    def _repr_html_(self) -> str:
        return self._table().html()

    def __rich__(self) -> Any:
        return self._table().rich()

    def _title(self) -> str:
        return f"{len(self)} of {len(self) + len(self.unchanged)} Variables changed"

    def _table(self) -> Table:
        names = [Column("path"), Column("kind"), Column("array")]
        names += [Column(name, numeric=True) for name in ("changed", "max abs", "relative", "NaN")]
        return Table(self._title(), names, [_row(path, change) for path, change in self.items()])


def diff(before: Any, after: Any, select: Any = Variable) -> Diff:
    """Which Variables changed between two snapshots, and by how much.

    ``before`` must be a copy (``tether.snapshot(model)``): a module shares its Variables with itself and its views.

    Args:
        before, after: Modules with the same Variables, or containers of modules, as ``tether.variables`` takes them.
        select: Which Variables to compare.
    Raises:
        StructureError: The two don't have the same paths, kinds, shapes and dtypes.
        ArgumentError: A value is traced or deleted, so there is nothing to compare; or ``before`` is no copy.
        SelectionError: ``select`` names nothing.
    Example:
        >>> norm = nn.BatchNorm(2)
        >>> before = tether.snapshot(norm)
        >>> _ = norm(jnp.asarray([[1.0, 2.0], [5.0, 4.0]]))
        >>> list(tether.diff(before, norm))
        ['mean', 'var']
    """
    old, new = variables(before), variables(after)
    _check_paths(old, new)
    _check_copied(old, new)
    chosen = _chosen(before, after, select)
    pairs = {path: (old[path], new[path]) for path in new if path in chosen}
    changes = {path: _change(path, *pair) for path, pair in pairs.items()}
    return Diff(
        {path: change for path, change in changes.items() if change is not None and change.changed},
        tuple(path for path, change in changes.items() if change is None or not change.changed),
    )


def _chosen(before: Any, after: Any, select: Any) -> set[str]:
    """Paths that a selection names on either side: it may be made of parts of one of them."""
    chosen, refusals = set(), []
    for side in (after, before):
        try:
            chosen |= set(variables(side, select))
        except SelectionError as error:
            refusals.append(error)
    if len(refusals) == 2:
        raise refusals[0]
    return chosen


def _check_paths(old: Mapping[str, Variable], new: Mapping[str, Variable]) -> None:
    gone, added = [path for path in old if path not in new], [path for path in new if path not in old]
    if gone or added:
        raise StructureError(
            "diff: the two don't have the same Variables.",
            at=(gone + added)[0],
            got="; ".join(
                f"{side} lacks {_listed(paths)}" for side, paths in (("after", gone), ("before", added)) if paths
            ),
            expected="the same paths in both",
            fix="compare two states of one model: before = tether.snapshot(model)",
        )


def _check_copied(old: Mapping[str, Variable], new: Mapping[str, Variable]) -> None:
    if new and all(old[path] is variable for path, variable in new.items()):
        raise ArgumentError(
            "diff: before and after are the same Variables, so nothing can differ.",
            got="a module and itself, or a view of it",
            expected="a copy, made before the change",
            fix="before = tether.snapshot(model)",
        )


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _change(path: str, before: Variable, after: Variable) -> Change | None:
    """The change of one Variable; None where there is none, and what can't change: no array, a shared one."""
    old, new = before.value, after.value
    _check_alike(path, before, after, old, new)
    if old is new:
        return None
    _check_concrete(path, old)
    _check_concrete(path, new)
    if not is_array(new):
        return None
    shape, dtype, kind = tuple(new.shape), str(new.dtype), type(after).__name__
    if _is_typed_key(new):
        flags = _rows_differ(jax.random.key_data(old), jax.random.key_data(new), len(shape))
        return Change(kind, shape, dtype, flags.size, int(flags.sum()), None, None)
    old, new = np.asarray(old), np.asarray(new)
    if isinstance(after, Rng):
        return Change(kind, shape, dtype, new.size, int((old != new).sum()), None, None)
    return Change(kind, shape, dtype, new.size, *_measured(old.reshape(-1), new.reshape(-1)))


def _check_alike(path: str, before: Variable, after: Variable, old: Any, new: Any) -> None:
    alike = describe(old) == describe(new) if hasattr(new, "dtype") or hasattr(old, "dtype") else old == new
    if type(before) is not type(after) or not alike:
        raise StructureError(
            "diff: a Variable is not of the same kind, shape and dtype in both.",
            at=path,
            got=f"after: {type(after).__name__} of {describe(new)}",
            expected=f"before: {type(before).__name__} of {describe(old)}",
            fix="compare two states of one model: before = tether.snapshot(model)",
        )


def _check_concrete(path: str, value: Any) -> None:
    if isinstance(value, Tracer | jax.ShapeDtypeStruct):
        raise ArgumentError(
            "diff: a Variable has no numbers here, only a shape.",
            at=path,
            got=f"{describe(value)} of {'a transformation' if isinstance(value, Tracer) else 'eval_shape'}",
            expected="arrays",
            fix="compare snapshots outside of transformations",
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ArgumentError(
            "diff: an array has been deleted, by a donated call.",
            at=path,
            got=f"a deleted {describe(value)}",
            expected="arrays",
            fix="before = tether.snapshot(model) copies the arrays; jax.tree.map does not",
        )


def _is_typed_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _rows_differ(old: Any, new: Any, rank: int) -> np.ndarray:
    differs = np.asarray(old) != np.asarray(new)
    return differs.any(axis=tuple(range(rank, differs.ndim)))


def _measured(old: np.ndarray, new: np.ndarray) -> tuple[int, float, float, int]:
    """changed, max_abs, relative, nan of two flat arrays, a chunk at a time."""
    changed, largest, moved, norm, nan = 0, 0.0, 0.0, 0.0, 0
    for start in range(0, new.size, _CHUNK):
        a, b = old[start : start + _CHUNK], new[start : start + _CHUNK]
        distance, one_nan, size = _distances(a, b)
        changed += int(np.count_nonzero(distance)) + one_nan
        largest = max(largest, float(distance.max(initial=0)))
        moved, norm, nan = math.hypot(moved, _norm(distance)), math.hypot(norm, _norm(size)), nan + one_nan
    return changed, largest, _ratio(moved, norm), nan


def _distances(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, int, np.ndarray]:
    """|new - old|, exact for integers; how many are NaN on one side only; |old|. NaN counts as 0 in both arrays."""
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        size = np.abs(old.astype(np.float64))
        old, new = (x if x.dtype == np.uint64 else x.astype(np.int64) for x in (old, new))
        return np.maximum(old, new).view(np.uint64) - np.minimum(old, new).view(np.uint64), 0, size
    wide = np.complex128 if jnp.issubdtype(new.dtype, jnp.complexfloating) else np.float64
    old, new = old.astype(wide), new.astype(wide)
    nan_old, nan_new = np.isnan(old), np.isnan(new)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where((old == new) | nan_old | nan_new, 0, np.abs(new - old))
    return distance, int(np.count_nonzero(nan_old != nan_new)), np.where(nan_old | nan_new, 0, np.abs(old))


def _norm(x: np.ndarray) -> float:
    largest = float(x.max(initial=0))
    if largest == 0 or math.isinf(largest):
        return largest
    return largest * float(np.linalg.norm(x / largest))  # scaled: squares of large float64 would overflow


def _ratio(moved: float, norm: float) -> float:
    if moved == 0:
        return 0.0
    return moved / norm if norm and not (math.isinf(moved) and math.isinf(norm)) else math.inf


def _row(path: str, change: Change) -> list[str]:
    array = f"{change.dtype}[{', '.join(map(str, change.shape))}]"
    changed = f"{change.changed:,} of {change.elements:,}"
    if change.max_abs is None:
        return [path, change.kind, array, changed, "key changed", "", ""]
    return [path, change.kind, array, changed, f"{change.max_abs:.3g}", f"{change.relative:.3g}", count(change.nan)]
