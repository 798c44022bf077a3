# SPDX-License-Identifier: Apache-2.0
"""Trees in two parts: what is traced, and the rest in a form that can be hashed.

| Equinox | here | what differs |
| --- | --- | --- |
| hashable_partition, hashable_combine | ``split``, ``joined`` | one flatten where only arrays are traced |
| get_fun_names | ``names_of`` | nothing |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from tether.tree import is_array, partition


class _Hole:
    """Stands among the static leaves for one that is traced, and the other way round."""

    def __repr__(self) -> str:
        return "a traced leaf"


_HOLE = _Hole()


def split(tree: Any, spec: Any) -> tuple[list[Any], tuple[tuple[Any, ...], Any]]:
    """The leaves that a spec chooses, None for the others; and the others, with the structure."""
    leaves, treedef = jax.tree.flatten(tree)
    if spec is is_array:
        chosen = list(map(is_array, leaves))
    else:
        kept, _ = partition(tree, spec, replace=_HOLE)
        chosen = [leaf is not _HOLE for leaf in jax.tree.leaves(kept)]
    pairs = list(zip(leaves, chosen, strict=True))
    static = tuple(_HOLE if is_chosen else leaf for leaf, is_chosen in pairs)
    return [leaf if is_chosen else None for leaf, is_chosen in pairs], (static, treedef)


def joined(dynamic: list[Any], static: tuple[tuple[Any, ...], Any]) -> Any:
    """The tree that was split."""
    rest, treedef = static
    leaves = [leaf if other is _HOLE else other for leaf, other in zip(dynamic, rest, strict=True)]
    return jax.tree.unflatten(treedef, leaves)


def by_tree(make: Callable[..., Any]) -> Callable[..., Any]:
    """A cache for a function of pytrees whose leaves can be hashed."""

    @functools.cache
    def made(leaves: tuple[Any, ...], treedef: Any) -> Any:
        args, kwargs = jax.tree.unflatten(treedef, leaves)
        return make(*args, **kwargs)

    def cached(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        return made(tuple(leaves), treedef)

    return cached


def names_of(fun: Any) -> tuple[str, str]:
    """Name and qualified name of a function, of what it wraps, or of its class."""
    while True:
        if hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        elif isinstance(fun, functools.partial):
            fun = fun.func
        else:
            break
    named = fun if hasattr(fun, "__qualname__") else type(fun)
    return named.__name__, named.__qualname__
