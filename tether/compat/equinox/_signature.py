# SPDX-License-Identifier: Apache-2.0
"""Specifications by argument: ``args=`` and ``kwargs=`` of the filtered transformations.

| Equinox | here | what differs |
| --- | --- | --- |
| the binding of specifications in filter_jit, filter_vmap and filter_pmap | ``Specs`` | one place |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tether.compat.equinox._errors import SpecError
from tether.compat.equinox.module import Module, static_field
from tether.errors import describe

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Specs(Module):
    """What to do with each argument of a function: as said for it, else the default."""

    _signature: inspect.Signature = static_field()
    _default: Any
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]

    @classmethod
    def of(cls, name: str, fun: Callable[..., Any], default: Any, args: Any, kwargs: Any) -> Specs:
        """The specifications of the arguments of ``fun``; ``name`` is the transformation's."""
        signature = inspect.signature(fun)
        parameters = [p if p.kind in _VARIADIC else p.replace(default=default) for p in signature.parameters.values()]
        try:
            bound = signature.replace(parameters=parameters).bind_partial(*args, **(kwargs or {}))
        except TypeError as error:
            raise SpecError(
                f"{name}: args= and kwargs= don't fit the signature of the function.",
                at=getattr(fun, "__qualname__", type(fun).__qualname__),
                got=f"args={describe(args)}, kwargs={describe(kwargs)}: {error}",
                expected=str(signature),
                fix="a tuple of specifications in args=, and a dict by the names of arguments in kwargs=",
            ) from error
        bound.apply_defaults()
        return cls(signature, default, bound.args, bound.kwargs)

    def bind(self, args: Any, kwargs: Any) -> tuple[Any, Any, tuple[Any, Any]]:
        """The arguments of a call with their defaults, and the specification of each."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        more = (self._default,) * (len(bound.args) - len(self._args))
        by_name = {key: self._kwargs.get(key, self._default) for key in bound.kwargs}
        return bound.args, bound.kwargs, (self._args + more, by_name)
