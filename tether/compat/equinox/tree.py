# SPDX-License-Identifier: Apache-2.0
"""Surgery on trees, and their comparison.

| Equinox | here | what differs |
| --- | --- | --- |
| tree_at | ``tether.tree_at`` | each ``()`` is a node of its own; one node twice with two values is an error |
| tree_equal | ``tether.tree_equal`` | arrays on different devices can be compared |
| tree_inference | the same | |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from tether._core import trace as _trace
from tether.compat.equinox._errors import SpecError, StateError, raised_as
from tether.tree import tree_at as _tree_at
from tether.tree import tree_equal

__all__ = ["tree_at", "tree_equal", "tree_inference"]

_UNSET: Any = object()


def tree_at(
    where: Callable[[Any], Any],
    pytree: Any,
    replace: Any = _UNSET,
    replace_fn: Any = _UNSET,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """A copy of the tree with other values at the nodes that ``where`` returns.

    Args:
        where: Function of the tree, returns a node of it or a sequence of nodes; may not look at leaves.
        pytree: Any tree.
        replace: What to put there; for a sequence of nodes a sequence of the same length.
        replace_fn: In place of ``replace``: a function of the old node that gives the new one.
        is_leaf: What counts as a leaf, as in ``jax.tree.map``; ``lambda x: x is None`` to replace a None.
    Raises:
        ValueError, TypeError: ``where`` returns what is no node of the tree, two that lie in one another, or looks at
            leaves; ``replace`` is not of that length; both or none of ``replace`` and ``replace_fn``.
    Example:
        >>> eqx.tree_at(lambda t: t["a"], {"a": 1, "b": 2}, 10)
        {'a': 10, 'b': 2}
    """
    given = {"replace": replace, "replace_fn": replace_fn}
    with raised_as(SpecError):
        return _tree_at(where, pytree, is_leaf=is_leaf, **{k: v for k, v in given.items() if v is not _UNSET})


def tree_inference(pytree: Any, value: bool) -> Any:
    """A copy of the tree in which every ``inference`` attribute has this value.

    Args:
        pytree: Any tree, of layers.
        value: True for evaluation, False for training.
    Raises:
        RuntimeError: A transformation is under way: what was compiled goes by the flag that it saw.
    Example:
        >>> eqx.tree_inference(eqx.experimental.StateIndex(), True).inference
        True
    """
    if any(map(_trace.is_staged, _trace.chain(_trace.current()))):
        raise StateError(
            "tree_inference: inference flags can't be set inside a compiled function.",
            fix="model = eqx.tree_inference(model, value) before the call, and the model as an argument of it",
        )
    return tree_at(lambda tree: [node.inference for node in _flagged(tree)], pytree, replace_fn=lambda _: value)


def _flagged(tree: Any, root: Any = _UNSET) -> Iterator[Any]:
    """Every node with an inference flag, those inside of others too."""
    stop = lambda node: node is not root and hasattr(node, "inference")
    for node in jax.tree.leaves(tree, is_leaf=stop):
        if stop(node):
            yield node
            yield from _flagged(node, node)
