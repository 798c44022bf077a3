# SPDX-License-Identifier: Apache-2.0
"""Equinox's Module: a frozen dataclass that is a pytree.

| Equinox | here | what differs |
| --- | --- | --- |
| Module | the same; a method comes bound as a ``jax.tree_util.Partial`` | leaves have paths |
| static_field | the same | |

It isn't a ``tether.Module``: its attributes are values, not cells, and a change makes another object. What such a
program has of state lies in the cells of ``experimental.StateIndex``.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import GetAttrKey, Partial

from tether._transforms._discovery import Searched
from tether.compat.equinox._errors import FieldError, FrozenError
from tether.compat.equinox.pretty_print import tree_pformat
from tether.errors import describe
from tether.tree import tree_equal

__all__ = ["Module", "static_field"]

_open: set[int] = set()  # ids of modules whose __init__ runs: their fields can be set


def static_field(**kwargs: Any) -> Any:
    """A field that belongs to the structure of its module and is no leaf: ``dataclasses.field`` that says so.

    Args:
        kwargs: Those of ``dataclasses.field``.
    Raises:
        ValueError: The metadata has an entry "static" already.
    """
    metadata = dict(kwargs.pop("metadata", None) or {})
    if "static" in metadata:
        raise FieldError(
            "static_field: the metadata has an entry 'static' already.",
            got=f"static={metadata['static']!r}",
            fix="leave it out: static_field sets it",
        )
    return dataclasses.field(metadata=metadata | {"static": True}, **kwargs)


class _Method:
    """A method that comes bound as a pytree, so that it goes through transformations as its module does."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self.__isabstractmethod__ = getattr(function, "__isabstractmethod__", False)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._function if instance is None else Partial(self._function, instance)


def _is_method(name: str, value: Any) -> bool:
    return inspect.isfunction(value) and not (name.startswith("__") and name.endswith("__"))


@functools.cache
def _names(cls: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a class's children, and of its static fields."""
    fields = [(field.name, field.metadata.get("static", False)) for field in dataclasses.fields(cls)]
    return tuple(name for name, static in fields if not static), tuple(name for name, static in fields if static)


def _flatten(module: Any) -> tuple[tuple[Any, ...], Any]:
    values = vars(module)
    # In __init__ some may have no value yet, and one with a default may have none of its own.
    children, rest = (tuple([name for name in names if name in values]) for names in _names(type(module)))
    return tuple([values[name] for name in children]), (children, rest, tuple([values[name] for name in rest]))


def _flatten_with_keys(module: Any) -> tuple[Any, Any]:
    children, aux = _flatten(module)
    return tuple(zip(map(GetAttrKey, aux[0]), children, strict=True)), aux


def _unflatten(cls: Any, aux: Any, children: Any) -> Any:
    names, rest, values = aux
    module = cls.__new__(cls)
    vars(module).update(zip(names, children, strict=True))
    vars(module).update(zip(rest, values, strict=True))
    return module


class _Meta(abc.ABCMeta):
    """Makes each class a dataclass and a pytree, and opens its objects while they are initialized."""

    _makes_init: bool  # whether dataclass writes the __init__: nobody above has one of one's own

    def __new__(mcs, name: str, bases: tuple[type, ...], scope: dict[str, Any]) -> Any:
        scope = {key: _Method(value) if _is_method(key, value) else value for key, value in scope.items()}
        cls: Any = super().__new__(mcs, name, bases, scope)
        cls._makes_init = "__init__" not in scope and cls._makes_init
        doc = cls.__init__.__doc__
        cls = dataclasses.dataclass(eq=False, repr=False, init=cls._makes_init)(cls)
        if cls._makes_init:
            cls.__init__.__doc__ = doc
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, functools.partial(_unflatten, cls), _flatten)
        return cls

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        self = cls.__new__(cls, *args, **kwargs)
        _open.add(id(self))
        try:
            cls.__init__(self, *args, **kwargs)
        finally:
            _open.discard(id(self))
        missing = [field.name for field in dataclasses.fields(cls) if field.init and field.name not in dir(self)]
        if missing:
            raise FieldError(
                "a module's __init__ leaves fields without a value.",
                at=cls.__qualname__,
                got=f"no value for {', '.join(missing)}",
                fix=f"set self.{missing[0]} in __init__, or give the field a default",
            )
        return self


class Module(Searched, metaclass=_Meta):
    """A frozen dataclass whose fields are its children as a pytree.

    Without an ``__init__`` one is made that takes the fields. Fields can be set in ``__init__`` only.

    Raises:
        ValueError: ``__init__`` left a field without a value.
        AttributeError: Something else than a field was set, or something later than in ``__init__``.
    Example:
        >>> class Scale(eqx.Module):
        ...     factor: jax.Array
        ...     def __call__(self, x):
        ...         return self.factor * x
        >>> float(jax.grad(lambda scale: scale(3.0))(Scale(jnp.array(2.0))).factor)
        3.0
    """

    _makes_init = True

    def __setattr__(self: Any, name: str, value: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}
        is_open = id(self) in _open
        if is_open and name in fields:
            object.__setattr__(self, name, value)
            return
        what = "'s __init__ sets something that is no field." if is_open else " can't be changed after __init__."
        raise FrozenError(
            f"a module{what}",
            at=f"{type(self).__qualname__}.{name}",
            got=describe(value),
            fix=_other_way(type(self), name, fields.get(name)),
        )

    def __delattr__(self, name: str) -> None:
        raise FrozenError(
            "a module can't be changed: nothing is deleted from it.",
            at=f"{type(self).__qualname__}.{name}",
            fix=f"eqx.tree_at(lambda module: module.{name}, module, None) is another module, without it",
        )

    def __hash__(self) -> int:
        return hash(tuple(jax.tree.leaves(self)))

    def __eq__(self, other: Any) -> Any:
        return tree_equal(self, other)

    def __repr__(self) -> str:
        return tree_pformat(self)


def _other_way(cls: Any, name: str, field: dataclasses.Field[Any] | None) -> str:
    """How to come by a module that has the value."""
    if field is None:
        return f"declare it in the class body, {name}: Any, and set it in __init__"
    if not field.metadata.get("static", False):
        return f"eqx.tree_at(lambda module: module.{name}, module, value) is another module, with that value"
    return f"dataclasses.replace(module, {name}=value)" if cls._makes_init else "make another module with that value"


class Wrapper(Module):
    """A module that stands for a function: in a class it is a method, bound as a pytree."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else Partial(self, instance)


class Static(Module):
    """A value that is part of the structure."""

    value: Any = static_field()


def update_wrapper(wrapper: Module, wrapped: Any) -> Any:
    """``functools.update_wrapper`` for a module: its name, doc, ... are those of what it wraps."""
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"):
        value = wrapped if name == "__wrapped__" else getattr(wrapped, name, None)
        if value is not None:
            object.__setattr__(wrapper, name, value)
    return wrapper
