# SPDX-License-Identifier: Apache-2.0
"""Functions of arrays whose closed-over arrays are arguments, too: only of arguments has a custom rule gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core


class Hoisted:
    """A traced function. It is called with the arrays that it closes over, then its arguments.

    Args:
        fun: The function.
        *args: Its arguments; only their shapes and dtypes count.

    Attributes:
        consts: What it closes over.
        avals: The avals of its results.
    """

    def __init__(self, fun: Callable[..., Any], *args: Any):
        self._closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        self.consts, self.avals = list(self._closed.consts), self._closed.out_avals
        self._treedef = jax.tree.structure(out)

    def __call__(self, consts: list[Any], *args: Any) -> Any:
        out = jax.core.eval_jaxpr(self._closed.jaxpr, consts, *jax.tree.leaves(args))
        return self._treedef.unflatten(out)


def settled(body: Callable[..., Any], carry: list[Any], *args: Any) -> tuple[Hoisted, list[Any]]:
    """A loop's body, whose first results are the carry; and the entry, weakly typed only where the body's carry is."""
    while True:
        hoisted = Hoisted(body, carry, *args)
        weak = [is_weak(leaf) and not is_weak(after) for leaf, after in zip(carry, hoisted.avals, strict=False)]
        if not any(weak):
            return hoisted, carry
        strong = [jax.lax.convert_element_type(leaf, leaf.dtype) for leaf in carry]
        carry = [new if flag else leaf for new, leaf, flag in zip(strong, carry, weak, strict=True)]


def is_weak(value: Any) -> bool:
    return getattr(value, "weak_type", False)  # a key has none
