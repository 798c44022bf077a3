# SPDX-License-Identifier: Apache-2.0
"""Taking trees of values apart by leaf and putting them together again.

Under Equinox's names and meaning, for any pytree: a mask or a predicate says which leaves stay. Here a
selection says it too (``Param``, ``"head.*"``, a class, ``where(...)``, ``~``), for the cells of modules.
All of it is by value: a module comes back as a copy of its structure, and nothing lands in the original.
"""

from __future__ import annotations

import types
from typing import Any

import jax

from tether._core import Variable
from tether._core.variable import Not
from tether._modules import Module
from tether._modules.module import variables_of
from tether._modules.selection import is_selection, matches
from tether.errors import ArgumentError, SelectionError, StructureError, describe
from tether.tree._mismatch import structure_error

__all__ = ["combine", "filter", "partition"]

_SPEC = "True, False, a function of one leaf, or a selection (Param, 'head.*', a class, where(...), ~)"


def filter(pytree: Any, filter_spec: Any, inverse: bool = False, replace: Any = None, is_leaf: Any = None) -> Any:
    """The tree with only some of its leaves; ``replace`` stands in the place of the others.

    A selection chooses cells of the modules in the tree (a frozen cell is no ``Param``), and no leaf outside of them.

    Args:
        pytree: Any tree; a module in it is one node, and is copied.
        filter_spec: A tree of bools, of predicates of one leaf and of selections, that is a prefix of ``pytree``.
        inverse: Keep what would be left out, leave out what would be kept.
        replace: What stands for a leaf that is left out.
        is_leaf: What counts as a leaf, as in ``jax.tree.map``.
    Raises:
        StructureError: ``filter_spec`` is no prefix of ``pytree``, or something else stands in it.
        SelectionError: A selection names nothing in any module of the tree.
    Example:
        >>> tether.filter({"w": jnp.ones(2), "name": "a"}, tether.is_array)["name"] is None
        True
        >>> len(jax.tree.leaves(tether.filter(nn.BatchNorm(4), tether.Param)))
        2
    """
    mask = _mask("filter", pytree, filter_spec, is_leaf)
    return jax.tree.map(lambda keep, leaf: leaf if keep != bool(inverse) else replace, mask, pytree)


def partition(pytree: Any, filter_spec: Any, replace: Any = None, is_leaf: Any = None) -> tuple[Any, Any]:
    """What ``filter`` keeps and what it leaves out; ``combine`` puts the two together again.

    Args:
        pytree, filter_spec, replace, is_leaf: As for ``filter``.
    Raises:
        StructureError, SelectionError: As for ``filter``.
    Example:
        >>> tether.partition([1, 2.0], lambda leaf: isinstance(leaf, int))
        ([1, None], [None, 2.0])
    """
    mask = _mask("partition", pytree, filter_spec, is_leaf)
    kept = jax.tree.map(lambda keep, leaf: leaf if keep else replace, mask, pytree)
    return kept, jax.tree.map(lambda keep, leaf: replace if keep else leaf, mask, pytree)


def combine(*pytrees: Any, is_leaf: Any = None) -> Any:
    """One tree of several of one structure: for each leaf the first that is not None.

    Args:
        pytrees: Trees of the structure of the first, as ``partition`` gives them.
        is_leaf: What counts as a leaf, as in ``jax.tree.map``; None always does.
    Raises:
        StructureError: A tree has another structure.
        ArgumentError: No tree.
    Example:
        >>> tether.combine([1, None], [None, 2])
        [1, 2]
    """
    if not pytrees:
        raise ArgumentError("combine: no tree was given.", got="combine()", fix="combine(kept, rest)")

    def stop(leaf):
        return leaf is None or (is_leaf is not None and is_leaf(leaf))

    leaves, treedef = jax.tree.flatten(pytrees[0], is_leaf=stop)
    columns = [leaves]
    for number, tree in enumerate(pytrees[1:], 1):
        try:
            columns.append(treedef.flatten_up_to(tree))
        except ValueError as error:
            what = "combine: the trees don't have one structure."
            raise structure_error(what, f"tree {number}", pytrees[0], tree, stop, _TREES) from error
    return treedef.unflatten([next((x for x in leaf if x is not None), None) for leaf in zip(*columns, strict=True)])


_TREES = "give trees of one structure, as the two that tether.partition returns"


def _mask(name: str, pytree: Any, spec: Any, is_leaf: Any) -> Any:
    """A tree of bools that is a prefix of ``pytree``: which leaves the spec says."""
    specs, treedef = jax.tree_util.tree_flatten_with_path(spec, is_leaf=_selects)
    try:
        subtrees = treedef.flatten_up_to(pytree)
    except ValueError as error:
        what = f"{name}: filter_spec is not a prefix of the tree."
        fix = "give one bool, predicate or selection for the whole tree, or a tree of them of its structure"
        raise structure_error(what, "pytree", spec, pytree, _selects, fix) from error
    marks = [_marks(name, path, part, tree, is_leaf) for (path, part), tree in zip(specs, subtrees, strict=True)]
    return treedef.unflatten(marks)


def _marks(name: str, path: Any, spec: Any, subtree: Any, is_leaf: Any) -> Any:
    """The mask of one subtree, of one leaf of the spec."""
    if isinstance(spec, bool):
        return jax.tree.map(lambda _: spec, subtree, is_leaf=is_leaf)
    if _selects(spec):
        return _selected(name, path, spec, subtree)
    if callable(spec):
        return jax.tree_util.tree_map_with_path(
            lambda place, leaf: _answer(name, spec, (*path, *place), leaf), subtree, is_leaf=is_leaf
        )
    raise StructureError(
        f"{name}: a leaf of filter_spec is neither bool, predicate nor selection.",
        at=f"filter_spec{jax.tree_util.keystr(path)}",
        got=describe(spec),
        expected=_SPEC,
        fix="give a Python bool; inside a transformation a mask can't depend on the values of arrays",
    )


def _answer(name: str, predicate: Any, path: Any, leaf: Any) -> bool:
    answer = predicate(leaf)
    try:
        if answer is None:
            raise TypeError("a predicate that returns nothing")
        return bool(answer)
    except (TypeError, ValueError) as error:  # of a tracer, of an array of several elements
        raise StructureError(
            f"{name}: the predicate says neither True nor False about a leaf.",
            at=f"pytree{jax.tree_util.keystr(path)}",
            got=describe(answer),
            expected="a Python bool",
            fix="ask about what is known while tracing: shape, dtype, type",
        ) from error


def _selects(spec: Any) -> bool:
    """Whether a (sub)tree of the spec is one selection, not a node with bools or predicates below it."""
    return is_selection(spec) and not any(map(_is_mask, spec if isinstance(spec, list | tuple) else [spec]))


def _is_mask(spec: Any) -> bool:
    """Whether it is a module of bools or predicates, as ``jax.tree.map(lambda _: True, model)`` makes one."""
    if not isinstance(spec, Module):
        return False
    values = jax.tree.leaves(spec)
    return not values or any(isinstance(value, bool) or callable(value) for value in values)


def _selected(name: str, path: Any, select: Any, subtree: Any) -> Any:
    """The mask that a selection makes of a subtree: cells of its modules, and Variables that lie bare in it."""
    nodes, treedef = jax.tree.flatten(subtree, is_leaf=lambda node: isinstance(node, Module))
    if isinstance(select, str) and not any(isinstance(node, Module | Variable) for node in nodes):
        raise SelectionError(
            f"{name}: a path stands where the tree has no module.",
            at=f"filter_spec{jax.tree_util.keystr(path)}",
            got=repr(select),
            expected="True, False or a function of one leaf, for leaves of no module",
        )
    chosen = _chosen(select, [node for node in nodes if isinstance(node, Module)])
    return treedef.unflatten([_node_mask(node, select, chosen) for node in nodes])


def _chosen(select: Any, holders: list[Module]) -> set[Variable]:
    """The selected cells of several modules: the selection must name something in one of them."""
    chosen: set[Variable] = set()
    refusals = []
    for holder in holders:
        try:
            chosen.update(matches(select, holder))
        except SelectionError as error:
            refusals.append(error)
    if refusals and len(refusals) == len(holders):
        raise refusals[0]
    return chosen


def _node_mask(node: Any, select: Any, chosen: set[Variable]) -> Any:
    if not isinstance(node, Module):
        return isinstance(node, Variable) and _names_bare(select, node)
    values, treedef = jax.tree.flatten(node, is_leaf=lambda value: value is not node)
    cells = zip(values, variables_of(node), strict=True)
    # A cell that an earlier filter left out holds None, which is no leaf: it stays None.
    return treedef.unflatten([None if value is None else cell in chosen for value, cell in cells])


def _names_bare(select: Any, variable: Variable) -> bool:
    """Whether a selection names a Variable that lies in a tree by itself: it has a kind, and no path."""
    if isinstance(select, Not):
        return not _names_bare(select.select, variable)
    if isinstance(select, list | tuple | set | frozenset):
        return any(_names_bare(part, variable) for part in select)
    return select is variable or (isinstance(select, type | types.UnionType) and isinstance(variable, select))
