# SPDX-License-Identifier: Apache-2.0
"""Where two trees part, in words: the first path at which one doesn't continue the other.

JAX's own message prints the contents of nodes and, for a module, its whole structure. This one names
the path and what stands there on both sides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from tether._modules import Module
from tether._modules.module import variables_of
from tether.errors import StructureError, describe

__all__ = ["Mismatch", "mismatch", "structure_error"]


_LEAF = jax.tree.structure(0)  # treedef_is_leaf is true of None and () as well


class Mismatch(NamedTuple):
    """The first place where two trees part, and what each of them has there."""

    path: tuple[Any, ...]
    prefix: str
    full: str


def mismatch(prefix: Any, full: Any, is_leaf: Any = None) -> Mismatch | None:
    """The first path at which ``full`` doesn't continue ``prefix``; None where it does everywhere."""
    if is_leaf is not None and is_leaf(prefix):
        return None
    children, node = _one_level(prefix)
    if node == _LEAF:
        return None
    others, other = _one_level(full)
    if node != other:
        return Mismatch((), *_both(prefix, children, full, others))
    for (key, child), (_, counterpart) in zip(children, others, strict=True):
        if found := mismatch(child, counterpart, is_leaf):
            return found._replace(path=(*key, *found.path))
    return None


def structure_error(what: str, root: str, prefix: Any, full: Any, is_leaf: Any = None, fix: Any = None):
    """The error for two trees that part, as ``mismatch`` finds it; ``root`` is the name of ``full``."""
    found = mismatch(prefix, full, is_leaf) or Mismatch((), "this structure", "another structure")
    at = f"{root}{jax.tree_util.keystr(found.path)}"
    return StructureError(what, at=at, got=found.full, expected=found.prefix, fix=fix)


def _one_level(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)


def _both(one: Any, children: list[Any], two: Any, others: list[Any]) -> tuple[str, str]:
    """What to say about two nodes that differ: more of each, as far as that tells them apart."""
    first, second = _node(one), _node(two)
    if type(one) is not type(two) or isinstance(one, list | tuple):
        return first, second
    mine, theirs = ([jax.tree_util.keystr(key) for key, _ in level] for level in (children, others))
    only_mine = next((key for key in mine if key not in theirs), None)
    only_theirs = next((key for key in theirs if key not in mine), None)
    if only_mine or only_theirs:
        return f"{first} {_holding(only_mine, only_theirs)}", f"{second} {_holding(only_theirs, only_mine)}"
    if first != second:
        return first, second
    what = "settings, kinds, ties or modes" if isinstance(two, Module) else "data of the node"
    return first, f"{second} and other {what}"


def _holding(mine: str | None, theirs: str | None) -> str:
    return f"with {mine}" if mine else f"without {theirs}"


def _node(tree: Any) -> str:
    if isinstance(tree, Module):
        return f"{type(tree).__name__} with {len(variables_of(tree))} cells"
    return describe(tree)
