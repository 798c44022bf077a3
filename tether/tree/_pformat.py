# SPDX-License-Identifier: Apache-2.0
"""``tree_pformat`` and ``tree_pprint``: a tree in words, arrays as dtype and shape.

The layout is that of ``wadler_lindig``: what fits a line stays on it, and the rest is broken from the outside in.
An object with a ``__pdoc__`` says itself how it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import wadler_lindig as wl

from tether._core import Static, Variable
from tether._core.frame import peek
from tether._core.structure import Reference
from tether._core.variable import Cells
from tether._modules import Module

__all__ = ["tree_pformat", "tree_pprint"]


def tree_pformat(
    pytree: Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] = lambda node: False,
) -> str:
    """The tree as text, with ``f32[3,4]`` for an array.

    A module is written with its attributes, and a cell with its kind: ``weight=Param(f32[3,4])``. Fields of a dataclass
    that have their default are left out.

    Args:
        pytree: Anything.
        width: Longest line, in characters, where that can be kept.
        indent: Of each level, in characters.
        short_arrays: Whether arrays are written by dtype and shape; else by their ``repr``.
        struct_as_array: Whether a ``jax.ShapeDtypeStruct`` is, too.
        truncate_leaf: What is written by its class alone, ``Linear(...)``: asked about everything on the way down.
    Example:
        >>> tether.tree_pformat({"x": jnp.ones((3, 4)), "y": np.arange(2), "f": len})
        "{'x': f32[3,4], 'y': i64[2](numpy), 'f': <built-in function len>}"
        >>> tether.tree_pformat(nn.Linear(2, 3), truncate_leaf=lambda node: isinstance(node, nn.Linear))
        'Linear(...)'
    """
    custom = _Layout(indent, short_arrays, struct_as_array, truncate_leaf)
    return wl.pformat(pytree, width=width, **custom.options)


def tree_pprint(
    pytree: Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] = lambda node: False,
) -> None:
    """Prints ``tree_pformat`` of the tree.

    Args:
        pytree, width, indent, short_arrays, struct_as_array, truncate_leaf: As for ``tree_pformat``.
    Example:
        >>> tether.tree_pprint(jax.tree.leaves(nn.Linear(2, 3)))
        [f32[3,2], f32[3]]
    """
    options = {"width": width, "indent": indent, "short_arrays": short_arrays, "struct_as_array": struct_as_array}
    print(tree_pformat(pytree, **options, truncate_leaf=truncate_leaf))


class _Layout:
    """How things are written that wadler_lindig doesn't know, or writes in another way; it asks about each."""

    def __init__(self, indent: int, short_arrays: bool, struct_as_array: bool, truncate_leaf: Callable[[Any], bool]):
        self._short_arrays, self._struct_as_array, self._truncate_leaf = short_arrays, struct_as_array, truncate_leaf
        self.options: Any = {"indent": indent, "short_arrays": short_arrays, "custom": self, "seen_ids": set()}

    def __call__(self, obj: Any) -> wl.AbstractDoc | None:
        if self._truncate_leaf(obj):
            return _truncated(obj)
        if isinstance(obj, jax.Array | jax.ShapeDtypeStruct):
            return self._array(obj)
        if isinstance(obj, jax.custom_jvp | jax.custom_vjp):
            return self._doc(obj.__wrapped__)
        if isinstance(obj, jax.tree_util.Partial):
            return self._named("Partial", {"func": obj.func, "args": obj.args, "keywords": obj.keywords})
        if isinstance(obj, jax.stages.Wrapped):
            return wl.TextDoc(f"<jitted function {getattr(obj, '__qualname__', '')}>")  # its repr has an address
        return self._part(obj)

    def _part(self, obj: Any) -> wl.AbstractDoc | None:
        """A module, or what lies in one in the place of a value."""
        if isinstance(obj, Module):
            return self._named(type(obj).__name__, vars(obj))
        if isinstance(obj, Variable):
            return self._bracketed(type(obj).__name__, [self._doc(peek(obj))])
        if isinstance(obj, Cells):
            return self._doc(jax.tree.unflatten(obj.treedef, obj.variables))
        if isinstance(obj, Static):
            return self._doc(obj.value)
        return _truncated(obj.target) if isinstance(obj, Reference) else None

    def _array(self, obj: Any) -> wl.AbstractDoc | None:
        if not self._short_arrays or not (self._struct_as_array or isinstance(obj, jax.Array)):
            return None
        weak = "weak_" if getattr(obj, "weak_type", False) else ""
        return wl.array_summary(obj.shape, weak + obj.dtype.name, kind=None)

    def _doc(self, obj: Any) -> wl.AbstractDoc:
        return wl.pdoc(obj, **self.options)

    def _named(self, name: str, fields: Mapping[str, Any]) -> wl.AbstractDoc:
        return self._bracketed(name, wl.named_objs(fields.items(), **self.options))

    def _bracketed(self, name: str, docs: Sequence[wl.AbstractDoc]) -> wl.AbstractDoc:
        return wl.bracketed(wl.TextDoc(f"{name}("), docs, wl.comma, wl.TextDoc(")"), self.options["indent"])


def _truncated(obj: Any) -> wl.AbstractDoc:
    return wl.TextDoc(f"{type(obj).__name__}(...)")
