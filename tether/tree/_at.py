# SPDX-License-Identifier: Apache-2.0
"""``tree_at``: a copy of a tree with some of its nodes replaced.

``where`` runs on a copy of the tree in which a mark stands for each leaf. What it returns is then found
by identity: marks, nodes, and inside a module, which is one node, its submodules. The words used here:

- a *mark* stands for one leaf, and holds it;
- a *spot* is a mark, node or submodule that ``where`` may return;
- an *edit* is a spot with what comes in its place.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import jax

from tether._core import Variable
from tether._core.structure import is_below
from tether._modules import Module
from tether.errors import StructureError, describe
from tether.tree._mismatch import structure_error
from tether.tree._places import Places
from tether.tree._replace import replace as replace_parts

__all__ = ["tree_at"]


_IS_LEAF = "pass is_leaf=lambda x: x is None, if it is a None in the tree that you mean"


class _Unset:
    def __repr__(self) -> str:
        return "<unset>"


_UNSET = _Unset()


def tree_at(
    where: Callable[[Any], Any],
    pytree: Any,
    replace: Any = _UNSET,
    replace_fn: Any = _UNSET,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """A copy of the tree with other values at the nodes that ``where`` returns.

    In a module those are cells (``lambda m: m.head.weight``) and submodules (``lambda m: m.head``); a tied cell and
    a shared submodule are one, whichever name they are called by. Shapes are not checked, and no constructor runs.

    Args:
        where: Function of the tree, returns a node of it or a sequence of nodes; sees marks in place of the leaves.
        pytree: Any tree.
        replace: What to put there; for a sequence of nodes a sequence of the same length.
        replace_fn: In place of ``replace``: a function of the old node that gives the new one.
        is_leaf: What counts as a leaf, as in ``jax.tree.map``; ``lambda x: x is None`` to replace a None.
    Raises:
        StructureError: ``where`` returns what is no node of the tree, two that lie in one another, or looks at
            the values of leaves; ``replace`` is not of that length; both or none of ``replace`` and ``replace_fn``.
    Example:
        >>> tether.tree_at(lambda t: t["a"], {"a": 1, "b": 2}, 10)
        {'a': 10, 'b': 2}
        >>> model = nn.Linear(2, 3)
        >>> zeroed = tether.tree_at(lambda m: m.bias, model, replace_fn=jnp.zeros_like)
    """
    if (replace is _UNSET) == (replace_fn is _UNSET):
        raise StructureError(
            "tree_at: exactly one of replace and replace_fn is needed.",
            got="neither" if replace is _UNSET else "both",
            fix=["tree_at(where, tree, replace=new)", "tree_at(where, tree, replace_fn=lambda old: new)"],
        )
    marked = _Marked(pytree, is_leaf)
    found = _call(where, marked.tree)
    spots, several = marked.spots(found), marked.several(found)
    _check_blind(where, pytree, spots, several)
    if replace is not _UNSET:
        news = _as_many(replace, len(spots)) if several else [replace]
        return marked.edited(marked.edits(zip(spots, news, strict=True)))
    distinct = {id(spot): spot for spot in spots}.values()
    return marked.edited(marked.edits((spot, replace_fn(marked.old(spot))) for spot in distinct))


class _Mark:
    """Stands for a leaf while ``where`` runs."""

    __slots__ = ("original",)

    def __init__(self, original: Any):
        self.original = original

    def __repr__(self) -> str:
        return "<a leaf>"


class _EmptyTuple(tuple):
    """Stands for ``()``, which is one object wherever it is: each of these is another."""

    __slots__ = ()


def _refuse(*_: Any) -> Any:
    raise StructureError(
        "tree_at: where looks at the value of a leaf.",
        expected="a function that says where in the tree, whatever the values are",
        fix="choose before the call: place = ...; tree_at(lambda tree: tree[place], ...)",
    )


for _name in (
    "bool len iter getitem contains call lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv "
    "mod rmod pow rpow matmul rmatmul and rand or ror xor rxor lshift rshift neg pos abs invert int float complex index"
).split():
    setattr(_Mark, f"__{_name}__", _refuse)


def _call(where: Callable[[Any], Any], tree: Any) -> Any:
    try:
        return where(tree)
    except AttributeError as error:
        if isinstance(error.obj, _Mark):
            _refuse()
        raise


class _Marked:
    """The tree with a mark for each leaf, and everything in it that ``where`` may return."""

    def __init__(self, pytree: Any, is_leaf: Callable[[Any], bool] | None):
        self.tree = jax.tree.map(
            _mark, pytree, is_leaf=lambda x: _is_empty_tuple(x) or (is_leaf is not None and is_leaf(x))
        )
        self.nodes: dict[int, Any] = {}  # id -> node; holding them keeps the ids from being used again
        self.counts: collections.Counter[int] = collections.Counter()
        jax.tree.flatten(self.tree, is_leaf=self._note)
        owners = [node for node in self.nodes.values() if isinstance(node, Module)]
        self.places = {id(owner): Places.of(owner) for owner in owners}
        self.parts: dict[int, tuple[Module, str, Module]] = {}  # id of a submodule -> its root, its path, itself
        for owner in owners:
            first = self.places[id(owner)].first_modules()
            self.parts.update({id(part): (owner, path, part) for path, part in first.items() if part is not owner})
        self.cells = {id(mark) for owner in owners for mark in jax.tree.leaves(owner)}

    def _note(self, node: Any) -> bool:
        self.nodes[id(node)] = node
        self.counts[id(node)] += 1
        return False

    def is_spot(self, found: Any) -> bool:
        """Whether it is one node, leaf or submodule."""
        if found is None and self.places:
            return False  # a setting of a module may be None: it isn't the one None that the tree has elsewhere
        return id(found) in self.nodes or id(found) in self.parts

    def is_read(self, found: Any) -> bool:
        """Whether it is what an attribute of several cells reads as: of ``State({"k": ..., "v": ...})``."""
        leaves = [] if isinstance(found, Iterator) else jax.tree.leaves(found)
        return bool(leaves) and all(id(leaf) in self.cells for leaf in leaves)

    def several(self, found: Any) -> bool:
        """Whether it is a sequence of spots, rather than one."""
        return isinstance(found, list | tuple) and not self.is_spot(found)

    def spots(self, found: Any) -> list[Any]:
        """What ``where`` returned, as a list of spots, or an error."""
        spots = list(found) if self.several(found) else [found]
        for spot in spots:
            if not (self.is_spot(spot) or self.is_read(spot)):
                raise _no_node(spot)
            if self.counts[id(spot)] > 1:
                what = "tree_at: where returned a node that the tree has in several places."
                fix = "return a node above it, and build the new one in replace_fn"
                raise StructureError(what, got=describe(spot), fix=_IS_LEAF if spot is None else fix)
        return spots

    def old(self, spot: Any) -> Any:
        """The original of a spot."""
        if id(spot) not in self.parts:
            return jax.tree.map(_unmarked, spot)
        owner, path, _ = self.parts[id(spot)]
        return Places.of(jax.tree.map(_unmarked, owner)).modules[path]

    def edits(self, pairs: Iterable[tuple[Any, Any]]) -> dict[int, Any]:
        """New values by the id of what they replace; what reads as a tree is taken apart into its cells."""
        edits: dict[int, Any] = {}
        for spot, new in pairs:
            for piece, value in [(spot, new)] if self.is_spot(spot) else _pieces(spot, new):
                self._check_new(piece, value)
                if edits.setdefault(id(piece), value) is not value:
                    raise StructureError(
                        "tree_at: where returned one node twice, and it can't hold two values.",
                        got=describe(self.old(piece)),
                        expected="each node once; tied cells are one",
                        fix="name it once in where",
                    )
        return edits

    def _check_new(self, piece: Any, new: Any) -> None:
        if id(piece) in self.parts and not isinstance(new, Module):
            raise StructureError(
                "tree_at: a submodule can only be replaced by a module.",
                at=f"{self.parts[id(piece)][1]}  ({type(piece).__name__})",
                got=describe(new),
                expected="a module, of any structure",
                fix="nn.Lambda(lambda x: x) does nothing, where nothing should be",
            )
        if id(piece) in self.cells and isinstance(new, Variable):
            raise StructureError(
                "tree_at: a cell can't hold a Variable.",
                got=f"a {type(new).__name__}",
                expected="its value; tree_at works on values",
                fix=["replace=variable.value", "tether.replace(model, {path: variable}) shares the Variable"],
            )

    def edited(self, edits: dict[int, Any]) -> Any:
        """The tree with originals in place of marks, but for the edits."""
        parts = self._parts_by_owner(edits)
        rest = {key: new for key, new in edits.items() if key not in self.parts}
        leaves, treedef = jax.tree.flatten(self.tree, is_leaf=lambda node: id(node) in rest or id(node) in parts)
        found = set()

        def new(leaf):
            if id(leaf) in rest:
                found.add(id(leaf))
                return _by_value(rest[id(leaf)])
            if id(leaf) in parts:
                return jax.tree.map(new, replace_parts(leaf, parts[id(leaf)]))
            return _unmarked(leaf)

        tree = treedef.unflatten(map(new, leaves))
        if len(found) < len(rest) or not rest.keys().isdisjoint(parts):
            raise _nested()
        return tree

    def _parts_by_owner(self, edits: dict[int, Any]) -> dict[int, dict[str, Any]]:
        """The submodules to be replaced: of the module with this id, at this path, by what."""
        parts: dict[int, dict[str, Any]] = {}
        for key in edits.keys() & self.parts.keys():
            owner, path, _ = self.parts[key]
            new = _by_value(edits[key])
            parts.setdefault(id(owner), {}).update(dict.fromkeys(self.places[id(owner)].all_of(path), new))
        if any(is_below(path, other) for paths in parts.values() for path in paths for other in paths if path != other):
            raise _nested()
        return parts


def _mark(leaf: Any) -> Any:
    return _EmptyTuple() if _is_empty_tuple(leaf) else _Mark(leaf)


def _unmarked(leaf: Any) -> Any:
    if isinstance(leaf, _Mark):
        return leaf.original
    return () if isinstance(leaf, _EmptyTuple) else leaf


def _is_empty_tuple(node: Any) -> bool:
    return type(node) is tuple and not node


def _pieces(spot: Any, new: Any) -> list[tuple[Any, Any]]:
    """The cells that an attribute reads, with the values for them."""
    marks, treedef = jax.tree.flatten(spot)
    try:
        return list(zip(marks, treedef.flatten_up_to(new), strict=True))
    except ValueError as error:
        what = "tree_at: the new value of a State made of a pytree has another structure."
        raise structure_error(what, "replace", spot, new, fix="replace it by a tree of the same structure") from error


def _by_value(new: Any) -> Any:
    """A new value as it enters the tree: a module in it as a copy, so that no write lands in the given one."""
    nodes = jax.tree.leaves(new, is_leaf=lambda node: isinstance(node, Module))
    return jax.tree.map(lambda leaf: leaf, new) if any(isinstance(node, Module) for node in nodes) else new


def _as_many(replace: Any, count: int) -> list[Any]:
    if not isinstance(replace, Sized) or not isinstance(replace, Iterable) or len(replace) != count:
        raise StructureError(
            "tree_at: where returned a sequence, and replace is none of the same length.",
            got=describe(replace),
            expected=f"a sequence of {count}",
            fix=["give one new value for each node", "replace_fn=lambda old: new"],
        )
    return list(replace)


def _check_blind(where: Callable[[Any], Any], pytree: Any, spots: list[Any], several: bool) -> None:
    """``where`` must choose the same places in the tree itself: it may not ask what a leaf is."""
    real = where(pytree)
    found = list(real) if several and isinstance(real, list | tuple) else [real]
    if len(found) != len(spots) or not all(map(_stands_for, spots, found)):
        _refuse()


def _stands_for(spot: Any, found: Any) -> bool:
    """Whether a spot in the marked tree and a node of the tree itself can be at one place."""
    if isinstance(spot, _Mark):
        return spot.original is found
    return _is_empty_tuple(found) if isinstance(spot, _EmptyTuple) else type(spot) is type(found)


def _no_node(found: Any) -> StructureError:
    fixes = ["return a node of the tree: lambda tree: tree[0]"]
    fixes += [_IS_LEAF if found is None else "tether.view(model, select, name=value) changes a setting of a module"]
    return StructureError(
        "tree_at: where returned what is no node of the tree.",
        got="None, which has no place of its own" if found is None else describe(found),
        expected="a node, leaf, cell or submodule of the tree, or a sequence of those",
        fix=fixes,
    )


def _nested() -> StructureError:
    return StructureError(
        "tree_at: where returned a node and another one inside of it.",
        expected="nodes apart from one another",
        fix="replace them in two calls, the inner one first",
    )
