# SPDX-License-Identifier: Apache-2.0
"""Records: what one compiled program depends on, put down when a function is traced.

For each place a record has a text, and a number that stands for equality, so that two records can be compared. It
holds no model and no array.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import reprlib
import types
from collections.abc import Iterator
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._core.structure import Static, Structure, joined, static_key
from tether._core.variable import Variable
from tether._modules.capture import watch_key
from tether._modules.module import Module, structure_of, variables_of
from tether._transforms import _arguments
from tether._transforms._call import likeness, split
from tether._transforms._discovery import Reach, is_stateful
from tether.errors import describe
from tether.random._streams import current_stream

_MOST_KEPT = 32  # records of one function
_MOST_LISTED = 8  # names in a line
_MOST_LETTERS = 80  # of one setting
# What users change between calls. Other options are named only where nothing else differs.
_OPTIONS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_device", "jax_default_prng_impl"),
    *("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_debug_nans", "jax_debug_infs"),
)

Place = tuple[str, str]  # a path, and what of it is meant
Said = tuple[int, str]  # two that are the same to a program have the same number; the text is for people
Entries = dict[Place, Said]


class Record:
    """What one program depends on.

    Attributes:
        number: 1 for the first one of a function.
        note: Why the program can serve the call that it was made for and no other; empty if it can.
    """

    def __init__(self, reach: Reach, lifted: list[Variable], fixed: dict[Variable, Any]):
        index = {variable: i for i, variable in enumerate([*lifted, *fixed])}
        modules = [(name, structure_of(module), variables_of(module)) for name, module in reach.modules.values()]
        self._roots = [(name, structure, [index[v] for v in variables]) for name, structure, variables in modules]
        loose = [("the random stream" if v is current_stream() else name, v) for v, name in reach.loose.items()]
        self._loose = [(name, type(v).__name__, index[v]) for name, v in loose]
        values = [_frame.peek(variable) for variable in lifted]
        self._avals = [(value.shape, value.dtype, False) for value in values]
        self._fixed = [_said(value) for value in fixed.values()]
        self._shardings = {i: said for i, value in enumerate(values) if (said := _sharding(value, is_state=True))}
        self._call, self._around = dict(_configuration()), dict(_surroundings())
        self._arrays: dict[str, tuple[Any, str]] = {}
        self._entries: tuple[Entries, Entries] | None = None
        self.number, self.note = 0, ""

    def add_call(self, static: _arguments.StaticArguments, args: Any, kwargs: Any, reach: Reach) -> None:
        """Adds the arguments of the call."""
        at = static.positions(len(args))
        for place, value in enumerate(args):
            self._add_argument(_arguments.name_at(static.fun, place), value, place in at, reach)
        for name in sorted(kwargs):
            self._add_argument(name, kwargs[name], name in static.names, reach)
        self._call["arguments given by name", ""] = _text_said(", ".join(sorted(kwargs)) or "none")

    def _add_argument(self, name: str, value: Any, is_static: bool, reach: Reach) -> None:
        key = None if is_static else split(value, likeness, [])
        if is_static or value is None:
            self._call[name, "argument"] = _said(value)
        elif isinstance(key, tuple) and isinstance(key[0], jax.tree_util.PyTreeDef):
            self._around[f"the container {name}", ""] = hash(key[0]), _tree_text(key[0])
            parts = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_stateful)[0]
            for (path, part), part_key in zip(parts, key[1:], strict=True):
                self._add_leaf(name + jax.tree_util.keystr(path), part, part_key, reach)
        else:
            self._add_leaf(name, value, key, reach)

    def _add_leaf(self, place: str, part: Any, key: Any, reach: Reach) -> None:
        if isinstance(key, tuple) and isinstance(key[0], tuple):  # a dynamic one: its shape comes first
            self._arrays[place] = key, "" if hasattr(part, "dtype") else f" (a Python {type(part).__name__})"
            if said := _sharding(part, is_state=False):
                self._around[f"sharding of {place}", ""] = said
        elif not is_stateful(part):
            self._call[place, "argument"] = _said(part)
        elif isinstance(part, Module) and (first := reach.modules[id(part)][0]) != place:
            self._call[place, ""] = _text_said(f"the same as {first}")

    def add_program(self, program: Any, missed: list[Variable]) -> None:
        """Adds whether the program may serve other calls."""
        if missed:
            names = listed(tuple(variable.describe() for variable in missed))
            self.note = f"found only by reading, so traced {program.traces} times, for these objects alone: {names}"
        elif not program.is_closed:
            self.note = "a value of the trace around is a part of it, so it serves this call alone"
        if self.note:  # the keys of other programs hold their Structures anyway; of this one nothing may be held
            self._entries, self._roots = self.entries({}), []

    def entries(self, known: dict[Structure, Entries]) -> tuple[Entries, Entries]:
        """What alone makes another program necessary, and what is named only where none of that differs.

        ``known`` keeps what was worked out for the Structures of other records.
        """
        if self._entries is not None:
            return self._entries
        found, around = dict(self._call), dict(self._around)
        found.update({(path, "argument"): _array_said(*array) for path, array in self._arrays.items()})
        first: dict[int, str] = {}
        names = _Names()
        for root, structure, indices in self._roots:
            root = names.unique(root)
            if structure not in known:
                _add_node(known.setdefault(structure, {}), structure, structure.spec, "")
            found.update({(joined(root, path), what): said for (path, what), said in known[structure].items()})
            for path, index in zip(structure.paths, indices, strict=True):
                found[joined(root, path), "value"] = self._value(first, index, joined(root, path))
        for name, kind, index in self._loose:
            name = names.unique(name)
            found[name, ""] = _text_said(kind)
            found[name, "value"] = self._value(first, index, name)
        around.update({(f"sharding of {first[index]}", ""): said for index, said in self._shardings.items()})
        return found, around

    def _value(self, first: dict[int, str], index: int, place: str) -> Said:
        if first.setdefault(index, place) != place:
            return _text_said(f"the same as {first[index]}")
        if index >= len(self._avals):
            return self._fixed[index - len(self._avals)]
        return _array_said(self._avals[index], "")


class Records:
    """The last records of one function."""

    def __init__(self) -> None:
        self.kept: collections.deque[Record] = collections.deque(maxlen=_MOST_KEPT)
        self._count = 0

    def add(self, record: Record) -> None:
        self._count += 1
        record.number = self._count
        self.kept.append(record)


class _Names:
    """Names made different where two are alike."""

    def __init__(self) -> None:
        self._taken: collections.Counter[str] = collections.Counter()

    def unique(self, name: str) -> str:
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name} ({self._taken[name]})"


def _configuration() -> Iterator[tuple[Place, Said]]:
    thread = _frame.thread
    yield ("training= of the call around", ""), _text_said(repr(thread.training))
    yield ("key= of the call around", ""), _text_said("none" if thread.stream is None else "a stream")
    looks = watch_key()
    yield ("capture or intercept around", ""), (hash(looks), f"{len(looks)} of them" if looks else "none")
    yield ("mesh", ""), _text_said(str(jax.sharding.get_abstract_mesh()))
    for name in _OPTIONS:
        yield (name, ""), _text_said(str(getattr(jax.config, name)))


def _surroundings() -> Iterator[tuple[Place, Said]]:
    traces = [_trace.transform_name(trace) for trace in _trace.chain(_trace.current())]
    yield ("called inside", ""), _text_said(", ".join(traces) or "nothing")
    for name in dir(jax.config):
        if name.startswith("jax_") and name not in _OPTIONS:
            yield (name, ""), _text_said(str(getattr(jax.config, name)))


def _sharding(value: Any, is_state: bool) -> Said | None:
    """How an array lies on a mesh, as far as a program depends on it."""
    if not isinstance(value, jax.Array) or _trace.owner(value) is not None:
        return None
    if not isinstance(value.sharding, jax.sharding.NamedSharding):
        return None
    layout = value.sharding if is_state and not value.sharding.is_fully_replicated else None
    mesh = ", ".join(f"{name}: {size}" for name, size in value.sharding.mesh.shape.items())
    return hash((jax.typeof(value).sharding, layout)), f"{value.sharding.spec} on the mesh ({mesh})"


def _add_node(found: Entries, structure: Structure, node: Any, path: str) -> None:
    tag = node[0]
    if tag == "static":
        found[path, ""] = hash(node[1]), _text(node[1].value)
    elif tag == "cell":
        found[path, ""] = _text_said(_cell_text(structure, node[1], path))
    elif tag == "module":
        _add_module(found, structure, node, path)
    elif tag == "shared":
        found[path, ""] = _text_said(f"the same as {structure.module_paths[node[1]] or 'the whole'}")
    elif tag == "cells":
        found[path, "container"] = hash(node[1]), _tree_text(node[1])
        keys = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(node[1], node[2]))[0]
        for key, index in keys:
            place = path + jax.tree_util.keystr(key)
            found[place, "cell"] = _text_said(_cell_text(structure, index, place))
    elif tag in ("seq", "map", "record"):
        found[path, "container"] = hash(node[1]), "a dict" if tag == "map" else node[1].__qualname__
        for name, child in zip(_names_in(node), node[-1], strict=True):
            _add_node(found, structure, child, path + name)
    else:
        found[path, ""] = _text_said("a reference")


def _names_in(node: Any) -> list[str]:
    """How the parts of a container are named below its path."""
    if node[0] == "seq":
        return [f"[{i}]" for i in range(len(node[2]))]
    return [f"[{key!r}]" for key in node[1]] if node[0] == "map" else [f".{name}" for name in node[2]]


def _add_module(found: Entries, structure: Structure, node: Any, path: str) -> None:
    _, cls, (training, explicit, _, stacked), fields = node
    found[path, ""] = hash(cls), cls.__qualname__
    found[joined(path, "training"), ""] = _text_said(f"{training}, set for it alone" if explicit else str(training))
    found[path, "stacked"] = _text_said(f"stacked {stacked} times" if stacked else "not stacked")
    for name, child in fields:
        is_named = name not in cls._transparent_ or child[0] in ("module", "shared")
        _add_node(found, structure, child, joined(path, name) if is_named else path)


def _cell_text(structure: Structure, index: int, place: str) -> str:
    if structure.paths[index] != place:
        return f"the same as {structure.paths[index]}"
    kind, reduce = structure.kinds[index]
    return f"{kind.__name__}{f', reduce={reduce!r}' * (reduce is not None)}{', frozen' * (index in structure.frozen)}"


def _said(value: Any) -> Said:
    return hash(static_key(value)), _text(value)


def _text_said(text: str) -> Said:
    return hash(text), text


def _array_said(key: Any, origin: str) -> Said:
    shape, dtype, is_weak = key
    text = describe(jax.ShapeDtypeStruct(shape, dtype))
    return hash(key), text + (origin or " (weakly typed)" * is_weak)


class _Writer(reprlib.Repr):
    """Writes a setting in a line: never the contents of an array, never an address in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxtuple, self.maxlist, self.maxdict = 4, 12, 12, 12
        self.maxstring = self.maxlong = _MOST_LETTERS

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Static):
            return self.repr1(x.value, level)
        if isinstance(x, types.FunctionType):
            return _function_text(x)
        if isinstance(x, functools.partial):
            names = (f"{name}={self.repr1(part, level - 1)}" for name, part in x.keywords.items())
            return f"partial({', '.join([*(self.repr1(part, level - 1) for part in (x.func, *x.args)), *names])})"
        if isinstance(name := getattr(x, "__qualname__", None), str):
            return name
        if dataclasses.is_dataclass(x) and level > 0:
            fields = [(field.name, getattr(x, field.name, None)) for field in dataclasses.fields(x)]
            return f"{type(x).__qualname__}({', '.join(f'{n}={self.repr1(part, level - 1)}' for n, part in fields)})"
        if type(x).__repr__ is object.__repr__ or isinstance(getattr(x, "shape", None), tuple):
            return describe(x)
        try:
            return repr(x)
        except Exception:  # the user's own
            return describe(x)


_writer = _Writer()


def _text(value: Any) -> str:
    return _cut(_writer.repr(value))


def _tree_text(treedef: Any) -> str:
    try:
        return _cut(str(treedef))
    except Exception:  # that of the user's auxiliary data
        return "a pytree"


def _function_text(function: types.FunctionType) -> str:
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    captured = [f"{name}={cell.cell_contents!r}" for name, cell in cells if _is_plain(cell)]
    where = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return f"{function.__name__} ({', '.join([where, *captured])})"


def _is_plain(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, bool | int | float | str)
    except ValueError:  # a name that the enclosing function hasn't assigned yet
        return False


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def listed(names: tuple[str, ...]) -> str:
    """Names in a line, the first few of them."""
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more or "nothing"
