# SPDX-License-Identifier: Apache-2.0
"""``tree_check`` and ``tree_flatten_one_level``: the nodes of a tree as objects.

A tree function copies a node once for each place that it has, so a node in two places becomes two: what was one list
is no longer. Not so a module under Tether's transformations, where sharing is part of the meaning.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import keystr

from tether._modules import Module
from tether.errors import StructureError, describe

__all__ = ["tree_check", "tree_flatten_one_level"]


def tree_check(pytree: Any) -> None:
    """Checks that no node of a tree lies in itself, and none in two places.

    Leaves and empty nodes may lie in several places. So may a Tether module, and a Variable in one: what is tied stays
    tied under Tether's transformations.

    Args:
        pytree: Any tree.
    Raises:
        StructureError: a node lies in itself or in two places; with both paths.
    Example:
        >>> shared = nn.Linear(2, 3)
        >>> tether.tree_check({"encoder": shared, "decoder": shared, "sizes": [2, 2]})
    """
    _check(pytree, (), {})


def tree_flatten_one_level(pytree: Any) -> tuple[list[Any], Any]:
    """The children of a node, and its treedef; of a leaf that leaf.

    None and empty nodes are children as well.

    Args:
        pytree: Any tree.
    Raises:
        StructureError: the node is one of its own children.
    Example:
        >>> tether.tree_flatten_one_level({"a": 3, "b": (1, None)})[0]
        [3, (1, None)]
    """
    children, treedef = _one_level(pytree)
    for path, child in children:
        if child is pytree and treedef != _LEAF:
            raise _in_itself("tree_flatten_one_level", pytree, (), path)
    return [child for _, child in children], treedef


_LEAF = jax.tree.structure(0)


def _one_level(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    at_root = iter([True])  # JAX asks about the root first; a child that is the same object is not gone into
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda _: not next(at_root, False))


def _check(node: Any, path: Any, seen: dict[int, tuple[Any, Any, bool]]) -> None:
    """Checks a node and what is below it; ``seen`` has each node, its path, and whether this one lies in it."""
    if isinstance(node, Module):
        return
    children, treedef = _one_level(node)
    if treedef == _LEAF or not children:
        return
    if id(node) in seen:
        _, first, is_around = seen[id(node)]
        raise _in_itself("tree_check", node, first, path) if is_around else _in_two_places(node, first, path)
    seen[id(node)] = node, path, True  # holding it keeps its id from being used again
    for key, child in children:
        _check(child, (*path, *key), seen)
    seen[id(node)] = node, path, False


def _in_two_places(node: Any, first: Any, second: Any) -> StructureError:
    return StructureError(
        "tree_check: one node lies in two places.",
        at=f"{_place(first)} and {_place(second)}",
        got=f"the same {describe(node)}",
        expected="each node in one place, as after any tree function or transformation: each place has its own copy",
        fix=["copy it: jax.tree.map(lambda leaf: leaf, node)", "make it a tether.Module, which may be shared"],
    )


def _in_itself(name: str, node: Any, outer: Any, inner: Any) -> StructureError:
    return StructureError(
        f"{name}: a node lies in itself.",
        at=f"{_place(outer)} and {_place(inner)}",
        got=f"the same {describe(node)}",
        expected="a tree: nothing would ever get to the end of this",
    )


def _place(path: Any) -> str:
    return f"tree{keystr(path)}"
