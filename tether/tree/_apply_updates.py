# SPDX-License-Identifier: Apache-2.0
"""``apply_updates``: a tree with updates added to its leaves."""

from __future__ import annotations

from typing import Any

import jax

from tether.tree._mismatch import structure_error

__all__ = ["apply_updates"]


def apply_updates(model: Any, updates: Any) -> Any:
    """The tree with an update added to each leaf, and no change where the update is None.

    By value, for a loop that threads its model; ``tether.Optimizer`` changes a model in place. A dtype is that of the
    sum: ``optax.apply_updates`` casts it back, and takes neither None nor a prefix.

    Args:
        model: Any tree; a module in it is copied.
        updates: A prefix of ``model``, as an optax transformation makes it of gradients.
    Raises:
        StructureError: ``updates`` is no prefix of ``model``.
    Example:
        >>> tether.apply_updates([1.0, "a"], [0.5, None])
        [1.5, 'a']
    """
    stop = lambda update: update is None
    parts, treedef = jax.tree.flatten(updates, is_leaf=stop)
    try:
        olds = treedef.flatten_up_to(model)
    except ValueError as error:
        what = "apply_updates: the updates are no prefix of the model."
        fix = "give updates of the structure of the model, None where nothing changes"
        raise structure_error(what, "model", updates, model, stop, fix) from error
    return treedef.unflatten(old if new is None else old + new for old, new in zip(olds, parts, strict=True))
