# SPDX-License-Identifier: Apache-2.0
"""Modules: plain Python objects built of Variables, Modules, containers of those, and settings.

An attribute that holds a cell reads and writes the array in it. A module is sealed when the outermost
constructor returns, and is one pytree node: its children are the values of its distinct Variables, its
auxiliary data is its Structure.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import importlib
import inspect
import operator
import reprlib
import types
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar, dataclass_transform

import jax

from tether._core import State
from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._core import variable as _variable
from tether._core.structure import Structure, Survey, mapped
from tether._core.variable import Not, Variable
from tether._modules.attributes import MISSING, install_attributes, seal, sealed_error, set_attribute, short
from tether._modules.call import wrapped_call
from tether._modules.contract import Contract, contract_of, convert, field, read_class
from tether.errors import ArgumentError, DeclarationError, LostUpdateWarning, SealedError, describe


class Info:
    """What the library knows of one module object, kept apart from its attributes."""

    __slots__ = (
        "__weakref__",
        "birth",
        "explicit",
        "frozen",
        "label",
        "sealed",
        "settled",
        "stacked",
        "structure",
        "token",
        "training",
        "variables",
        "views",
    )

    def __init__(self) -> None:
        self.sealed = False
        self.training, self.explicit = True, False
        self.frozen: frozenset[str] = frozenset()
        self.stacked = 0
        self.label = ""
        self.birth = next(_frame.births)
        self.structure: Structure | None = None
        self.settled: bool | None = None  # whether no Variable was born in a trace
        self.variables: tuple[Variable, ...] = ()
        self.views: dict[Any, Any] = {}
        self.token: Any = None  # views of one kind share one, whose identity stands for them in caches

    def flags(self) -> tuple[Any, ...]:
        return (self.training, self.explicit, self.frozen, self.stacked)

    def restore(self, flags: tuple[Any, ...]) -> None:
        self.training, self.explicit, self.frozen, self.stacked = flags
        self.sealed = True


def adopt(module: Module) -> None:
    """Finishes a module that was put together of parts: its classes read their cells, its parts know their paths."""
    for _, part in each_module(module):
        install_attributes(part)
    label(module)


def _flatten(module: Any) -> tuple[list[Any], Structure]:
    structure, info = structure_of(module), module._tether
    if info.settled is None:
        info.settled = all(map(_frame.is_settled, info.variables))
    return _frame.gather(info.variables, info.settled), structure


def _flatten_with_keys(module: Any) -> tuple[list[Any], Structure]:
    values, structure = _flatten(module)
    return [(jax.tree_util.GetAttrKey(path), v) for path, v in zip(structure.paths, values, strict=True)], structure


def _unflatten(_: type, structure: Structure, values: Any) -> Module:
    home = _variable.birthplace()
    variables = structure.variables(list(values), home=home)
    if home is not None and _trace.is_handed_by_jax():
        handed = _Handed(home)
        for variable in variables:
            variable.handed = handed
    return structure.build(variables)


class _Handed:
    """For the Variables of a module that a plain transformation got by value: which writes nobody has seen."""

    __slots__ = ("_home", "_line", "_unseen")

    def __init__(self, home: Any):
        self._home, self._line = home, ""
        self._unseen: dict[str, None] = {}

    def wrote(self, variable: Variable) -> None:
        if isinstance(variable, State):
            self._unseen[variable.describe()], self._line = None, _trace.user_line()

    def read(self, variable: Variable) -> None:
        self._unseen.pop(variable.describe(), None)

    def __del__(self) -> None:
        if self._unseen and _trace.current() is self._home():  # else an exception ended the trace
            paths = list(self._unseen)
            filename, _, line = self._line.rpartition(":")
            message = (
                "a module was passed by value to a plain JAX transformation, and what was written to it is lost.\n"
                f"  at:       {', '.join(paths[:3])}{' and more' if len(paths) > 3 else ''}\n"
                "  fix:      a Tether transformation (tether.jit, tether.grad, ...), where the module is the caller's; "
                "or return the module, and use what comes back"
            )
            warnings.warn_explicit(message, LostUpdateWarning, filename, int(line))


class ModuleMeta(abc.ABCMeta):
    """Wraps ``__call__``, and seals and checks what a constructor built when the outermost one returns."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        read_class(name, bases, namespace)
        if callable(namespace.get("__call__")):
            namespace["__call__"] = wrapped_call(namespace["__call__"])
        cls = super().__new__(mcs, name, bases, namespace, **options)
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_keys, functools.partial(_unflatten, cls), flatten_func=_flatten
        )
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        contract = contract_of(cls)
        outer, thread = _frame.thread.constructing, _frame.thread
        building = thread.constructing = [] if outer is None else outer
        try:
            module = super().__call__(*args, **kwargs)
            if contract.fields:
                convert(module, contract)
        finally:
            thread.constructing = outer
        if outer is None:
            due = [part for part in building if contract_of(type(part)).checks and not part._tether.sealed]
            for part in building:
                seal(part)
            for part in reversed(due):  # parts before what holds them, and no copy, which was sealed before
                for check in contract_of(type(part)).checks:
                    check(part)
            label(module)
        return module

    def __invert__(cls) -> Not:
        return Not(cls)

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # which the __call__ above would hide
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@dataclass_transform(field_specifiers=(dataclasses.field, field))
class _Typed:
    """Nothing; lets type checkers accept ``@dataclass`` modules."""

    __slots__ = ()


class Module(_Typed, metaclass=ModuleMeta):
    """Base of every layer and model.

    Assign Variables, modules, lists, tuples or dicts of them, and hashable settings in ``__init__``; define
    ``__call__``. Every module takes ``training=`` and ``key=`` when it is called: they hold for all below it.

    Example:
        >>> class Scale(tether.Module):
        ...     def __init__(self, size):
        ...         self.weight = tether.Param(jnp.ones(size))
        ...     def __call__(self, x):
        ...         return x * self.weight
        >>> Scale(3)(jnp.arange(3.0)).tolist()
        [0.0, 1.0, 2.0]
    """

    __slots__ = ("__dict__", "__weakref__", "_tether")
    _tether: Info
    _transparent_: ClassVar[tuple[str, ...]] = ()
    _contract_: ClassVar[Contract | None]

    def __new__(cls, *_: Any, **__: Any) -> Any:
        module = super().__new__(cls)
        info = Info()
        object.__setattr__(module, "_tether", info)
        if _frame.thread.constructing is not None:
            _frame.thread.constructing.append(module)
        return module

    @property
    def training(self) -> bool:
        """The mode in force: a part's own, else that of the call around, else that of the view."""
        info, around = self._tether, _frame.thread.training
        return info.training if info.explicit or around is None else around

    @training.setter
    def training(self, value: bool) -> None:
        if self._tether.sealed:
            raise SealedError(
                "the mode of a finished module can't be assigned.",
                at=f"{self._tether.label or 'the module itself'}  ({type(self).__name__})",
                got=f"training = {value!r}",
                fix=["model.eval() and model.train() are views in a mode", "model(x, training=False) for one call"],
            )
        self._tether.training = bool(value)

    def eval(self) -> Any:
        """A view in evaluation mode; parts that were set explicitly keep theirs."""
        return _view.make_view(self, None, {"training": False}, depth=1)

    def train(self) -> Any:
        """A view in training mode; parts that were set explicitly keep theirs."""
        return _view.make_view(self, None, {"training": True}, depth=1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_tether":
            object.__setattr__(self, name, value)
        else:
            set_attribute(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self._tether.sealed:
            raise sealed_error(self, name, MISSING)
        if name not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        del vars(self)[name]

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *vars(self)} - {"_tether"})

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        fields = (f"{name}={short(stored)}" for name, stored in vars(self).items())
        return f"{type(self).__name__}({', '.join(fields)})"

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        walk = survey(self)
        variables = [copy.deepcopy(variable, memo) for variable in walk.variables]
        new = structure_of(self).build(variables, [copy.deepcopy(reference, memo) for reference in walk.references])
        memo.update(zip(walk.modules, (part for _, part in survey(new).modules.values()), strict=True))
        for target, reference in memo.get("references", ()):
            reference.target = memo.get(target)
        return new

    def __getstate__(self) -> Any:
        fields = {name: mapped(stored, _picklable) for name, stored in vars(self).items()}
        return fields, self._tether.flags(), self._tether.sealed, self._tether.label

    def __setstate__(self, state: Any) -> None:
        fields, flags, sealed, path = state
        self._tether.restore(flags)
        self._tether.sealed, self._tether.label = sealed, path
        vars(self).update(fields)
        install_attributes(self)


class _ByName:
    """A setting that pickle can't hold, such as ``jax.nn.relu``, by the name under which it is imported."""

    def __init__(self, value: Any):
        self.module, self.name = value.__module__, value.__qualname__

    def __reduce__(self) -> Any:
        return _imported, (self.module, self.name)


def _imported(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def _picklable(setting: Any) -> Any:
    """A setting as pickle can hold it: an object of a library by its name, everything else as it is."""
    if not callable(setting) or isinstance(setting, type | types.FunctionType | types.BuiltinFunctionType):
        return setting
    try:
        return _ByName(setting) if _imported(setting.__module__, setting.__qualname__) is setting else setting
    except (AttributeError, ImportError, TypeError):
        return setting


def survey(module: Module) -> Survey:
    """One walk over a module's objects."""
    if not isinstance(module, Module):
        raise ArgumentError("a Module was expected.", got=describe(module), expected="a Module")
    if not module._tether.sealed:
        raise DeclarationError(
            "a module is used as a tree before its constructor has returned.",
            at=type(module).__name__,
            fix="do this after construction, or in a function that takes the finished module",
        )
    return Survey(module)


def structure_of(module: Module) -> Structure:
    """The Structure of a module; its Variables then stand in ``module._tether.variables``, in order."""
    info = getattr(module, "_tether", None)
    if info is None or info.structure is None:
        walk = survey(module)
        info = module._tether
        info.variables, info.structure = tuple(walk.variables), walk.structure()
    return info.structure


def variables_of(module: Module) -> tuple[Variable, ...]:
    """The distinct Variables of a module, in the order of its leaves."""
    structure_of(module)
    return module._tether.variables


def replace_values(module: Module, values: dict[Variable, Any]) -> Module:
    """A copy (a value): new Variables, with the given values, whatever they are, and the current ones of the rest."""
    structure = structure_of(module)
    all_values = [values[v] if v in values else _frame.read(v) for v in variables_of(module)]
    return structure.build(structure.variables(all_values, home=_variable.birthplace()))


def label(module: Module) -> None:
    """Names every part of a finished module by its path from here, for messages and named scopes."""
    walk = survey(module)
    module._tether.variables, module._tether.structure = tuple(walk.variables), walk.structure()
    for variable, path in walk.variables.items():
        variable.label = path
    for path, part in walk.modules.values():
        part._tether.label = path


def each_module(module: Module) -> Iterator[tuple[str, Module]]:
    """Every distinct module with its path, the module itself first, under ''."""
    yield from survey(module).modules.values()


from tether._modules import views as _view  # noqa: E402  (views are built of the Module defined above)
