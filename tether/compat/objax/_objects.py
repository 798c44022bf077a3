# SPDX-License-Identifier: Apache-2.0
"""Modules: objects with variables, and functions as such.

| Objax | here | what differs |
| --- | --- | --- |
| Module | a plain object that Tether looks into | ``vars`` finds modules in lists, tuples and dicts, too |
| ModuleList | a list | the same |
| Function(f, vc), ForceArgs | wrappers | the same |
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

from tether._transforms._discovery import Reach, Searched
from tether.compat.objax._arguments import override_args_kwargs
from tether.compat.objax._names import class_name, repr_function
from tether.compat.objax.variable import BaseVar, VarCollection, owners

__all__ = ["ForceArgs", "Function", "Module", "ModuleList"]


class Module(Searched):
    """An object whose attributes may be variables and other modules.

    Example:
        >>> class Net(objax.Module):
        ...     def __init__(self):
        ...         self.layers = [objax.nn.Linear(2, 3), objax.nn.Linear(3, 1)]
        >>> list(Net().vars().keys())[:2]
        ['(Net).layers[0](Linear).b', '(Net).layers[0](Linear).w']
    """

    def vars(self, scope: str = "") -> VarCollection:
        """All variables in it, by name.

        Args:
            scope: What the names begin with.
        """
        scope += f"({type(self).__name__})."
        found = VarCollection()
        for name, part in self.__dict__.items():
            place = scope[:-1] if name == "__wrapped__" else scope + name
            found.update([(place, part)] if isinstance(part, BaseVar) else _vars_of(part, place))
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        raise NotImplementedError


def _vars_of(part: Any, scope: str) -> Iterator[tuple[str, BaseVar]]:
    """The variables of modules. A plain container is searched for modules; variables in it alone are not found."""
    if isinstance(part, Module):
        yield from part.vars(scope=scope).items()
    elif isinstance(part, list | tuple | dict) and not isinstance(part, VarCollection):
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _vars_of(item, f"{scope}[{key!r}]")


class ModuleList(Module, list):
    """A list of modules and variables, itself a module."""

    def vars(self, scope: str = "") -> VarCollection:
        """All variables of its items, by name."""
        scope += f"({type(self).__name__})"
        found = VarCollection()
        for place, part in enumerate(self):
            name = f"{scope}[{place}]"
            found.update([(name, part)] if isinstance(part, BaseVar) else _vars_of(part, name))
        return found

    def __getitem__(self, key: Any) -> Any:
        value = list.__getitem__(self, key)
        return ModuleList(value) if isinstance(key, slice) else value

    def __repr__(self) -> str:
        entries = "\n".join(f"  [{place}] {_indented(part)}" for place, part in enumerate(self))
        return f"{class_name(self)}(\n{entries}\n)"


def _indented(part: Any) -> str:
    if not isinstance(part, Module) and callable(part):
        return repr_function(part)
    return repr(part).replace("\n", "\n  ")


class Function(Module):
    """A function as a module.

    Args:
        f: The function or module.
        vc: The variables that it uses.
    """

    def __init__(self, f: Callable[..., Any], vc: VarCollection):
        prefix = f"{{{f.__name__}}}" if hasattr(f, "__name__") else ""
        self.vc = VarCollection((prefix + name, variable) for name, variable in vc.items())
        self.__wrapped__ = f

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function computes."""
        return self.__wrapped__(*args, **kwargs)

    def vars(self, scope: str = "") -> VarCollection:
        """The variables that it was given."""
        return VarCollection((scope + name, variable) for name, variable in self.vc.items())

    @staticmethod
    def with_vars(vc: VarCollection) -> Callable[[Callable[..., Any]], Function]:
        """A decorator that makes a function with these variables a module."""
        return lambda f: Function(f, vc)

    @staticmethod
    def auto_vars(f: Callable[..., Any]) -> Function:
        """Makes a function a module of the variables that its source names; a decorator, too."""
        from tether.compat.objax.util.tracing import find_used_variables  # noqa: PLC0415  (it needs Module)

        return Function(f, find_used_variables(f))

    def __repr__(self) -> str:
        return f"{class_name(self)}(f={repr_function(self.__wrapped__)})"


class ForceArgs(Module):
    """A module some of whose arguments are forced to be others than a call says.

    Args:
        module: The module.
        **kwargs: The arguments, by name.
    """

    ANY = namedtuple("ANY", ())
    """Stands for any value in ``undo``."""

    def __init__(self, module: Module, **kwargs: Any):
        self.__wrapped__ = module
        self.forced_kwargs = kwargs

    @staticmethod
    def undo(module: Module, **kwargs: Any) -> None:
        """Takes forced arguments away again, here and in all parts.

        Args:
            module: Where to begin.
            **kwargs: Which: those of this value, or ``ForceArgs.ANY``; without any, all.
        """
        if isinstance(module, ForceArgs):
            module.forced_kwargs = {
                name: value
                for name, value in module.forced_kwargs.items()
                if kwargs and (name not in kwargs or kwargs[name] not in (value, ForceArgs.ANY))
            }
            ForceArgs.undo(module.__wrapped__, **kwargs)
            return
        parts: Any = enumerate(module) if isinstance(module, ModuleList) else list(module.__dict__.items())
        for place, part in parts:
            if isinstance(part, Module):
                ForceArgs.undo(part, **kwargs)
            if isinstance(part, ForceArgs) and not part.forced_kwargs:
                if isinstance(module, ModuleList):
                    module[place] = part.__wrapped__
                else:
                    setattr(module, place, part.__wrapped__)

    def vars(self, scope: str = "") -> VarCollection:
        """The variables of the module."""
        return self.__wrapped__.vars(scope=scope)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with the forced arguments."""
        new, kwargs = override_args_kwargs(self.__wrapped__, args, kwargs, self.forced_kwargs)
        return self.__wrapped__(*new, **kwargs)

    def __repr__(self) -> str:
        args = ", ".join(f"{name}={value!r}" for name, value in self.forced_kwargs.items())
        return f"{class_name(self)}(module={repr_function(self.__wrapped__)}, {args})"


def discovered(f: Callable[..., Any]) -> VarCollection:
    """The variables that a function can come by: through calls, containers, partials, globals, closures, ``self``."""
    if isinstance(f, Module):
        found = f.vars()
    else:
        found = VarCollection()
    reach = Reach()
    reach.add(f, "")
    known = {id(variable) for variable in found}
    for cell, name in reach.variables().items():
        for variable in owners([cell]):
            if id(variable) not in known:
                found[_free(found, name)] = variable
    return found


def _free(found: VarCollection, name: str) -> str:
    number, free = 1, name
    while free in found:
        number, free = number + 1, f"{name}#{number}"
    return free
