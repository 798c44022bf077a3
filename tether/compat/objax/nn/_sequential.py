# SPDX-License-Identifier: Apache-2.0
"""Layers in a row.

| Objax | here | what differs |
| --- | --- | --- |
| Sequential | the same | ``jnp.pad`` takes part without a change to it; a function without arguments, too |
| its errors | the same class and text | attributes are kept; one that can't be made anew gets a note |
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tether.compat.objax import functional
from tether.compat.objax._arguments import local_kwargs
from tether.compat.objax._objects import ModuleList
from tether.errors import TetherError

__all__ = ["Sequential"]


class Sequential(ModuleList):
    """A list of layers, each called with what the one before it returned.

    A tuple is several arguments. Of the arguments by name each layer gets those that its signature has. Any function is
    a layer. An error in a layer says which layer it was.

    Example:
        >>> net = objax.nn.Sequential([objax.nn.Linear(2, 3), objax.functional.relu, objax.nn.Dropout(0.5)])
        >>> net(jnp.ones((4, 2)), training=False).shape
        (4, 3)
        >>> net[:2](jnp.ones((4, 2))).shape
        (4, 3)
    """

    @staticmethod
    def run_layer(layer: int, f: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls one layer.

        Args:
            layer: Its number, for errors.
            f: The layer.
            args: Its arguments.
            kwargs: Arguments by name, some of which may be for other layers.
        """
        try:
            return f(*args, **(local_kwargs(kwargs, _named(f)) if kwargs else {}))
        except Exception as error:
            where = f"Sequential layer[{layer}] {f}"
            moved = _moved(error, where)
            if moved is None:
                error.add_note(where)
                raise
            raise moved from error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layers in turn."""
        out: Any = args if len(args) != 1 else args[0]
        for place, layer in enumerate(self):
            out = self.run_layer(place, layer, args, kwargs)
            args = out if isinstance(out, tuple) else (out,)
        return out

    def __getitem__(self, key: Any) -> Any:
        value = list.__getitem__(self, key)
        return Sequential(value) if isinstance(key, slice) else value


def _named(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose signature names its arguments: that of ``jnp.pad`` ends in ``**kwargs``."""
    if isinstance(f, functools.partial):
        return functools.partial(_named(f.func), *f.args, **f.keywords)
    return functional.pad if f is jnp.pad else f


def _moved(error: Exception, where: str) -> Exception | None:
    """An error of the same class that says where it was; None if the class can't be made of a text."""
    if isinstance(error, TetherError):
        moved = copy.copy(error)
        moved.what = f"{where} {error.what}"
    else:
        try:
            moved = type(error)(f"{where} {error}")
        except Exception:
            return None
    vars(moved).update({name: value for name, value in vars(error).items() if name != "what"})
    return moved
