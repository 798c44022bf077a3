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
import inspect
import reprlib
from collections.abc import Callable, Iterator
from typing import Any, dataclass_transform

import jax
import numpy as np

from tether._core import frame as _frame
from tether._core import variable as _variable
from tether._core.structure import (
    FrozenDict,
    Reference,
    Static,
    Structure,
    Survey,
    contains,
    holds_cells_or_modules,
    mapped,
    materialized,
    picklable,
    static_key,
)
from tether._core.variable import Cells, Not, Rng, Variable
from tether.errors import (
    ArgumentError,
    DeclarationError,
    SealedError,
    StackedError,
    StateLostError,
    TetherError,
    describe,
)

_MISSING: Any = object()


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


class CellAttribute:
    """The class-level descriptor of an attribute that holds a cell in some instance."""

    def __init__(self, name: str, default: Any):
        self.name, self.default = name, default

    def __get__(self, module: Any, owner: type) -> Any:
        stored = self.default if module is None else vars(module).get(self.name, self.default)
        if stored is not _MISSING:
            return stored if module is None else materialized(stored)
        if module is None:
            return self
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}", name=self.name, obj=module)

    def __set__(self, module: Any, value: Any) -> None:
        Module.__setattr__(module, self.name, value)  # not the class's own: that of a frozen dataclass refuses


def adopt(module: Module) -> None:
    """Finishes a module that was put together of parts: its classes read their cells, its parts know their paths."""
    for _, part in each_module(module):
        for name, stored in vars(part).items():
            if _needs_descriptor(stored):
                _install(type(part), name)
    label(module)


def _flatten(module: Any) -> tuple[list[Any], Structure]:
    structure, info = structure_of(module), module._tether
    if info.settled is None:
        info.settled = all(variable.home is None for variable in info.variables)
    return _frame.gather(info.variables, info.settled), structure


def _flatten_with_keys(module: Any) -> tuple[list[Any], Structure]:
    values, structure = _flatten(module)
    return [(jax.tree_util.GetAttrKey(path), v) for path, v in zip(structure.paths, values, strict=True)], structure


def _unflatten(_: type, structure: Structure, values: Any) -> Module:
    return structure.build(structure.variables(list(values), home=_variable.birthplace()))


class ModuleMeta(abc.ABCMeta):
    """Wraps ``__call__``, and seals what a constructor built when the outermost one returns."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        if callable(namespace.get("__call__")):
            namespace["__call__"] = _wrapped_call(namespace["__call__"])
        cls = super().__new__(mcs, name, bases, namespace, **options)
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_keys, functools.partial(_unflatten, cls), flatten_func=_flatten
        )
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        outer, thread = _frame.thread.constructing, _frame.thread
        building = thread.constructing = [] if outer is None else outer
        try:
            module = super().__call__(*args, **kwargs)
        finally:
            thread.constructing = outer
        if outer is None:
            for part in building:
                _seal(part)
            label(module)
        return module

    def __invert__(cls) -> Not:
        return Not(cls)


@dataclass_transform(field_specifiers=())
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
    _transparent_: tuple[str, ...] = ()

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
        elif (
            name in vars(self) and contains(vars(self)[name], modules=False) and not isinstance(value, Variable | Cells)
        ):
            _write(self, name, value)
        elif hasattr(inspect.getattr_static(type(self), name, None), "__set__") and not _is_cell_name(type(self), name):
            object.__setattr__(self, name, value)
        elif self._tether.sealed:
            raise _sealed_error(self, name, value)
        else:
            _declare(self, name, value)

    def __delattr__(self, name: str) -> None:
        if self._tether.sealed:
            raise _sealed_error(self, name, _MISSING)
        if name not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        del vars(self)[name]

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *vars(self)} - {"_tether"})

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        fields = (f"{name}={_short(stored)}" for name, stored in vars(self).items())
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
        fields = {name: mapped(stored, picklable) for name, stored in vars(self).items()}
        return fields, self._tether.flags(), self._tether.sealed, self._tether.label

    def __setstate__(self, state: Any) -> None:
        fields, flags, sealed, path = state
        self._tether.restore(flags)
        self._tether.sealed, self._tether.label = sealed, path
        vars(self).update(fields)
        for name, stored in fields.items():
            if _needs_descriptor(stored):
                _install(type(self), name)


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


def _seal(module: Module) -> None:
    fields = vars(module)
    for name, stored in fields.items():
        fields[name] = stored = _sealed_value(stored, f"{type(module).__name__}.{name}")
        if _needs_descriptor(stored):
            _install(type(module), name)
    module._tether.sealed = True


def _sealed_value(stored: Any, name: str) -> Any:
    """A container as it stays: lists as tuples, dicts read-only, nothing undeclared inside."""
    if isinstance(stored, list):
        stored = tuple(stored)
    if isinstance(stored, tuple):
        items = [_sealed_value(item, f"{name}[{i}]") for i, item in enumerate(stored)]
        return type(stored)(*items) if hasattr(stored, "_fields") else tuple(items)
    if isinstance(stored, dict):
        keys = sorted(
            stored, key=lambda key: (type(key).__qualname__, key if isinstance(key, str | int) else repr(key))
        )
        return FrozenDict({key: _sealed_value(stored[key], f"{name}[{key!r}]") for key in keys})
    _check_declared(stored, name)
    if holds_cells_or_modules(stored):
        return mapped(stored, lambda item: _sealed_value(item, name))
    return stored


def _check_declared(value: Any, name: str) -> None:
    known = Module | Variable | Cells | Static | Reference
    if isinstance(value, (known, dict, list, tuple, type)):
        return  # what is inside a container is looked at when the module is sealed
    _check_nothing_hidden(value, name)
    is_ours = lambda part: isinstance(part, Module | Variable | Cells)
    arrays = [x for x in jax.tree.leaves(value, is_leaf=is_ours) if isinstance(x, jax.Array | np.ndarray | np.generic)]
    if arrays:
        attribute = name.rpartition(".")[2]
        raise DeclarationError(
            "an array in a module must say what it is.",
            at=name,
            got=describe(value),
            expected="Param (trained), State (written by forward passes) or Constant",
            fix=[f"self.{attribute} = tether.{kind}(...)" for kind in ("Param", "State", "Constant")],
        )


def _check_nothing_hidden(value: Any, name: str) -> None:
    """No module in a place that is no container: its Variables would be found by nobody."""
    if isinstance(value, set | frozenset | functools.partial):
        hides = contains(value, modules=True)
    elif inspect.isroutine(value) or dataclasses.is_dataclass(value):
        hides = False
    else:
        hides = any(contains(part, modules=True) for part in list(getattr(value, "__dict__", {}).values()))
    if hides:
        raise DeclarationError(
            "a module or Variable is hidden in something that is no container.",
            at=name,
            got=describe(value),
            expected="an attribute, or a list, tuple, dict or dataclass of modules and Variables",
            fix=[
                "hold it in a list or dict",
                f"derive {type(value).__name__} from tether.Module, or make it a dataclass",
            ],
        )


def _declare(module: Module, name: str, value: Any) -> None:
    """An assignment in a constructor."""
    _check_declared(value, f"{type(module).__name__}.{name}")
    if isinstance(value, Variable | Cells | Static | Reference):
        _install(type(module), name)
    vars(module)[name] = value


def _write(module: Module, name: str, value: Any) -> None:
    """An assignment to an attribute that holds cells: the arrays in them are written, all or none."""
    _check_not_tied_by_value(name, value)
    stored = vars(module)[name]
    if isinstance(stored, Variable):
        _variable.assign(stored, value)
        return
    if isinstance(stored, Cells):
        stored.assign(value)
        return
    cells, treedef = jax.tree.flatten(_plain(stored))
    new, new_treedef = jax.tree.flatten(_plain(value))
    if new_treedef != treedef or any(isinstance(item, Module) for item in new):
        raise _sealed_error(module, name, value)
    pairs = [(cell, item) for cell, item in zip(cells, new, strict=True) if isinstance(cell, Variable)]
    settings = [(old, item) for old, item in zip(cells, new, strict=True) if not isinstance(old, Variable)]
    if any(old is not item and static_key(old) != static_key(item) for old, item in settings):
        raise _sealed_error(module, name, value)
    values = [_variable.coerced(cell, item) for cell, item in pairs]
    for (cell, _), item in zip(pairs, values, strict=True):
        _frame.write(cell, item)


def _plain(stored: Any) -> Any:
    if isinstance(stored, tuple | list):
        return [_plain(item) for item in stored]
    if isinstance(stored, dict):
        return {key: _plain(item) for key, item in stored.items()}
    if dataclasses.is_dataclass(stored) and not isinstance(stored, type | Module):
        return {field.name: _plain(getattr(stored, field.name)) for field in dataclasses.fields(stored)}
    return stored


def _check_not_tied_by_value(name: str, value: Any) -> None:
    """In a constructor, assigning another cell's very array is meant as a tie and would be none."""
    if not isinstance(value, jax.Array):
        return
    for part in _frame.thread.constructing or ():
        for source, stored in vars(part).items():
            if isinstance(stored, Variable) and stored._value is value:
                raise DeclarationError(
                    "a cell can't be tied to another by value.",
                    at=name,
                    got=f"the array of {type(part).__name__}.{source}",
                    expected="the cell itself, for one weight in two places; or a copy, for two weights",
                    fix=[
                        f"self.<part>.{name} = tether.cell(self.<part>, {source!r})",
                        f"self.<part>.{name} = jnp.array(...)",
                    ],
                )


def _needs_descriptor(stored: Any) -> bool:
    return isinstance(stored, Static) or contains(stored, modules=False)


def _is_cell_name(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), CellAttribute)


def _install(cls: type, name: str) -> None:
    if not _is_cell_name(cls, name):
        default = inspect.getattr_static(cls, name, _MISSING)
        type.__setattr__(cls, name, CellAttribute(name, default))


def _sealed_error(module: Module, name: str, value: Any) -> SealedError:
    path = f"{module._tether.label}.{name}".lstrip(".")
    if value is _MISSING:
        what, fix = "deleted", ["build the module without it"]
    elif name in vars(module):
        what, stored = "replaced", vars(module)[name]
        place = path if isinstance(stored, Module | Variable) else f"{path}[0]" if isinstance(stored, tuple) else path
        fix = [f"tether.replace(model, {{{place!r}: new}}) makes a model with that part replaced, sharing the rest"]
        if not contains(stored, modules=True):
            fix = [f"tether.view(model, {name}=...) makes a view with another setting"]
    else:
        what, fix = "added", [f"assign self.{name} in __init__ (a State, if forward passes write it)"]
    return SealedError(
        f"an attribute of a finished module can't be {what}: its structure is fixed.",
        at=f"{path}  (of {type(module).__name__})",
        got=None if value is _MISSING else describe(value),
        expected="a write to an attribute that holds a cell",
        fix=fix,
    )


def _short(stored: Any) -> str:
    if isinstance(stored, tuple):
        return f"({', '.join(map(_short, stored))})"
    if isinstance(stored, Cells):
        return repr(jax.tree.unflatten(stored.treedef, stored.variables))
    return getattr(stored, "__qualname__", None) or repr(stored)


def _wrapped_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """``__call__`` with ``training=`` and ``key=``, a named scope, and errors that say where."""
    takes = set(inspect.signature(call).parameters) & {"training", "key"}

    @functools.wraps(call)
    def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:
        thread = _frame.thread
        outer = thread.training, thread.stream
        try:
            if kwargs:
                _enter_call(thread, takes, kwargs)
            if self._tether.stacked:
                raise _stacked_error(self)
            with jax.named_scope(_scope_name(self)):
                return call(self, *args, **kwargs)
        except Exception as error:
            _say_deleted(error, self)
            _say_where(error, self, args)
            raise
        finally:
            thread.training, thread.stream = outer

    return __call__


def _enter_call(thread: Any, takes: set[str], kwargs: dict[str, Any]) -> None:
    training = kwargs.get("training") if "training" in takes else kwargs.pop("training", None)
    key = kwargs.get("key") if "key" in takes else kwargs.pop("key", None)
    if training is not None:
        thread.training = bool(training)
    if key is not None:
        thread.stream = Rng(key)


def _scope_name(module: Module) -> str:
    return (
        module._tether.label.rpartition(".")[2].replace("[", "_").replace("]", "").strip("_") or type(module).__name__
    )


def _say_where(error: Exception, module: Module, args: tuple[Any, ...]) -> None:
    """Gives an error of a layer its path, and any other one a note, at the innermost module alone."""
    where = f"{module._tether.label or 'the module itself'}  ({type(module).__name__})"
    if getattr(error, "_tether_said", False):
        return
    if isinstance(error, TetherError):
        error.at = error.at or where
    else:
        error.add_note(f"in {where}, called with {', '.join(map(describe, args)) or 'no positional arguments'}")
    error._tether_said = True  # type: ignore[attr-defined]


def _say_deleted(error: Exception, module: Module) -> None:
    """Turns JAX's word on a deleted array into an error with the path."""
    if not (isinstance(error, RuntimeError) and "deleted" in str(error)) or isinstance(error, TetherError):
        return
    values = [(variable, variable._value) for variable in variables_of(module)]
    lost = [v for v, value in values if _frame.is_deleted(value)]
    if lost:
        raise state_lost(lost) from error


def state_lost(variables: list[Variable]) -> StateLostError:
    """The error for Variables whose buffer a donated call consumed."""
    return StateLostError(
        "state was lost: its buffer was given away to a donated call.",
        at=", ".join(variable.describe() for variable in variables[:3]) + (" and more" if len(variables) > 3 else ""),
        got="an array that a donated call consumed, in a cell that it did not write",
        expected="an array of the cell's own",
        fix=[
            "tether.clone(model) or tether.snapshot(model) before the donated call: a plain tree map shares buffers",
            "tether.jit(f), without donate_state=True, keeps old buffers",
        ],
    )


def _stacked_error(module: Module) -> StackedError:
    return StackedError(
        "a stacked module was called as a single one: its leaves have an axis of members in front.",
        at=f"{module._tether.label or 'the module itself'}  ({type(module).__name__})",
        got=f"a module stacked {module._tether.stacked} time(s)",
        fix=["tether.vmap(lambda member, x: member(x))(modules, xs)", "tether.index(modules, 0)(x)"],
    )


def each_module(module: Module) -> Iterator[tuple[str, Module]]:
    """Every distinct module with its path, the module itself first, under ''."""
    yield from survey(module).modules.values()


from tether._core import views as _view  # noqa: E402  (views are built of the Module defined above)
