# SPDX-License-Identifier: Apache-2.0
"""Equinox modules inside Tether models.

The other way round nothing is needed: a module of Tether is a pytree like any other, and works in Equinox's filtered
transformations and as a field of an ``equinox.Module``, by value.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np

from tether._core import Constant, Param, State, Static
from tether._core.variable import Cells
from tether._modules import Module
from tether.errors import ArgumentError, StructureError, describe
from tether.interop._packages import package
from tether.random import draw

__all__ = ["Wrapped", "wrap"]

_USER = "interop.equinox.wrap"


def wrap(module: Any, state: Any = None) -> Wrapped:
    """Makes a Module of an Equinox module, to be called, trained and saved like any other.

    Args:
        module: An ``equinox.Module``; its arrays are copied.
        state: Its ``equinox.nn.State``, where it has one: ``wrap(*equinox.nn.make_with_state(Model)(...))``.
    Raises:
        ArgumentError: no Equinox module, one whose state is missing, or equinox is not installed.
    """
    eqx = package("equinox", _USER)
    if not isinstance(module, eqx.Module):
        is_class = isinstance(module, type) and issubclass(module, eqx.Module)
        raise ArgumentError(
            f"{_USER}: this is no Equinox module.",
            got=describe(module),
            expected="an instance of an equinox.Module",
            fix=f"make one: {module.__name__}(...)" if is_class else "nn.Lambda(f) makes a layer of a function",
        )
    indices = [x for x in jax.tree.leaves(module, is_leaf=_is_index(eqx)) if _is_index(eqx)(x)]
    if (state is not None and not isinstance(state, eqx.nn.State)) or (indices and state is None):
        raise ArgumentError(
            f"{_USER}: the module has state, and this is not it." if indices else f"{_USER}: this is no state.",
            at=type(module).__name__,
            got=f"state={describe(state)}",
            expected="the equinox.nn.State of the module" if indices else "None, or an equinox.nn.State",
            fix=f"wrap(*equinox.nn.make_with_state({type(module).__name__})(...))" if indices else "wrap(module)",
        )
    return Wrapped(module, state)


def _is_index(eqx: Any) -> Any:
    return lambda x: isinstance(x, eqx.nn.StateIndex)


class Wrapped(Module):
    """An Equinox module as a Module; ``wrap`` makes it.

    A call passes its arguments on. Evaluation calls ``equinox.nn.inference_mode(module)``. Where the call of the module
    takes ``key``, it gets one from the stream in force: always if it has no default, else in training, if some layer
    has an ``inference`` flag, as dropout has. A state is read and written at each call, and doesn't show outside.

    Like all of Equinox it takes one example, unless the module was written for more: ``tether.vmap(wrapped)(batch)``,
    with ``axis_name=`` for a BatchNorm.

    Args:
        module, state: As in wrap.
    Variables:
        params: Param, each floating or complex array of the module.
        constants: Constant, each other array of it.
        state: State, each array of its state; None if it has none; written.
    Shapes:
        Those of the module.
    Raises:
        StructureError: a module with state didn't return (output, state).
    """

    def __init__(self, module: Any, state: Any = None):
        eqx = package("equinox", _USER)
        params, others = eqx.partition(module, eqx.is_inexact_array)
        constants, rest = eqx.partition(others, lambda x: isinstance(x, jax.Array | np.ndarray | np.generic))
        self.params, self.constants = Param(params), Constant(constants)
        leaves, treedef = jax.tree.flatten(rest)
        self.settings, self.form = tuple(map(_setting, leaves)), _Form(jax.tree.unflatten(treedef, range(len(leaves))))
        self.state = None if state is None else State(state)
        has_flags = lambda x: hasattr(x, "inference")
        self.has_flags = any(map(has_flags, jax.tree.leaves(module, is_leaf=has_flags)))
        self.takes_key, self.needs_key = _key_of(module)

    @property
    def module(self) -> Any:
        """The Equinox module with the arrays of now: a value, which later steps don't change."""
        settings = [x.value if isinstance(x, Static) else x for x in self.settings]
        rest = jax.tree.unflatten(self.form.treedef, settings)
        return package("equinox", _USER).combine(self.params, self.constants, rest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        eqx, module = package("equinox", _USER), self.module
        if self.has_flags and not self.training:
            module = eqx.nn.inference_mode(module)
        if self.needs_key or (self.takes_key and self.has_flags and self.training):
            kwargs["key"] = draw()
        if self.state is None:
            return module(*args, **kwargs)
        out = module(*args, self.state, **kwargs)
        if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], eqx.nn.State)):
            raise StructureError(
                "interop.equinox: a module with state didn't return its new state.",
                got=describe(out),
                expected="(output, state)",
                fix="return out, state, in the call of the Equinox module",
            )
        out, self.state = out
        return out

    def __getstate__(self) -> Any:
        fields, *others = super().__getstate__()
        return {n: _Pickled(x) if isinstance(x, Cells) else x for n, x in fields.items()}, *others


class _Pickled:
    """Cells as pickle can hold them: a treedef of Equinox's modules comes back from it as another one."""

    def __init__(self, cells: Cells):
        self._tree = jax.tree.unflatten(cells.treedef, cells.variables)

    def __reduce__(self) -> Any:
        return _cells_of, (self._tree,)


def _cells_of(tree: Any) -> Cells:
    variables, treedef = jax.tree.flatten(tree)
    return Cells(treedef, variables)


class _Form:
    """What is left of a module without its leaves: equal where the treedefs are, and pickle can hold it."""

    __slots__ = ("_numbered", "treedef")

    def __init__(self, numbered: Any):
        self._numbered, self.treedef = numbered, jax.tree.structure(numbered)

    def __hash__(self) -> int:
        return hash(self.treedef)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and self.treedef == other.treedef

    def __reduce__(self) -> Any:
        return _Form, (self._numbered,)

    def __repr__(self) -> str:
        return f"{type(self._numbered).__name__}(...)"


def _setting(leaf: Any) -> Any:
    """A leaf that is no array, to be compared by value, or else by identity."""
    try:
        hash(leaf)
    except TypeError:
        return Static(leaf)
    return leaf


def _key_of(module: Any) -> tuple[bool, bool]:
    """Whether the call of a module takes ``key``, and whether it must be given one."""
    try:
        parameter = inspect.signature(type(module).__call__).parameters.get("key")
    except (AttributeError, TypeError, ValueError):  # a module without a call, or a call that can't be looked into
        return False, False
    return parameter is not None, parameter is not None and parameter.default is inspect.Parameter.empty
