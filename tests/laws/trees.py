# SPDX-License-Identifier: Apache-2.0
"""Random module trees: plans as plain data, the modules that they describe, and what must hold of them, by hand.

A plan is a tree of ``Mod``, ``Node`` and ``Leaf``. One ``Mod`` object in two places is one module in two places, and
two leaves of one number are one Variable, so ties are plain to see without the library.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import tether


def examples(count: int) -> int:
    """A number of examples or tries, times TETHER_FUZZ."""
    return count * int(os.environ.get("TETHER_FUZZ", "1"))


# What modules are made of.


class Bag(tether.Module):
    """Holds what ``make`` gives for each name; called in the constructor, as code of users builds parts."""

    def __init__(self, training: bool, parts: dict[str, Any], make: Callable[[Any], Any]):
        self.training = training
        for name, part in parts.items():
            setattr(self, name, make(part))


class Other(Bag):
    """The same, of another class."""


class Adapter(tether.Param):
    """A kind of the user's own."""


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    """A container; with a cell in ``a`` it is no setting."""

    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Config:
    rates: tuple[float, ...]
    name: str = "config"


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Cell:
    """A Variable of the pool: its kind, reduction, and value."""

    kind: type
    value: Callable[[int], Any]
    reduce: str | None = None


def filled(shape: tuple[int, ...], dtype: str) -> Callable[[int], Any]:
    return lambda value: np.full(shape, value, jnp.dtype(dtype))


POOL = [
    Cell(tether.Param, filled((2,), "float32")),
    Cell(tether.Param, filled((2,), "float32")),
    Cell(tether.State, filled((), "int32")),
    Cell(tether.State, filled((3, 1), "bfloat16"), "mean"),
    Cell(tether.Constant, filled((0, 2), "complex64")),
    Cell(Adapter, filled((1,), "float16")),
    Cell(tether.Rng, lambda value: jax.random.key(value)),
]
PYTREES: list[Callable[[list[Any]], Any]] = [lambda values: {"b": [values[1], values[2]], "a": values[0]}, tuple]
PYTREE_PATHS = [["['a']", "['b'][0]", "['b'][1]"], ["[0]", "[1]", "[2]"]]  # of a State(pytree), in the order of JAX
SETTINGS: list[Any] = [
    *(1, True, 1.0, 0.0, -0.0, float("nan"), None, "relu", (1, (2,)), (True, (2,)), Point(1, 2)),
    *(Color.RED, Config((0.5,)), Config((1.0,)), jnp.float32, jax.nn.relu, jnp.tanh, math.sin),
    *(functools.partial(max, 1), functools.partial(max, 2), {3: None, "z": 1}, {3: None, "z": True}),
    *(tether.Static("opaque"), jnp.dtype("int8")),
]


# Plans.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A cell (number in the pool), cells (number among the pytrees), or a setting (number among the settings)."""

    what: str
    number: int


@dataclasses.dataclass(frozen=True)
class Node:
    """A container; the parts of a dict and of a record under their keys."""

    kind: str
    parts: dict[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Mod:
    """A module; identity is what counts."""

    cls: type
    training: bool
    parts: dict[str, Any]


NAMES = st.sampled_from(["a", "b", "weight", "x1", "norm"])
KEYS = st.sampled_from(["k", "l", 0, 3])
CELLS = st.builds(Leaf, st.just("cell"), st.integers(0, len(POOL) - 1))
LEAVES = st.one_of(
    CELLS,
    CELLS,
    st.builds(Leaf, st.just("cells"), st.integers(0, len(PYTREES) - 1)),
    st.builds(Leaf, st.just("setting"), st.integers(0, len(SETTINGS) - 1)),
)


def numbered(parts: Sequence[Any]) -> dict[int, Any]:
    return dict(enumerate(parts))


def _extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(Mod, st.sampled_from([Bag, Other]), st.booleans(), st.dictionaries(NAMES, inner, max_size=3)),
        st.builds(Node, st.sampled_from(["list", "tuple"]), st.lists(inner, max_size=3).map(numbered)),
        st.builds(Node, st.just("dict"), st.dictionaries(KEYS, inner, max_size=3)),
        st.builds(Node, st.just("point"), st.tuples(inner, inner).map(numbered)),
        st.builds(Node, st.just("record"), st.tuples(CELLS, inner).map(lambda ab: dict(zip("ab", ab, strict=True)))),
        st.builds(Leaf, st.just("again"), st.integers(0, 3)),
    )


def _tied(plan: Any, done: list[Mod]) -> Any:
    """The plan, with the module meant in place of each "again"."""
    if isinstance(plan, Leaf):
        if plan.what != "again":
            return plan
        return done[plan.number] if plan.number < len(done) else Leaf("setting", plan.number)
    new = dataclasses.replace(plan, parts={key: _tied(part, done) for key, part in plan.parts.items()})
    if isinstance(new, Mod):
        done.append(new)
    return new


PLANS: st.SearchStrategy[Mod] = st.builds(
    Mod,
    st.just(Bag),
    st.just(True),
    st.dictionaries(NAMES, st.recursive(LEAVES, _extend, max_leaves=10), min_size=1, max_size=4),
).map(lambda plan: _tied(plan, []))
# With a cell in it, for what needs one.
FILLED = PLANS.map(lambda plan: dataclasses.replace(plan, parts={**plan.parts, "own": Leaf("cell", 0)}))


def changed(plan: Any, change: Callable[[Leaf], Leaf], done: dict[int, Any] | None = None) -> Any:
    """The plan with other leaves, its ties kept."""
    done = {} if done is None else done
    if isinstance(plan, Leaf):
        return change(plan)
    if id(plan) not in done:
        done[id(plan)] = dataclasses.replace(plan, parts={k: changed(p, change, done) for k, p in plan.parts.items()})
    return done[id(plan)]


def _other_setting(leaf: Leaf) -> Leaf:
    return Leaf("setting", (leaf.number + 1) % len(SETTINGS)) if leaf.what == "setting" else leaf


def _swapped(leaf: Leaf) -> Leaf:
    return Leaf("cell", 1 - leaf.number) if leaf.what == "cell" and leaf.number < 2 else leaf


def _merged(leaf: Leaf) -> Leaf:
    return Leaf("cell", 0) if leaf == Leaf("cell", 1) else leaf


def _retyped(plan: Any) -> Any:
    """Another class of module throughout, a module in two places now two of them."""
    if isinstance(plan, Leaf):
        return plan
    new = dataclasses.replace(plan, parts={key: _retyped(part) for key, part in plan.parts.items()})
    return dataclasses.replace(new, cls=Other) if isinstance(new, Mod) else new


CHANGES: dict[str, Callable[[Any], Any]] = {
    "none": lambda plan: changed(plan, lambda leaf: leaf),
    "settings": lambda plan: changed(plan, _other_setting),
    "values": lambda plan: changed(plan, _swapped),
    "ties": lambda plan: changed(plan, _merged),
    "classes": _retyped,
}


# The modules.


class Builder:
    """Builds plans; ``offset`` is added to every value, ``backwards`` turns around the order of dicts."""

    def __init__(self, offset: int = 0, *, backwards: bool = False):
        self.offset, self.backwards = offset, backwards
        self.pool: dict[Leaf, Any] = {}
        self.modules: dict[int, Any] = {}

    def build(self, plan: Mod) -> Any:
        if id(plan) not in self.modules:
            self.modules[id(plan)] = plan.cls(plan.training, plan.parts, self.part)
        return self.modules[id(plan)]

    def part(self, plan: Any) -> Any:
        if isinstance(plan, Mod):
            return self.build(plan)
        if isinstance(plan, Leaf):
            return SETTINGS[plan.number] if plan.what == "setting" else self.cell(plan)
        parts = {key: self.part(part) for key, part in plan.parts.items()}
        if plan.kind == "dict":
            return dict(sorted(parts.items(), key=str, reverse=True)) if self.backwards else parts
        if plan.kind in ("record", "point"):
            return (Record if plan.kind == "record" else Point)(*parts.values())
        return (tuple if plan.kind == "tuple" else list)(parts.values())

    def cell(self, leaf: Leaf) -> Any:
        if leaf not in self.pool:
            if leaf.what == "cell":
                cell = POOL[leaf.number]
                self.pool[leaf] = cell.kind(cell.value(leaf.number + self.offset), reduce=cell.reduce)
            else:
                values = [np.float32(10 * leaf.number + i + self.offset) for i in range(3)]
                self.pool[leaf] = tether.State(PYTREES[leaf.number](values))
        return self.pool[leaf]

    def value(self, name: Any) -> Any:
        """The value of a Variable, by its name in ``places``."""
        leaf, index = name
        if leaf.what == "cell":
            return POOL[leaf.number].value(leaf.number + self.offset)
        return np.float32(10 * leaf.number + index + self.offset)


# What must hold, by hand. A Variable is named by its leaf and, for one of several cells, its index.


def places(plan: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every path of a cell with the name of the Variable there, in the order of the tree."""
    if isinstance(plan, Leaf):
        if plan.what == "cell":
            yield path, (plan, 0)
        elif plan.what == "cells":
            yield from ((path + end, (plan, i)) for i, end in enumerate(PYTREE_PATHS[plan.number]))
        return
    for step, part in steps(plan, path):
        yield from places(part, step)


def module_places(plan: Any, path: str = "") -> Iterator[tuple[str, Mod]]:
    """Every path of a module, outermost first."""
    if isinstance(plan, Mod):
        yield path, plan
    if not isinstance(plan, Leaf):
        for step, part in steps(plan, path):
            yield from module_places(part, step)


def steps(plan: Mod | Node, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(plan, Mod):
        yield from ((f"{path}.{name}" if path else name, part) for name, part in plan.parts.items())
    elif plan.kind == "record":
        yield from ((f"{path}.{name}", part) for name, part in plan.parts.items())
    else:  # a dict in the order of its keys, as in JAX
        for key in sorted(plan.parts, key=lambda key: (type(key).__name__, key)):
            yield f"{path}[{key!r}]", plan.parts[key]


def declaration(leaf: Leaf) -> tuple[type, str | None]:
    """Kind and reduction of what a leaf stands for."""
    return (tether.State, None) if leaf.what == "cells" else (POOL[leaf.number].kind, POOL[leaf.number].reduce)


def first_places(pairs: Iterable[tuple[str, Any]]) -> dict[Any, str]:
    """Each distinct thing, with its first path."""
    found: dict[Any, str] = {}
    for path, thing in pairs:
        found.setdefault(thing, path)
    return found


def groups(pairs: Iterable[tuple[str, Any]]) -> set[frozenset[str]]:
    """The paths that lead to one thing, for each thing."""
    found: dict[Any, set[str]] = {}
    for path, thing in pairs:
        found.setdefault(thing, set()).add(path)
    return set(map(frozenset, found.values()))


def signature(plan: Any, seen: dict[Any, int] | None = None) -> Any:
    """What two plans share exactly where the modules are of one structure."""
    seen = {} if seen is None else seen
    if isinstance(plan, Leaf):
        if plan.what == "setting":
            return _setting_signature(SETTINGS[plan.number])
        pytree = plan.number if plan.what == "cells" else None
        return (plan.what, pytree, declaration(plan), seen.setdefault(plan, len(seen)))
    if isinstance(plan, Mod):
        if plan in seen:
            return ("shared", seen[plan])
        seen[plan] = len(seen)
        parts = tuple((name, signature(part, seen)) for name, part in plan.parts.items())
        return (plan.cls, plan.training, parts)
    keys = [step.rpartition("[")[2] for step, _ in steps(plan, "")]
    kind = "list" if plan.kind == "tuple" else plan.kind
    return (kind, tuple(keys), tuple(signature(part, seen) for _, part in steps(plan, "")))


def _setting_signature(value: Any) -> Any:
    """A sealed container is one whether its parts are settings or cells."""
    if isinstance(value, Point):
        return ("point", ("0]", "1]"), tuple(map(_setting_signature, value)))
    if isinstance(value, tuple):
        return ("list", tuple(f"{i}]" for i in range(len(value))), tuple(map(_setting_signature, value)))
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (type(key).__name__, key))
        return ("dict", tuple(f"{key!r}]" for key in keys), tuple(_setting_signature(value[key]) for key in keys))
    return ("setting", type(value), repr(value))
