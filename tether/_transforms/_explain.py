# SPDX-License-Identifier: Apache-2.0
"""explain: what a compiled function reads and writes, and why it was compiled each time.

When a function is traced, and only then, a ``Record`` is made of what its program depends on: for each place a text,
and a number that stands for equality. It holds no model and no array. A report compares each record with the most
similar earlier one.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

from tether._core.structure import Structure
from tether._modules.module import Module
from tether._transforms import _arguments
from tether._transforms._jit import Jit
from tether._transforms._record import Entries, Place, Record, Records, Said, listed
from tether.errors import ArgumentError, describe

_MOST_LISTED = 8  # reasons for one compilation, in a report


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One trace of a function, and why it was made.

    Attributes:
        number: 1 for the first.
        like: Number of the most similar earlier one, which it is compared with; None if there is none.
        reasons: What differs from that one.
    """

    number: int
    like: int | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        compared = f", compared with {self.like}" if self.like else ""
        more = [f"and {len(self.reasons) - _MOST_LISTED} more"] if len(self.reasons) > _MOST_LISTED else []
        return "\n    ".join([f"compilation {self.number}{compared}:", *self.reasons[:_MOST_LISTED], *more])


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What ``explain`` found; printed, it is a report.

    Attributes:
        name: The function.
        traces: How often its Python ran.
        reads, writes: Paths of the Variables that the program of the last call reads and writes.
        compilations: The last ones, oldest first.
    """

    name: str
    traces: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    compilations: tuple[Compilation, ...]

    def __str__(self) -> str:
        return "\n".join(line for section in self._sections() for line in section)

    __repr__ = __str__

    def _sections(self) -> Iterator[list[str]]:
        """The parts of the report, some lines each."""
        if not self.compilations:
            yield [f"{self.name}: not compiled yet"]
            return
        count = self.compilations[-1].number
        yield [f"{self.name}: {count} compilation{'s' * (count > 1)}, {self.traces} trace{'s' * (self.traces > 1)}"]
        yield [f"  reads:  {listed(self.reads)}", f"  writes: {listed(self.writes)}"]
        yield [f"  {compilation}" for compilation in self.compilations]


def explain(step: Any) -> Explanation:
    """Says what a compiled function reads and writes, and why it was compiled each time.

    Where only devices or shardings differ, XLA compiles a trace once more; that is not counted here.

    Args:
        step: What ``tether.jit`` gave, or a method, partial or module made of it.
    Returns:
        The report, to print or to look into: ``reads``, ``writes``, ``compilations``.
    Raises:
        ArgumentError: ``step`` was not made by ``tether.jit``.
    Example:
        >>> double = tether.jit(lambda x: 2 * x)
        >>> double(jnp.ones(3)).shape, double(jnp.ones(4)).shape
        ((3,), (4,))
        >>> tether.explain(double).compilations[1].reasons
        ('x: float32[3] -> float32[4]',)
    """
    found = next((layer for layer in layers(step) if isinstance(layer, Jit)), None)
    if found is None:
        raise ArgumentError(
            "explain: this was not made by tether.jit.",
            got=f"the function {_arguments.name_of(step)}" if callable(step) else describe(step),
            expected="a function that tether.jit gave",
            fix="step = tether.jit(f), call it, then tether.explain(step)",
        )
    return Explanation(repr(found), found.traces, found.reads, found.writes, compilations(found._records))


def layers(step: Any) -> Iterator[Any]:
    """A function, and what is in it if it is a bound method, partial, wrapper or module, the outermost first."""
    while step is not None:
        yield step
        if isinstance(step, types.MethodType):
            step = step.__func__
        elif isinstance(step, functools.partial):
            step = step.func
        else:
            step = type(step).__call__ if isinstance(step, Module) else getattr(step, "__wrapped__", None)


def compilations(records: Records) -> tuple[Compilation, ...]:
    """Each record, compared with the most similar one before it."""
    known: dict[Structure, Entries] = {}
    kept = [(record, record.entries(known)) for record in list(records.kept)]
    return tuple(_compared(*pair, kept[:place]) for place, pair in enumerate(kept))


def _compared(record: Record, entries: Any, before: list[Any]) -> Compilation:
    note = (record.note,) if record.note else ()
    if not before:
        first = "the first call" if record.number == 1 else "those before it are not kept any more"
        return Compilation(record.number, None, (first, *note))
    old, old_entries = min(before, key=lambda pair: (*map(_distance, pair[1], entries), -pair[0].number))
    changes = [_changes(*pair) for pair in zip(old_entries, entries, strict=True)]
    reasons = _in_words(changes[0] or changes[1])
    if not reasons:
        why = old.note or "it had been dropped, or another thread made it at the same time"
        reasons = (f"nothing differs from compilation {old.number}, which could not be used: {why}",)
    return Compilation(record.number, old.number, (*reasons, *note))


Change = tuple[str, str, str]  # path, before, after


def _changes(old: Entries, new: Entries) -> list[Change]:
    """What differs; the place of another class, or setting, stands for all below it."""
    places = _differing(old, new)
    tops, found = _tops(places), []
    for path, what in places:
        before, after = old.get((path, what), _ABSENT), new.get((path, what), _ABSENT)
        is_implied = what and path in tops and _ABSENT in (before, after)
        if not is_implied and not _is_below_one(path, tops):
            found.append((path, before[1], after[1]))
    return found


def _distance(old: Entries, new: Entries) -> int:
    """The number of places that differ or lie below one of another class."""
    places = _differing(old, new)
    tops = _tops(places)
    return len({*places, *(place for place in {**old, **new} if tops and _is_below_one(place[0], tops))})


def _differing(old: Entries, new: Entries) -> list[Place]:
    return [place for place in {**old, **new} if old.get(place, _ABSENT)[0] != new.get(place, _ABSENT)[0]]


def _tops(places: list[Place]) -> set[str]:
    return {path for path, what in places if what == "" and path}


def _is_below_one(path: str, tops: set[str]) -> bool:
    return any(path[:end] in tops for end, letter in enumerate(path) if letter in ".[")


def _in_words(changes: list[Change]) -> tuple[str, ...]:
    """One line for each change; places that changed alike share one."""
    paths: dict[str, list[str]] = {}
    for path, before, after in changes:
        paths.setdefault(f"{before} -> {after if after != before else 'another, not equal'}", []).append(path)
    return tuple(f"{listed(tuple(where))}: {change}" for change, where in paths.items())


_ABSENT: Said = (0, "absent")
