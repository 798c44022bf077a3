# SPDX-License-Identifier: Apache-2.0
"""A tree as text.

| Equinox | here | what differs |
| --- | --- | --- |
| tree_pformat | the same words, laid out by ``wadler_lindig`` | fields may share a line below the first |

``tether.tree_pformat`` is today's Equinox's: it marks weak types, hides defaults, and names functions by their place.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import wadler_lindig as wl

__all__ = ["tree_pformat"]


def tree_pformat(
    pytree: Any,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    follow_wrapped: bool = True,
    truncate_leaf: Callable[[Any], bool] = lambda node: False,
) -> str:
    """The tree as text, with ``f32[3,4]`` for an array; the ``repr`` of a Module.

    Args:
        pytree: Anything.
        width: Longest line, in characters, where that can be kept.
        indent: Of each level, in characters.
        short_arrays: Whether arrays are written by dtype and shape; else by their ``repr``.
        follow_wrapped: Whether a function is written for what wraps it: ``functools.partial``, ``functools.wraps``.
        truncate_leaf: What is written by its class alone, ``Linear(...)``: asked about everything on the way down.
    Example:
        >>> eqx.tree_pformat([jnp.ones((3, 4)), np.arange(2), {"f": lambda x: x}])
        "[f32[3,4], i64[2](numpy), {'f': <function <lambda>>}]"
    """
    custom = _Layout(indent, short_arrays, follow_wrapped, truncate_leaf)
    return wl.pformat(pytree, width=width, **custom.options)


class _Layout:
    """How everything but containers is written; wadler_lindig asks about each object."""

    def __init__(self, indent: int, short_arrays: bool, follow_wrapped: bool, truncate_leaf: Callable[[Any], bool]):
        self._short_arrays, self._follow_wrapped, self._truncate_leaf = short_arrays, follow_wrapped, truncate_leaf
        self.options: Any = {"indent": indent, "custom": self, "seen_ids": set()}

    def __call__(self, obj: Any) -> wl.AbstractDoc | None:
        if self._truncate_leaf(obj):
            return wl.TextDoc(f"{type(obj).__name__}(...)")
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            fields = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if field.repr}
            return self._named(type(obj).__name__, fields)
        if isinstance(obj, list | dict | tuple):
            return None
        if isinstance(obj, jax.Array | np.ndarray) and self._short_arrays:
            return wl.array_summary(obj.shape, obj.dtype.name, "numpy" if isinstance(obj, np.ndarray) else None)
        if isinstance(obj, jax.tree_util.Partial) and self._follow_wrapped:
            return self._named("Partial", {"func": obj.func, "args": obj.args, "keywords": obj.keywords})
        return self._function(obj, "function")

    def _function(self, obj: Any, word: str) -> wl.AbstractDoc:
        if isinstance(obj, jax.custom_jvp | jax.custom_vjp):
            return self._function(obj.__wrapped__, word)
        if self._follow_wrapped and hasattr(obj, "__wrapped__"):
            return self._function(obj.__wrapped__, "wrapped function")
        if self._follow_wrapped and isinstance(obj, functools.partial):
            return self._function(obj.func, "wrapped function")
        if isinstance(obj, types.FunctionType):
            return wl.TextDoc(f"<{word} {obj.__name__}>")
        return wl.TextDoc(repr(obj))

    def _named(self, name: str, fields: dict[str, Any]) -> wl.AbstractDoc:
        docs = wl.named_objs(fields.items(), **self.options)
        return wl.bracketed(wl.TextDoc(f"{name}("), docs, wl.comma, wl.TextDoc(")"), self.options["indent"])
