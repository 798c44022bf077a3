# SPDX-License-Identifier: Apache-2.0
"""Looking inside a model: values of calls inside it, values added to them, calls replaced. Nothing is stored in it.

A captured value is written to a cell that only the capture knows. So it leaves transformations as every written
value does, and is stacked where one trace stands for several lanes or turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from tether._core import frame as _frame
from tether._core.structure import joined, static_key
from tether._core.variable import Cells, Constant, Variable, birthplace
from tether._modules.selection import compiled, names_module
from tether.errors import ArgumentError, SelectionError, ShapeError, describe


class _Seen(Variable):
    """A cell for a captured value."""

    __slots__ = ()
    leaves_only = True


class Group:
    """The cells of one captured value, a pytree: ``place`` is that of its capture among the watchers."""

    __slots__ = ("cells", "path", "place")

    def __init__(self, place: int, path: str, cells: Cells):
        self.place, self.path, self.cells = place, path, cells

    @property
    def key(self) -> Any:
        """What stands for it in another trace."""
        return self.place, self.path, self.cells.treedef


class _Watcher:
    """Looks at the calls of the modules that a selection names."""

    def __init__(self, what: str, select: Any):
        self._what, self._select = what, select
        self._fits = [compiled(part) for part in _paths(select)]

    def _is_named(self, path: str, module: Any) -> bool:
        return names_module(self._select, path, module, self._what)

    def key(self) -> Any:
        """What a compilation that was made while it looked depends on."""
        return self._what, static_key(self._select)


class _Intercept(_Watcher):
    def __init__(self, select: Any, fn: Callable[..., Any]):
        super().__init__("intercept", select)
        self.fn = fn

    def key(self) -> Any:
        return *super().key(), static_key(self.fn)

    def around(self, call: Callable[..., Any], module: Any) -> Callable[..., Any]:
        path = module._tether.label
        return functools.partial(self.fn, path, call) if self._is_named(path, module) else call


class _Capture(_Watcher):
    def __init__(self, select: Any, add: dict[str, Any] | None):
        super().__init__("capture", select)
        self.groups: list[Group] = []
        if not isinstance(add, dict | None):
            raise ArgumentError("capture: add= is no dict.", got=describe(add), expected="{path: array}")
        self.added = {path: _cells_of(value, path) for path, value in (add or {}).items()}
        self.birth, self.home = next(_frame.births), birthplace()
        self.met: dict[str, None] = {}

    def key(self) -> Any:
        added = ((path, cells.treedef, tuple(map(_aval, cells.variables))) for path, cells in self.added.items())
        return *super().key(), tuple(added)

    def again(self) -> _Capture:
        """One that looks for the same, and has seen nothing: for a trace whose values leave by other cells."""
        other = object.__new__(_Capture)
        vars(other).update(vars(self), groups=[], met={})
        other.birth = next(_frame.births)
        return other

    def around(self, call: Callable[..., Any], module: Any) -> Callable[..., Any]:
        path = module._tether.label
        if not self._is_named(path, module) and path not in self.added:
            self.met[path] = None
            return call
        return lambda *args, **kwargs: self.see(path, call(*args, **kwargs))

    def names_tap(self, path: str) -> bool:
        return path in self.added or any(fits(path) for fits in self._fits)

    def see(self, path: str, out: Any) -> Any:
        """Keeps a value, after what is added to it."""
        if path in self.added:
            out = _sum(path, out, self.added[path])
        leaves, treedef = jax.tree.flatten(out)
        for variable, leaf in zip(self.new_cells(path, treedef), leaves, strict=True):
            _frame.write(variable, leaf)
        return out

    def new_cells(self, path: str, treedef: Any) -> tuple[Variable, ...]:
        cells = Cells(treedef, [_Seen.make(None, label=path) for _ in range(treedef.num_leaves)])
        for variable in cells.variables:
            variable.birth, variable.home = self.birth, self.home
        self.groups.append(Group(_frame.thread.watchers.index(self), path, cells))
        return cells.variables

    def values(self) -> dict[str, Any]:
        """What was captured, by path; the second call of one module under ``path#2``, and so on."""
        found: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for group in self.groups:
            counts[group.path] = count = counts.get(group.path, 0) + 1
            leaves = list(map(_frame.read, group.cells.variables))
            name = group.path if count == 1 else f"{group.path}#{count}"
            found[name] = jax.tree.unflatten(group.cells.treedef, leaves)
        return found


def _paths(select: Any) -> list[str]:
    parts = select if isinstance(select, list | tuple | set | frozenset) else [select]
    return [part for part in parts if isinstance(part, str)]


def _cells_of(value: Any, path: str) -> Cells:
    leaves, treedef = jax.tree.flatten(value)
    try:
        return Cells(treedef, [Constant.make(jnp.asarray(leaf), label=f"add[{path!r}]") for leaf in leaves])
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "capture: what is added is no array.", at=f"add[{path!r}]", got=describe(value), expected="an array"
        ) from error


def _aval(variable: Variable) -> Any:
    value = _frame.peek(variable)
    return value.shape, value.dtype


def _sum(path: str, out: Any, added: Cells) -> Any:
    """``out`` plus the row that belongs to this lane and turn of what is added."""
    leaves, treedef = jax.tree.flatten(out)
    if treedef != added.treedef:
        raise ArgumentError(
            "capture: what is added has another structure than the value.",
            at=path,
            got=str(added.treedef),
            expected=str(treedef),
        )
    return jax.tree.unflatten(treedef, [_with_row(*pair, path) for pair in zip(leaves, added.variables, strict=True)])


def _with_row(value: Any, cell: Variable, path: str) -> Any:
    row = whole = _frame.read(cell)
    for frame in _frame.thread.frames:
        if frame.row is not None and frame.birth > cell.birth and row.ndim > 0:
            row = row[frame.row]
    if row.shape != value.shape:
        raise ShapeError(
            "capture: what is added has another shape than the captured value.",
            at=path,
            got=describe(whole),
            expected=f"{describe(value)} in each lane and turn, the axes of those in front",
            fix="begin with zeros of the shape that capture gives for this path",
        )
    return value + row


def capture(f: Callable[..., Any], select: Any, add: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Makes a function that returns, beside the result of ``f``, values from inside it.

    The values are the results of the calls of selected modules, and those given to ``tap``. Under ``vmap`` and
    ``scan`` they are stacked, the outermost axis first. A branch of ``cond`` that isn't taken gives zeros. Nothing is
    stored in the model.

    Args:
        f: The function or module, transformed or not.
        select: Which modules, by path, class, or the module itself; a path may also be that of a ``tap``.
        add: ``{path: array}``, added to the value at this path before it is captured and goes on. Differentiate with
            respect to it for the gradient at an inner value.
    Returns:
        A function that returns ``(result, {path: value})``; the n-th call of one module has ``path#n``.
    Raises:
        SelectionError: nothing was captured, or nothing to add to.
        ShapeError: what is added has another shape than the value.
    Example:
        >>> model = nn.Sequential([nn.Linear(2, 3), nn.Lambda(jnp.tanh)])
        >>> y, seen = tether.capture(model, nn.Linear)(jnp.ones((4, 2)))
        >>> {path: value.shape for path, value in seen.items()}
        {'[0]': (4, 3)}
        >>> loss = lambda eps: tether.capture(model, "[0]", add={"[0]": eps})(jnp.ones((4, 2)))[0].sum()
        >>> tether.grad(loss)(jnp.zeros((4, 3))).shape
        (4, 3)
    """
    if not callable(f):
        raise ArgumentError("capture: what is looked into is no function.", got=describe(f), expected="a callable")

    @functools.wraps(f, updated=())
    def capture_fun(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        watcher = _Capture(select, add)
        with _watching(watcher):
            out = f(*args, **kwargs)
        values = watcher.values()
        missing = [path for path in watcher.added if path not in values]
        known = [*values, *filter(None, watcher.met)][:8]
        if missing or not values:
            raise SelectionError(
                "capture: nothing was called that is named so.",
                got=repr(missing[0]) if missing else describe(select),
                expected=f"one of {', '.join(map(repr, known)) or 'the modules that f calls'}",
                fix="tether.modules(model) has every path; what f has written meanwhile is kept",
            )
        return out, values

    return capture_fun


def tap(name: str, x: Any) -> Any:
    """Gives ``x``; a ``capture`` around finds it under the path of the module being called, and ``name``.

    Example:
        >>> f = lambda x: tether.tap("square", x**2).sum()
        >>> tether.capture(f, "square")(jnp.arange(3.0))[1]["square"].tolist()
        [0.0, 1.0, 4.0]
    """
    thread = _frame.thread
    for watcher in reversed(thread.watchers):
        path = joined(thread.inside, name)
        if isinstance(watcher, _Capture) and watcher.names_tap(path):
            x = watcher.see(path, x)
    return x


def intercept(f: Callable[..., Any], select: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function in which ``fn`` stands around every call of the selected modules.

    Args:
        f: The function or module, transformed or not.
        select: Which modules, as in ``capture``.
        fn: ``fn(path, call, *args, **kwargs)`` gives the result in place of ``call(*args, **kwargs)``.
    Example:
        >>> model = nn.Sequential([nn.Linear(2, 3), nn.Lambda(jnp.tanh)])
        >>> halved = tether.intercept(model, nn.Linear, lambda path, call, x: call(x) / 2)
        >>> bool((halved(jnp.ones(2)) == jnp.tanh(model[0](jnp.ones(2)) / 2)).all())
        True
    """
    for what, part in (("what is looked into", f), ("fn", fn)):
        if not callable(part):
            raise ArgumentError(f"intercept: {what} is no function.", got=describe(part), expected="a callable")

    @functools.wraps(f, updated=())
    def intercept_fun(*args: Any, **kwargs: Any) -> Any:
        with _watching(_Intercept(select, fn)):
            return f(*args, **kwargs)

    return intercept_fun


@contextmanager
def _watching(watcher: _Watcher) -> Iterator[None]:
    thread = _frame.thread
    outer = thread.watchers, thread.inside
    thread.watchers = (*outer[0], watcher)
    try:
        yield
    finally:
        thread.watchers, thread.inside = outer


@contextmanager
def looking_anew() -> Iterator[list[Group]]:
    """For a trace whose program may run at other times: what is captured in it, for the captures of that time."""
    thread = _frame.thread
    outer, groups = thread.watchers, []
    thread.watchers = tuple(w.again() if isinstance(w, _Capture) else w for w in outer)
    try:
        yield groups
        groups += [group for w in thread.watchers if isinstance(w, _Capture) for group in w.groups]
    finally:
        thread.watchers = outer


def cells_for(keys: Iterable[Any]) -> list[Variable]:
    """The cells, of the captures that look now, for what was captured in a trace."""
    watchers = _frame.thread.watchers
    return [cell for place, path, treedef in keys for cell in watchers[place].new_cells(path, treedef)]


def watched_parts() -> list[Any]:
    """The Variables and functions that the watchers bring into every call."""
    parts: list[Any] = []
    for watcher in _frame.thread.watchers:
        if isinstance(watcher, _Capture):
            parts += [cell for cells in watcher.added.values() for cell in cells.variables]
        elif isinstance(watcher, _Intercept):
            parts.append(watcher.fn)
    return parts


def watch_key() -> Any:
    """What a compilation depends on of those that look."""
    return tuple([watcher.key() for watcher in _frame.thread.watchers])


def needs_rows() -> bool:
    """Whether something is added to captured values, so that each lane and turn must know its row."""
    return any(isinstance(watcher, _Capture) and watcher.added for watcher in _frame.thread.watchers)
