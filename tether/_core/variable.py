# SPDX-License-Identifier: Apache-2.0
"""Variables: cells that hold one array each, and the kinds of them.

A write keeps shape and dtype (weak type stripped) and, outside transformations, the device. Where a
value is found and where a write goes is the business of ``frame``.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether.errors import ArgumentError, DtypeError, SealedError, ShapeError, describe

_REDUCTIONS = ("mean", "sum", "discard")


class Not:
    """Everything that a selection doesn't name; ``~select`` makes it."""

    __slots__ = ("select",)

    def __init__(self, select: Any):
        self.select = select

    def __invert__(self) -> Any:
        return self.select

    def __repr__(self) -> str:
        return f"~{self.select!r}"


class Kind(type):
    """Class of the Variable kinds, so that a selection can say ``~Param``."""

    def __invert__(cls) -> Not:
        return Not(cls)


class Variable(_frame.Slot, metaclass=Kind):
    """A cell that holds one array.

    In a constructor, ``self.weight = Param(init)`` declares it; afterwards the attribute reads and writes the
    array. A pytree makes one cell for each leaf, and the attribute reads as the pytree.

    Args:
        value: Array, scalar, or pytree of those; copied.
        reduce: For a write that differs from lane to lane under vmap: "mean", "sum" or "discard".
    Raises:
        ArgumentError: ``reduce`` is none of those.
        DtypeError: ``value`` is not an array.
    Example:
        >>> calls = tether.State(0)
        >>> calls.value = calls.value + 1
        >>> int(calls.value)
        1
    """

    __slots__ = ("__weakref__", "birth", "captured", "handed", "home", "impl", "label", "reduce", "stopped", "where")

    birth: float
    captured: bool  # whether a plain trace, in the one that it was born in, closed over its value
    handed: Any  # in a module that came by value into a plain transformation: notes writes, and reads after them
    impl: Any  # of typed keys, whose data the slot holds
    home: Any  # weak reference to the trace that it was born in
    label: str
    reduce: str | None
    stopped: Any  # weak reference to the plain trace whose tangent a write dropped
    where: str
    leaves_only = False  # whether it is written and never read: each row of what is written to it leaves, stacked

    if TYPE_CHECKING:
        # What an annotated attribute is for a type checker: after `self.w = Param(x)` the attribute is an array.
        def __new__(cls, value: Any, *, reduce: str | None = None) -> jax.Array: ...
        @property
        def value(self) -> Any: ...
        @value.setter
        def value(self, new: Any) -> None: ...
    else:

        def __new__(cls, value, *, reduce=None):
            if reduce is not None and reduce not in _REDUCTIONS:
                raise ArgumentError(
                    f"{cls.__name__}: no such reduction over lanes.",
                    got=repr(reduce),
                    expected=" or ".join(map(repr, _REDUCTIONS)),
                )
            leaves, treedef = jax.tree.flatten(value)
            if treedef == jax.tree.structure(0):
                return cls.make(_own_array(cls, value), reduce=reduce)
            return Cells(treedef, [cls.make(_own_array(cls, leaf), reduce=reduce) for leaf in leaves])

        @property
        def value(self):
            """The value as seen from here; writing it keeps shape and dtype."""
            return _frame.read(self)

        @value.setter
        def value(self, new):
            assign(self, new)

    @classmethod
    def make(cls, value: Any, *, reduce: str | None = None, label: str = "", home: Any = None) -> Variable:
        """A cell that holds ``value`` as it is: an array, or anything that a tree function put there."""
        variable = object.__new__(cls)
        _frame.keep(variable, value)
        variable.birth = next(_frame.births)
        variable.reduce, variable.label = reduce, label
        variable.home = home if home is not None else birthplace()
        variable.stopped = variable.handed = None
        variable.captured = False
        variable.where = _trace.user_line() if variable.home is not None else ""
        return variable

    def describe(self) -> str:
        """Path and kind, for a message."""
        return f"{self.label or 'a Variable of no module'}  ({type(self).__name__})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({describe(_frame.held(self))}{', ' + self.label if self.label else ''})"

    def __deepcopy__(self, memo: dict[Any, Any]) -> Variable:
        return type(self).make(own_copy(_frame.read(self)), reduce=self.reduce, label=self.label)

    def __copy__(self) -> Variable:
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        value = _frame.read(self)
        if is_key(value):
            value = _KeyData(str(jax.random.key_impl(value)), np.asarray(jax.random.key_data(value)))
        return _restore, (type(self), value, self.reduce, self.label)


class Param(Variable):
    """A trainable array: gradients and optimizers take these."""

    __slots__ = ()


class State(Variable):
    """An array that forward passes write: statistics, caches, counters."""

    __slots__ = ()


class Constant(Variable):
    """An array that nobody writes; only ``tether.update`` and ``tether.place`` give it another value."""

    __slots__ = ()


class Rng(Variable):
    """A stream of PRNG keys.

    Args:
        value: A typed or legacy key, or a seed.
    Example:
        >>> rng = tether.Rng(0)
        >>> noise = jax.random.normal(tether.random.draw(rng), (3,))
    """

    __slots__ = ()

    if not TYPE_CHECKING:

        def __new__(cls, value, *, reduce=None):
            return super().__new__(cls, as_key(value), reduce=reduce)


class Cells:
    """The cells of a ``State(pytree)``: reads as the pytree, written whole."""

    __slots__ = ("treedef", "variables")

    def __init__(self, treedef: Any, variables: list[Variable]):
        self.treedef, self.variables = treedef, tuple(variables)

    @property
    def value(self) -> Any:
        """The pytree as seen from here; it is written whole."""
        return self.read()

    @value.setter
    def value(self, tree: Any) -> None:
        self.assign(tree)

    def read(self) -> Any:
        return jax.tree.unflatten(self.treedef, [_frame.read(variable) for variable in self.variables])

    def assign(self, tree: Any) -> None:
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ShapeError(
                "a write changes the structure of a State made of a pytree.",
                at=self.variables[0].describe() if self.variables else None,
                got=str(treedef),
                expected=str(self.treedef),
                fix="write a pytree of the declared structure",
            )
        values = [coerced(variable, leaf) for variable, leaf in zip(self.variables, leaves, strict=True)]
        _frame.write_back(self.variables, values)


class _KeyData:
    """A typed key as pickle can hold it."""

    def __init__(self, impl: str, data: np.ndarray):
        self.impl, self.data = impl, data


def _restore(cls: type[Variable], value: Any, reduce: str | None, label: str) -> Variable:
    if isinstance(value, _KeyData):
        value = jax.random.wrap_key_data(jnp.asarray(value.data), impl=value.impl)
    return cls.make(value, reduce=reduce, label=label)


def birthplace() -> Any:
    """The trace that something made now belongs to, as a weak reference; None outside all traces."""
    trace = _trace.current()
    return None if trace is _trace.EVALUATING else weakref.ref(trace)


def is_key(value: Any) -> bool:
    """Whether the value is an array of typed PRNG keys."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def as_key(value: Any, at: str | None = None) -> Any:
    """A typed key of a typed key, a legacy key or a seed."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return jax.random.key(int(value))
    if is_key(value):
        return value
    if getattr(value, "dtype", None) == np.uint32 and np.ndim(value) >= 1:
        return jax.random.wrap_key_data(jnp.asarray(value))
    raise DtypeError.no_key(at, describe(value))


def own_copy(value: Any) -> Any:
    """The same value in a buffer of its own, so that a donated step can't delete it."""
    return jnp.array(value, copy=True) if isinstance(value, jax.Array) and _trace.owner(value) is None else value


def _own_array(cls: type, value: Any) -> Any:
    if isinstance(value, Variable):
        value = _frame.read(value)
    if isinstance(value, jax.core.Tracer):
        return strong(value)
    try:
        return strong(jnp.array(value, copy=True))
    except (TypeError, ValueError) as error:
        raise DtypeError.no_array(cls.__name__, describe(value)) from error


def strong(value: Any) -> Any:
    """The array without weak type: ordinary arithmetic with it keeps its dtype."""
    return jax.lax.convert_element_type(value, value.dtype) if getattr(value, "weak_type", False) else value


def assign(variable: Variable, new: Any) -> None:
    """A user's write: checked against the current value, then written where it belongs."""
    if isinstance(variable, Constant):
        raise SealedError(
            "a Constant can't be written.",
            at=variable.describe(),
            got=describe(new),
            fix=[
                "declare a State, if forward passes write it",
                "tether.update(model, {path: value}) to load another value",
            ],
        )
    _frame.write(variable, coerced(variable, new))


def coerced(variable: Variable, new: Any) -> Any:
    """``new`` as an array of the shape and dtype that the Variable has now, or an error."""
    old = _frame.peek(variable)
    if not (hasattr(old, "shape") and hasattr(old, "dtype")):
        return new  # a cell of specs or masks: a value put there by a tree function
    if isinstance(new, Variable):
        raise DtypeError.a_cell(variable.describe(), type(new).__name__, describe(old))
    if is_key(old) and not is_key(new):
        new = as_key(new, at=variable.describe())
    elif not isinstance(new, jax.Array):
        new = _as_array(variable, new, old)
    if new.shape != old.shape:
        raise ShapeError(
            "a write changes the shape of a Variable.",
            at=variable.describe(),
            got=describe(new),
            expected=describe(old),
            fix="write an array of the declared shape, or declare the shape that you need",
        )
    if new.dtype != old.dtype:
        new = _cast(variable, new, old)
    new = strong(new)
    return _on_same_device(old, new)


def _as_array(variable: Variable, new: Any, old: Any) -> Any:
    is_whole = isinstance(new, int) and not isinstance(new, bool) and jnp.issubdtype(old.dtype, jnp.integer)
    try:
        return jnp.asarray(np.asarray(new, old.dtype) if is_whole else new)
    except (TypeError, ValueError, OverflowError) as error:
        raise _lossy(variable, new, old, [f"an array or number that fits {old.dtype}"]) from error


_KINDS = (jnp.bool_, jnp.unsignedinteger, jnp.signedinteger, jnp.floating, jnp.complexfloating)


def _rank(dtype: Any) -> int:
    return next((rank for rank, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), len(_KINDS))


def _cast(variable: Variable, new: Any, old: Any) -> Any:
    if _rank(new.dtype) <= _rank(old.dtype) < len(_KINDS):
        return new.astype(old.dtype)
    how = "cast it yourself, and say how: .astype(...), jnp.round(...)"
    raise _lossy(variable, new, old, [f"write a value of dtype {old.dtype}", how], "'s dtype")


def _lossy(variable: Variable, new: Any, old: Any, fix: list[str], part: str = "") -> DtypeError:
    what = f"a write would lose what the Variable{part} can't hold."
    return DtypeError(what, at=variable.describe(), got=describe(new), expected=describe(old), fix=fix)


def _on_same_device(old: Any, new: Any) -> Any:
    concrete = isinstance(old, jax.Array) and _trace.owner(old) is None and _trace.owner(new) is None
    if concrete and not old.is_deleted() and old.committed and new.sharding != old.sharding:
        return jax.device_put(new, old.sharding)
    return new
